"""Observers against plain recomputation from the values themselves."""

from typing import get_args

import pytest
import torch

from calib.choices import ObserverName
from calib.errors import InputError
from calib.recipe import ObserverRecipe
from calib.scales.observers import AbsMax, Mse, Percentile, magnitude_histogram, make_observer
from fp8kv_runtime.fp8 import FP8_DTYPES

VALUES = (torch.randn(4000, 2, 8, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
VALUES[7, 1, 3] = 90.0  # an outlier in head 1
AMAX = VALUES.abs().amax(0).float()
HISTOGRAM = magnitude_histogram(VALUES)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("tensor", AMAX.amax().view(1)), ("attn_head", AMAX.amax(-1)), ("channel", AMAX)],
)
def test_absmax_reduces_to_the_groups_of_the_strategy(strategy, expected):
    assert torch.equal(AbsMax().amax(AMAX, None, strategy), expected)


def test_percentile_is_the_smallest_value_that_covers_the_share():
    found = Percentile(99.0).amax(AMAX, HISTOGRAM, "attn_head")
    for head in range(2):
        magnitudes = VALUES[:, head].abs().float().flatten().sort().values
        assert found[head] == magnitudes[-(len(magnitudes) // 100) - 1]


def test_percentile_100_is_absmax():
    assert torch.equal(Percentile(100).amax(AMAX, HISTOGRAM, "tensor"), AMAX.amax().view(1))


def error(values, amax, dtype):
    """Squared error of quantising `values` so that `amax` maps to the format's maximum."""
    scale = amax / torch.finfo(dtype).max
    limit = torch.finfo(dtype).max
    restored = (values / scale).clamp(-limit, limit).to(dtype).float() * scale
    return (restored - values).double().square().sum()


@pytest.mark.parametrize("name", FP8_DTYPES)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_mse_beats_every_other_candidate_on_the_values_themselves(name, strategy):
    dtype = FP8_DTYPES[name]
    chosen = Mse(dtype).amax(AMAX, HISTOGRAM, strategy)
    groups = VALUES.float().transpose(0, 1).flatten(1)  # [H, N * D]
    groups = groups.reshape(1, -1) if strategy == "tensor" else groups
    for values, amax in zip(groups, chosen, strict=True):
        candidates = values.abs().amax() * Mse.candidates
        errors = torch.stack([error(values, c, dtype) for c in candidates])
        assert amax == candidates[errors.argmin()]


def test_mse_clips_a_lone_outlier_in_e4m3_only_where_it_pays():
    values = torch.cat([torch.full((100_000,), 1.03), torch.tensor([2.0])]).bfloat16()[:, None, None]
    chosen = Mse(torch.float8_e4m3fn).amax(
        values.abs().amax(0).float(), magnitude_histogram(values), "tensor"
    )
    assert error(values.float(), chosen, torch.float8_e4m3fn) < error(
        values.float(), torch.tensor(2.0), torch.float8_e4m3fn
    )


@pytest.mark.parametrize("name", ["percentile", "mse"])
def test_observers_that_need_a_histogram_say_so(name):
    observer = make_observer(ObserverRecipe(name=name, percentile=99))
    with pytest.raises(InputError, match="hold no histogram"):
        observer.amax(AMAX, None, "tensor")


def test_only_clipping_observers_need_a_histogram():
    needs = {name: ObserverRecipe(name=name).needs_histogram for name in get_args(ObserverName)}
    assert needs == {"absmax": False, "percentile": True, "mse": True}
