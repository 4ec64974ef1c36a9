"""Evaluations whose measurements are replaced, and the recipe that measures all cache types."""

from copy import copy

from calib.recipe import load_recipe


def with_measured(evaluation, measured):
    """Return the evaluation with other measurements, by the names of their variants."""
    changed = copy(evaluation)
    changed.measured = measured
    return changed


def caches_recipe(*variants):
    """Return a recipe that measures all cache types beside these variants, on random tokens."""
    measured = {"evaluation.caches": ["all"], "evaluation.variants": [*variants]}
    return load_recipe(None, {"data.dataset": "random", "device": "cpu", "dtype": "float32", **measured})
