"""How much an evaluation measures."""

from dataclasses import replace

from transformers import PreTrainedConfig

from calib.eval.schema import Suite
from calib.model.load import fit_seq_len
from calib.recipe import EvaluationRecipe

SUITES = {
    "quick": Suite(12, 8, 256, 4, 24, (256,), (0.0, 0.5, 1.0), 2),
    "full": Suite(24, 12, 1024, 8, 48, (256, 1024), (0.0, 0.5, 1.0), 4, 8192),
}


def fitting_suite(
    config: PreTrainedConfig, recipe: EvaluationRecipe, given: Suite | None
) -> tuple[Suite, list[str]]:
    """The suite `given`, or else the one that `recipe` names, with the documents it asks for.

    Documents are no longer than the model has positions; the second result notes where a length
    that nobody asked for was cut.

    Raises:
        InputError: a length that was asked for is more than the model has positions.
    """
    suite = given or SUITES[recipe.suite]
    asked = recipe.seq_len if given is None else given.seq_len
    wanted = asked or suite.seq_len
    seq_len, notes = fit_seq_len(config, wanted, given=asked is not None)
    documents = suite.documents if given else recipe.samples or suite.documents
    return replace(suite, documents=documents, seq_len=seq_len), notes
