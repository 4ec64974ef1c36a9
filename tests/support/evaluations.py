"""Evaluations whose measurements are replaced, or recomputed plainly; a recipe of all cache types."""

from copy import copy

import torch
from transformers import AutoModelForCausalLM

from calib.capture.loop import calibrate
from calib.data import load_data, make_batches
from calib.evaluate.variants import build_variants
from calib.models.load import load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe


def with_measured(evaluation, measured):
    changed = copy(evaluation)
    changed.measured = measured
    return changed


def caches_recipe(*variants):
    measured = {"evaluation.caches": ["all"], "evaluation.variants": [*variants]}
    return load_recipe(None, {"data.dataset": "random", "device": "cpu", "dtype": "float32", **measured})


def variants_of(model, *documents):
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    stats = calibrate(model, make_batches([document.tolist() for document in documents], 1, pad_id=0), recipe)
    return {variant.name: variant for variant in build_variants(stats, stats)}


def plain_inputs(evaluation):
    """Return the model in float32 in plain transformers, and the documents [1, T] of an evaluation."""
    path, suite = evaluation.checkpoint.path, evaluation.suite
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    samples = load_data(evaluation.recipe.data, load_tokenizer(find_model(str(path))), lambda: model).samples
    return model, [torch.tensor([sample]) for sample in samples[suite.calibration_samples :]]


@torch.inference_mode()
def plain_comparison(model, altered, *ids, **inputs):
    """Return the KL [T] that `altered` attention makes, and where the likeliest token is the same."""
    p = model(*ids, **inputs, use_cache=False).logits[0].double().log_softmax(-1)
    with altered:
        q = model(*ids, **inputs, use_cache=False).logits[0].double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
