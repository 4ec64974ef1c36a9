"""Text of other kinds than the evaluation's own: which, its documents, and the measurement."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from calib.data import CalibrationData, check_dataset, dataset_key, load_data
from calib.data.builtin import BUILTIN, LONG
from calib.errors import InputError
from calib.eval.exceedance import Clipped, count_clipped
from calib.eval.held_out import Readers, hold_out
from calib.eval.inputs import RANDOM_SAMPLES
from calib.eval.reader import read
from calib.eval.schema import Suite
from calib.eval.statistics import Divergence
from calib.eval.variants import Setup, Variant
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
        for name, divergence in read(setup, token_ids, kept).items():
            divergences.setdefault(name, []).append(divergence)
    return MeasuredElsewhere(text, divergences, count_clipped(setup, text.documents, kept))
