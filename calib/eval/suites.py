"""How much an evaluation measures."""

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from calib.model import fit_seq_len
from calib.recipe import EvaluationRecipe


@dataclass(frozen=True)
class Suite:
    """How much is measured; lengths in tokens."""

    calibration_samples: int
    documents: int
    seq_len: int
    prompts: int
    new_tokens: int
    passkey_tokens: tuple[int, ...]
    passkey_depths: tuple[float, ...]
    layer_documents: int
    long_tokens: int = 0  # one long document, as far as the model has positions; 0: none


SUITES = {
    "quick": Suite(12, 8, 256, 4, 24, (256,), (0.0, 0.5, 1.0), 2),
    "full": Suite(24, 12, 1024, 8, 48, (256, 1024), (0.0, 0.5, 1.0), 4, 8192),
}


def suite_of(recipe: EvaluationRecipe) -> Suite:
    """The suite that `recipe` names, with the documents that it asks for."""
    suite = SUITES[recipe.suite]
    return replace(
        suite,
        documents=recipe.samples or suite.documents,
        seq_len=recipe.seq_len or suite.seq_len,
    )


def fit_suite(config: PreTrainedConfig, suite: Suite, *, given: bool) -> tuple[Suite, list[str]]:
    """`suite` with documents that the model has positions for; see `fit_seq_len`."""
    seq_len, notes = fit_seq_len(config, suite.seq_len, given=given)
    return replace(suite, seq_len=seq_len), notes
