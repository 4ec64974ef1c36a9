"""From a data recipe to the token ids of each sample, with a fingerprint of exactly those."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calib.data.generated import GENERATED
from calib.data.sources import ignored, open_source
from calib.data.tokens import tokenize_rows
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class CalibrationData:
    """Everything the model will read, and where it came from."""

    samples: list[list[int]]
    source: str
    fingerprint: str  # sha256 of the token ids and of where samples begin
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples together."""
        return sum(len(sample) for sample in self.samples)


def load_data(
    recipe: DataRecipe,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
) -> CalibrationData:
    """Return up to `recipe.samples` samples of at most `recipe.seq_len` tokens.

    The same recipe, tokenizer and data give the same samples. `load_model` is called for the
    datasets 'self' and 'random' only, so that a bad dataset is found before weights are read.

    Raises:
        InputError: the dataset cannot be found, read or tokenised.
    """
    if recipe.dataset in GENERATED:
        generated = GENERATED[recipe.dataset]
        samples = generated.sample(recipe, tokenizer, load_model())
        warnings = (generated.warning, *ignored(recipe, "config", "split", "column"))
        return CalibrationData(samples, recipe.dataset, fingerprint(samples), warnings)
    source = open_source(recipe)
    samples, warnings = tokenize_rows(source.rows, tokenizer, recipe)
    warnings = (*source.warnings, *warnings)
    return CalibrationData(samples, source.name, fingerprint(samples), warnings)


def fingerprint(samples: Sequence[Sequence[int]]) -> str:
    """Return the sha256 of all ids, each sample preceded by its length."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(struct.pack(f"<{len(sample) + 1}q", len(sample), *sample))
    return digest.hexdigest()
