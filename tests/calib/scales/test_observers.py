"""Histograms, and observers against plain recomputation from the values themselves."""

import pytest
import torch

from calib.errors import InputError
from calib.recipe import ObserverRecipe
from calib.scales.observers import (
    NUM_BINS,
    AbsMax,
    Mse,
    Percentile,
    bin_values,
    group_amax,
    magnitude_histogram,
    make_observer,
)
from fp8kv_runtime.fp8 import FP8_DTYPES

VALUES = (torch.randn(4000, 2, 8, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
VALUES[7, 1, 3] = 90.0  # an outlier in head 1
AMAX = VALUES.abs().amax(0).float()
HISTOGRAM = magnitude_histogram(VALUES)


def test_each_value_is_counted_in_the_bin_of_its_bfloat16_magnitude_and_head():
    values = bin_values()
    assert (values[0], values[-1]) == (2.0**-24, 2.0**24 - 2.0**16)
    assert torch.equal(values.bfloat16().float(), values)
    assert (values.bfloat16().view(torch.int16).diff() == 1).all()
    x = torch.tensor([[[1.0, -1.0, 1.5], [448.0, 0.0, 2.0**-30]]])  # [N=1, H=2, D=3]
    counts = magnitude_histogram(x)
    found = {(h, float(values[b])): int(counts[h, b]) for h, b in counts.nonzero().tolist()}
    assert found == {(0, 1.0): 2, (0, 1.5): 1, (1, 448.0): 1, (1, 2.0**-24): 2}
    # other dtypes are rounded to bfloat16, and the last bin holds all beyond it
    rounded = VALUES.float() * 1.001
    assert torch.equal(magnitude_histogram(rounded), magnitude_histogram(rounded.bfloat16()))
    assert magnitude_histogram(torch.full((1, 1, 4), 1e30))[0, NUM_BINS - 1] == 4


def test_absmax_and_percentile_reduce_to_the_groups_of_the_strategy():
    groups = {"tensor": AMAX.amax().view(1), "attn_head": AMAX.amax(-1), "channel": AMAX}
    for strategy, expected in groups.items():
        assert torch.equal(AbsMax().amax(AMAX, None, strategy), expected)
        assert torch.equal(group_amax(AMAX, strategy), expected)
    found = Percentile(99.0).amax(AMAX, HISTOGRAM, "attn_head")
    for head in range(2):
        magnitudes = VALUES[:, head].abs().float().flatten().sort().values
        assert found[head] == magnitudes[-(len(magnitudes) // 100) - 1]
    assert torch.equal(Percentile(100).amax(AMAX, HISTOGRAM, "tensor"), AMAX.amax().view(1))


def error(values, amax, dtype):
    """Squared error of quantising `values` so that `amax` maps to the format's maximum."""
    limit = torch.finfo(dtype).max
    scale = amax / limit
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


def test_mse_clips_a_lone_outlier_where_it_pays_and_needs_a_histogram():
    values = torch.cat([torch.full((100_000,), 1.03), torch.tensor([2.0])]).bfloat16()[:, None, None]
    dtype, amax = torch.float8_e4m3fn, torch.tensor(2.0)
    chosen = Mse(dtype).amax(amax.view(1, 1), magnitude_histogram(values), "tensor")
    assert error(values.float(), chosen, dtype) < error(values.float(), amax, dtype)
    for name, needs in {"absmax": False, "percentile": True, "mse": True}.items():
        recipe = ObserverRecipe(name=name, percentile=99)
        assert recipe.needs_histogram == needs
        if needs:
            with pytest.raises(InputError, match="hold no histogram"):
                make_observer(recipe).amax(AMAX, None, "tensor")
