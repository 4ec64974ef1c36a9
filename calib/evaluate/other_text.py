"""`--also`: text of other kinds than the evaluation's own, read with the same scales."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from calib.choices import REFERENCE
from calib.data import CalibrationData, MediaReader, check_dataset, dataset_key, load_data
from calib.data.builtin import BUILTIN, LONG, MORE_PICTURES, PICTURES
from calib.data.generated import GENERATED
from calib.errors import InputError
from calib.evaluate.held_out import HeldOut, Readers, hold_out
from calib.evaluate.inputs import RANDOM_SAMPLES
from calib.evaluate.layer_errors import Clipping, clipped_layer, count_events, read_layers
from calib.evaluate.measure import VariantResults, compare_variants
from calib.evaluate.report import (
    Differs,
    Events,
    Figure,
    ModalityRow,
    OtherRow,
    OtherText,
    Row,
    Suite,
    explain_not_finite,
)
from calib.evaluate.statistics import Divergence, difference, estimate, perplexity, to_numpy
from calib.evaluate.variants import Setup, Variant
from calib.models.config import model_positions
from calib.models.load import check_token_ids
from calib.recipe import DataRecipe, Recipe
from calib.scales.stats import MODALITIES

ALL = "all"
_DOMAINS = (*(name for name in BUILTIN if name not in (PICTURES, MORE_PICTURES)), "random")
_LEAST = 2  # documents: an interval needs them
_LONGER = 4  # times the suite's length, of half as many documents
# the verdict names a text where more than this share of its tokens is clipped, and more than of our own
_CLIPPED, _MOSTLY_CLIPPED = 0.01, 0.5
_NAMED = 3  # texts in the verdict


class OtherTextResults(NamedTuple):
    """Measurements on other text."""

    text: HeldOut
    divergences: dict[str, list[Divergence]]  # of each document, by variant and the reference
    clipped: dict[str, dict[int, Clipping]]  # by variant and layer_idx


def other_datasets(recipe: Recipe) -> dict[str, bool]:
    """Return the datasets of `evaluation.also`, and whether each was named; refuse names that cannot be."""
    also, own = recipe.evaluation.also, recipe.evaluation.dataset or recipe.data.dataset
    check_dataset(own)
    named: dict[str, str] = {}
    for name in (name for name in also if name != ALL):
        check_dataset(name)
        key = dataset_key(name)
        if first := named.get(key):
            path = f" (also as '{first}')" if first != name else ""
            raise InputError(f"--also '{name}' is given twice{path}; give every dataset once")
        if key == dataset_key(own):
            raise InputError(f"--also '{name}' is what is evaluated on already; give another")
        named[key] = name
    domains = [name for name in _DOMAINS if ALL in also and name not in (own, *named.values())]
    return dict.fromkeys(named.values(), True) | dict.fromkeys(domains, False)


def load_other_texts(
    setup: Setup, recipe: Recipe, suite: Suite, readers: Readers, media_reader: MediaReader
) -> tuple[list[HeldOut], list[str]]:
    """Load the texts of `evaluation.also`, without the documents that `readers` know; warnings as well.

    Text that cannot be had is refused where it was named, and else left out with a warning.
    """
    texts, warnings = [], []
    for dataset, is_named in other_datasets(recipe).items():
        try:
            text = _load_text(setup, recipe, dataset, suite, readers, media_reader)
        except InputError as error:
            if is_named:
                raise InputError(f"--also '{dataset}': {error}") from None
            warnings.append(f"--also {ALL}: '{dataset}' is left out: {error}")
        else:
            texts.append(text)
            warnings += text.warnings
    return texts, warnings


def _load_text(
    setup: Setup, recipe: Recipe, dataset: str, suite: Suite, readers: Readers, media_reader: MediaReader
) -> HeldOut:
    seq_len, documents = suite.seq_len, suite.documents
    if dataset == LONG:
        positions = model_positions(setup.model.config) or _LONGER * seq_len
        seq_len, documents = min(_LONGER * seq_len, positions), max(_LEAST, documents // 2)

    def load(samples: int) -> CalibrationData:
        own = ("seed",) if dataset in (*BUILTIN, *GENERATED) else ("seed", "images", "audio")
        settings = {name: getattr(recipe.data, name) for name in own}
        data = DataRecipe(dataset=dataset, seq_len=seq_len, samples=samples, **settings)
        return load_data(data, setup.tokenizer, lambda: setup.model, media_reader)

    # the variant of that name has read the first
    own = RANDOM_SAMPLES if dataset == "random" else 0
    held_out = hold_out(load, readers, own, documents, _LEAST)
    check_token_ids(chain.from_iterable(x.ids for x in held_out.pieces), setup.tokenizer, setup.model)
    warnings = [line for line in held_out.data.warnings if dataset not in GENERATED]
    return held_out._replace(warnings=[*held_out.warnings, *warnings])


def can_be_measured(variant: Variant) -> bool:
    """Return whether a variant is scales that engines load, or that were given."""
    return variant.scales is not None and (variant.is_loadable or variant.kind == "given")


def check_other_texts(texts: Sequence[HeldOut], variants: Sequence[Variant]) -> None:
    """Refuse to read `texts` with nothing that engines load."""
    if texts and not any(map(can_be_measured, variants)):
        raise InputError("--also is measured with scales that engines load: give --scales or keep attn_head")


@torch.inference_mode()
def measure_other_texts(
    setup: Setup, texts: Sequence[HeldOut], variants: Sequence[Variant]
) -> list[OtherTextResults]:
    """Read `texts` with the reference and with all scales that engines load or that were given."""
    variants = [variant for variant in variants if can_be_measured(variant)]
    measured = []
    for text in texts:
        divergences: dict[str, list[Divergence]] = {}
        for piece in setup.progress.each(text.data.source, text.pieces, "samples"):
            token_ids = torch.tensor(piece.ids)
            compared = setup.saved.once(compare_variants, setup, token_ids, variants, piece.media)
            for name, divergence in compared.items():
                divergences.setdefault(name, []).append(divergence)
        documents = [(torch.tensor(piece.ids), piece.media) for piece in text.pieces]
        clipped, _ = setup.saved.once(read_layers, setup, documents, variants, with_errors=False)
        measured.append(OtherTextResults(text, divergences, clipped))
    return measured


def summarize_text(
    elsewhere: OtherTextResults, measured: Mapping[str, VariantResults], floor: float
) -> OtherText:
    """Return the figures of one text, of every cache that it was read with."""
    documents, data = [piece.ids for piece in elsewhere.text.pieces], elsewhere.text.data
    nll = np.concatenate(to_numpy(d.nll for d in elsewhere.divergences[REFERENCE]))
    return OtherText(
        dataset=data.source,
        fingerprint=data.fingerprint,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        ppl=perplexity(nll),
        variants={name: _other_row(elsewhere, measured[name], floor) for name in elsewhere.clipped},
    )


def _other_row(elsewhere: OtherTextResults, measured: VariantResults, floor: float) -> OtherRow:
    name, tensors = measured.variant.name, measured.variant.tensors
    documents = [each.kl for each in elsewhere.divergences[name]]
    values, own = to_numpy(documents), to_numpy(each.kl for each in measured.documents)
    kl, distance = estimate(values), difference(values, own)
    layers = sorted(elsewhere.clipped[name].items())
    reason = explain_not_finite(documents)
    return OtherRow(
        kl=kl,
        difference=distance,
        differs=judge_difference(distance, max(kl.high, estimate(own).high), floor),
        clipped=count_events((layer for _, layer in layers), tensors),
        layers=[clipped_layer(idx, layer, tensors) for idx, layer in layers],
        **({"not_finite": reason} if reason else {}),
        **({"modalities": modalities} if (modalities := _modality_rows(elsewhere, name)) else {}),
    )


def _modality_rows(elsewhere: OtherTextResults, name: str) -> dict[str, ModalityRow]:
    """Return the figures of the tokens of text, and of those of pictures; nothing where all are of text."""
    rows = dict[str, ModalityRow]()
    pairs = zip(elsewhere.text.pieces, elsewhere.divergences[name], strict=True)
    samples = [(piece.media.modalities, each) for piece, each in pairs if piece.media]
    for number, modality in enumerate(MODALITIES):
        if places := [(each, is_it) for x, each in samples if (is_it := x == number).any()]:
            kl, top1 = ([getattr(each, x)[is_it] for each, is_it in places] for x in ("kl", "agrees"))
            figures = {"kl": estimate(to_numpy(kl)), "top1": estimate(to_numpy(top1))}
            rows[modality] = ModalityRow(tokens=sum(map(len, kl)), **figures)
    return rows


def judge_difference(distance: Figure, largest: float, floor: float) -> Differs:
    """Judge a difference of KLs, whose intervals end at `largest`: it is none below the noise floor."""
    if not math.isfinite(distance.value):
        return "not finite"
    if largest <= floor or distance.low <= 0 <= distance.high:
        return "no measurable difference"
    return "higher" if distance.low > 0 else "lower"


def is_clipped(text: Events, own: Events) -> bool:
    """Return whether scales clip a text: over 1 % of its tokens, and surely more than of our own.

    Surely: the intervals of the two shares do not overlap. Over half of the tokens is enough
    alone: such scales clip every text.
    """
    return text.share > _MOSTLY_CLIPPED or (text.share > _CLIPPED and text.low > own.high)


def modality_places(texts: Sequence[OtherText], subject: str) -> list[tuple[str, ModalityRow]]:
    """Return the figures of each modality with where it is, such as "on the pictures of DATASET"."""
    rows = [(text, text.variants[subject].modalities) for text in texts if subject in text.variants]
    return [(f"on the {name} of {text.dataset}", row) for text, own in rows for name, row in own.items()]


def name_clipped_texts(texts: Sequence[OtherText], subject: str, row: Row, label: str) -> str:
    """Name in a sentence the texts on which the subject's scales clip; "" where there are none.

    `row` has the subject's figures on the evaluation's own text, `label` is what it is called.
    """
    own = row.clipped
    if own is None:
        return ""
    events = {text.dataset: text.variants[subject].clipped for text in texts if subject in text.variants}
    shares = {name: text.share for name, text in events.items() if is_clipped(text, own)}
    if not shares:
        return ""
    worst_first = sorted(shares, key=lambda name: -shares[name])
    names = [f"{name} ({shares[name]:.1%} of tokens)" for name in worst_first[:_NAMED]]
    if len(shares) > _NAMED:
        names.append(f"{len(shares) - _NAMED} more")
    return f"with {label}, K or V are clipped on {', '.join(names)}; here {own.share:.1%}"
