"""Text of other kinds than the evaluation's own: which, its documents, and the measurement."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from calib.choices import REFERENCE
from calib.data import CalibrationData, check_dataset, dataset_key, load_data
from calib.data.builtin import BUILTIN, LONG
from calib.errors import InputError
from calib.evaluate.held_out import Readers, hold_out
from calib.evaluate.inputs import RANDOM_SAMPLES
from calib.evaluate.layer_errors import Clipped, anywhere, clipped_layer, count_clipped
from calib.evaluate.measure import Measured, compare_variants
from calib.evaluate.report import Differs, Events, Figure, OtherRow, OtherText, Row, Suite, not_finite
from calib.evaluate.statistics import Divergence, Values, difference, estimate, perplexity
from calib.evaluate.variants import Setup, Variant
from calib.models.config import model_positions
from calib.models.load import check_token_ids
from calib.recipe import DataRecipe, Recipe

ALL = "all"
_DOMAINS = (*BUILTIN, "random")
_LEAST = 2  # documents: an interval needs them
_LONGER = 4  # times the suite's length, of half as many documents


class OtherDocuments(NamedTuple):
    """Documents of one dataset."""

    data: CalibrationData
    documents: Sequence[Tensor]  # [T] each


class MeasuredElsewhere(NamedTuple):
    """What was measured on other text."""

    text: OtherDocuments
    divergences: dict[str, list[Divergence]]  # of each document, by variant and the reference
    clipped: dict[str, dict[int, Clipped]]  # by variant and layer_idx


def wanted_datasets(recipe: Recipe) -> dict[str, bool]:
    """Datasets of `evaluation.also`, and whether each was named; InputError where one cannot be."""
    asked, own = recipe.evaluation.also, recipe.evaluation.dataset or recipe.data.dataset
    named = [name for name in asked if name != ALL]
    known: dict[str, str] = {}
    for name in named:
        check_dataset(name)
        key = dataset_key(name)
        if first := known.get(key):
            other = f" (also as '{first}')" if first != name else ""
            raise InputError(f"--also '{name}' is given twice{other}; give every dataset once")
        if key == dataset_key(own):
            raise InputError(f"--also '{name}' is what is evaluated on already; give another")
        known[key] = name
    every = _DOMAINS if ALL in asked else ()
    return {name: name in named for name in (*named, *every) if name != own}


def load_other_texts(
    setup: Setup, recipe: Recipe, suite: Suite, readers: Readers
) -> tuple[list[OtherDocuments], list[str]]:
    """Load what `evaluation.also` asks for, without what `readers` know.

    Text that cannot be had is refused where it was named, and else left out with a warning.
    """
    found, warnings = [], []
    for dataset, named in wanted_datasets(recipe).items():
        try:
            text, more = _load(setup, recipe, dataset, suite, readers)
        except InputError as error:
            if named:
                raise InputError(f"--also '{dataset}': {error}") from None
            warnings.append(f"--also {ALL}: '{dataset}' is left out: {error}")
            continue
        found.append(text)
        warnings += more
    return found, warnings


def _load(
    setup: Setup, recipe: Recipe, dataset: str, suite: Suite, readers: Readers
) -> tuple[OtherDocuments, list[str]]:
    seq_len, documents = suite.seq_len, suite.documents
    if dataset == LONG:
        positions = model_positions(setup.model.config) or _LONGER * seq_len
        seq_len, documents = min(_LONGER * seq_len, positions), max(_LEAST, documents // 2)
    asked = DataRecipe(dataset=dataset, seed=recipe.data.seed, seq_len=seq_len)

    def load(samples: int) -> CalibrationData:
        wanted = asked.model_copy(update={"samples": samples})
        return load_data(wanted, setup.tokenizer, lambda: setup.model)

    # the variant of that name has read the first
    own = RANDOM_SAMPLES if dataset == "random" else 0
    data, samples, warnings = hold_out(load, readers, own, documents, _LEAST)
    check_token_ids(chain(*samples), setup.tokenizer, setup.model)
    warnings += [line for line in data.warnings if dataset not in ("random", "self")]
    return OtherDocuments(data, [torch.tensor(sample) for sample in samples]), warnings


def can_be_measured(variant: Variant) -> bool:
    """Whether a variant is scales that engines load, or that were given."""
    return variant.scales is not None and (variant.served or variant.kind == "given")


def check_other_texts(texts: Sequence[OtherDocuments], variants: Sequence[Variant]) -> None:
    """Refuse to read `texts` with nothing that engines load."""
    if texts and not any(map(can_be_measured, variants)):
        raise InputError("--also is measured with scales that engines load: give --scales or keep attn_head")


@torch.inference_mode()
def measure_other_texts(
    setup: Setup, texts: Sequence[OtherDocuments], variants: Sequence[Variant]
) -> list[MeasuredElsewhere]:
    """Read `texts` with the reference and with all scales that engines load or that were given."""
    kept = [variant for variant in variants if can_be_measured(variant)]
    return [_measure(setup, text, kept) for text in texts]


def _measure(setup: Setup, text: OtherDocuments, kept: Sequence[Variant]) -> MeasuredElsewhere:
    divergences: dict[str, list[Divergence]] = {}
    for token_ids in setup.progress.each(text.data.source, text.documents, "documents"):
        for name, divergence in compare_variants(setup, token_ids, kept).items():
            divergences.setdefault(name, []).append(divergence)
    return MeasuredElsewhere(text, divergences, count_clipped(setup, text.documents, kept))


# shares of tokens from which the verdict names a text
CLIPS, MOST = 0.01, 0.5
_NAMED = 3


def other_text(found: MeasuredElsewhere, measured: Mapping[str, Measured], floor: float) -> OtherText:
    """Figures of one text, of every cache that it was read with."""
    documents, data = found.text.documents, found.text.data
    nll = np.concatenate(_values(d.nll for d in found.divergences[REFERENCE]))
    return OtherText(
        dataset=data.source,
        fingerprint=data.fingerprint,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        ppl=perplexity(nll),
        variants={name: _row(found, measured[name], floor) for name in found.clipped},
    )


def _row(found: MeasuredElsewhere, own: Measured, floor: float) -> OtherRow:
    name, tensors = own.variant.name, own.variant.tensors
    here = _values(d.kl for d in found.divergences[name])
    there = _values(d.kl for d in own.documents)
    kl, apart = estimate(here), difference(here, there)
    layers = sorted(found.clipped[name].items())
    reason = not_finite([each.kl for each in found.divergences[name]])
    return OtherRow(
        kl=kl,
        difference=apart,
        differs=differs(apart, max(kl.high, estimate(there).high), floor),
        clipped=anywhere([layer.tokens for _, layer in layers], tensors),
        layers=[clipped_layer(idx, layer, tensors) for idx, layer in layers],
        **({"not_finite": reason} if reason else {}),
    )


def differs(apart: Figure, largest: float, floor: float) -> Differs:
    """Whether a KL differs; not where neither interval, up to `largest`, leaves the noise floor."""
    if not math.isfinite(apart.value):
        return "not finite"
    if largest <= floor or apart.low <= 0 <= apart.high:
        return "no measurable difference"
    return "higher" if apart.low > 0 else "lower"


def clips(here: Events, own: Events) -> bool:
    """Whether scales clip other text: over `CLIPS` of its tokens and surely more than of our own.

    Surely: the intervals of the two shares do not overlap. Over `MOST` of the tokens is enough
    alone: such scales clip every text.
    """
    return here.share > MOST or (here.share > CLIPS and here.low > own.high)


def clipping(texts: Sequence[OtherText], subject: str, row: Row, label: str) -> str:
    """Name the texts on which the subject's scales clip, in a sentence; empty where there are none.

    `row` has the subject's figures on the evaluation's own text, `label` is what it is called.
    """
    if row.clipped is None:
        return ""
    shares = {t.dataset: t.variants[subject].clipped for t in texts if subject in t.variants}
    named = {name: here for name, here in shares.items() if clips(here, row.clipped)}
    worst_first = sorted(named, key=lambda name: -named[name].share)
    if not worst_first:
        return ""
    listed = [f"{name} ({named[name].share:.1%} of tokens)" for name in worst_first[:_NAMED]]
    if more := worst_first[_NAMED:]:
        listed.append(f"{len(more)} more")
    return f"with {label}, K or V are clipped on {', '.join(listed)}; here {row.clipped.share:.1%}"


def _values(documents: Iterable[Tensor]) -> list[Values]:
    return [document.double().numpy() for document in documents]
