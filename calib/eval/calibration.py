"""The scales that are compared: derived here on calibration samples, or given by the user."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.data import load_data, make_batches, resolve_batch_size
from calib.eval.suites import Suite
from calib.measure import calibrate
from calib.recipe import DataRecipe, ObserverRecipe, Recipe
from calib.stats import KVStats

_RANDOM_SAMPLES = 4


def evaluation_recipe(recipe: Recipe, suite: Suite) -> Recipe:
    """`recipe` with the suite's lengths, and everything collected that a variant may need."""
    data, other = recipe.data, recipe.evaluation.dataset
    if other is not None and other != data.dataset:
        data = DataRecipe(dataset=other, seed=data.seed)
    samples = suite.calibration_samples + suite.documents
    data = data.model_copy(update={"samples": samples, "seq_len": suite.seq_len})
    observer = ObserverRecipe(name="mse")  # its histogram is for a variant
    changes = {"data": data, "means": True, "targets": "qkv", "observer": observer}
    return recipe.model_copy(update=changes)


def calibrate_on(
    model: PreTrainedModel, samples: Sequence[Sequence[int]], recipe: Recipe
) -> KVStats:
    """Statistics of `samples`."""
    batch_size = resolve_batch_size(recipe.data, model.device.type)
    return calibrate(model, make_batches(samples, batch_size, pad_id=0), recipe)


def calibrate_on_random_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> KVStats:
    """Statistics of random token ids."""
    data = recipe.data.model_copy(update={"dataset": "random", "samples": _RANDOM_SAMPLES})
    return calibrate_on(model, load_data(data, tokenizer, lambda: model).samples, recipe)
