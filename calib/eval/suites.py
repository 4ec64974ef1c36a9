"""How much an evaluation measures."""

from dataclasses import replace

from calib.eval.schema import Suite
from calib.recipe import EvaluationRecipe

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
