"""Scales beside measured absmax: what is too large, and of which kind it looks."""

import json

import pytest
import torch
from command_line import fp8kv
from measured_amax import save_amax
from scale_directories import COMPRESSED, lines_of, model

from calib.files.cache_type import FP8_MAX, FP8_SMALLEST
from fp8kv_runtime.fp8 import FP8_DTYPES

PER_HEAD = COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"strategy": "attn_head"}}
AMAX = {"k": ([9.0, 30.0], [4.0, 12.0]), "v": ([2.0, 0.5], [3.0, 1.5])}  # of two layers and heads


def same(scale):
    return scale


def verified(tmp_path, factors, change=same, *, config=COMPRESSED, amax=AMAX):
    """Verify true scales, each times its factor: by letter, of both layers."""
    per_head = config is PER_HEAD
    right = {
        x: [[(a or max(each)) / 448 for a in each] if per_head else [max(each) / 448] for each in layers]
        for x, layers in amax.items()
    }
    written = {
        x: [[change(s) * factors.get(x, (1, 1))[i] for s in each] for i, each in enumerate(layers)]
        for x, layers in right.items()
    }
    if not per_head:
        written = {x: [each[0] for each in layers] for x, layers in written.items()}
    tmp_path.mkdir(exist_ok=True)
    directory = model(tmp_path / "model", **written, config=config)
    heads = {(i, x): [[a, a / 2] for a in layers[i]] for x, layers in amax.items() for i in (0, 1)}
    against = save_amax(heads, tmp_path) / "fp8kv_stats.safetensors"
    flags = ("--engine", "vllm", "--against", against)
    done = fp8kv("verify", directory, *flags)
    return (
        done.exit_code,
        lines_of(done),
        json.loads(fp8kv("verify", directory, *flags, "--json").stdout),
    )


K_ONLY, BOTH, FIRST = {"k": (1000, 30)}, {"k": (100, 100), "v": (100, 100)}, {"k": (1, 1e6 * 15)}


@pytest.mark.parametrize(
    ("factors", "change", "problem", "warning"),
    [
        ({}, None, None, None),
        # headroom may be 16, rounded to bfloat16
        ({"k": (16, 16), "v": (16.05, 16)}, None, None, None),
        (K_ONLY, None, None, "K uses under 1/16 of the FP8 range in layers 0, 1, 0.1% in layer 0"),
        ({"v": (1, 20)}, None, None, "V uses under 1/16 of the FP8 range in layer 1, 5% in"),
        (BOTH, None, "V scales are all 100 times absmax / 448 in layers 0, 1", None),
        ({}, lambda s: 1 / s, "K scales look like 1/scale (448 / absmax) in layers 0, 1", None),
        ({}, lambda s: 1 / s, "V scales look like 1/scale (448 / absmax) in layers 0, 1", None),
        ({}, lambda s: 448 * s, "K scales look like absmax itself, not divided by 448,", None),
        (FIRST, None, "K becomes all zeros in layer 1: scales are too large, 4.02e+05 in", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [COMPRESSED, PER_HEAD], ids=["tensor", "attn_head"])
def test_scales_that_are_too_large(factors, change, problem, warning, config, tmp_path):
    code, printed, document = verified(tmp_path, factors, change or same, config=config)
    assert code == bool(problem)
    assert (problem in printed) if problem else not document["problems"]
    assert (warning in printed) if warning else not document["warnings"]


def test_one_head_of_many_is_seen(tmp_path):
    amax = {"k": ([400.0, 0.4], [4.0, 0.0]), "v": AMAX["v"]}
    code, _, document = verified(tmp_path / "right", {}, config=PER_HEAD, amax=amax)
    assert (code, document["problems"], document["warnings"]) == (0, [], [])

    def spoiled(factor):
        def change(scale):
            return scale * factor if scale == 0.4 / 448 else scale

        return verified(tmp_path / str(factor), {}, change, config=PER_HEAD, amax=amax)

    code, printed, _ = spoiled(100)
    assert "K uses under 1/16 of the FP8 range in layer 0, 1% in layer 0" in printed
    assert code == 0
    code, printed, _ = spoiled(1e6)
    assert "K becomes all zeros in layer 0: scales are too large, 893 in layer 0" in printed
    assert code == 1


@pytest.mark.parametrize("name", FP8_MAX)
def test_a_value_at_which_all_becomes_zero_is_that_of_the_type(name):
    dtype = FP8_DTYPES[name]
    half = torch.tensor([FP8_SMALLEST[name] / 2])
    assert float(half.to(dtype)) == 0
    assert float(torch.nextafter(half, torch.ones(1)).to(dtype)) == FP8_SMALLEST[name]
    assert FP8_MAX[name] == torch.finfo(dtype).max


def test_all_codes_are_zero_just_where_that_is_said(tmp_path):
    """The scale at which the largest K rounds to 0, and the next below it."""
    edge = 448 / (FP8_SMALLEST["e4m3fn"] / 2)
    for factor in (edge * 1.0001, edge * 0.9999):
        code, printed, _ = verified(tmp_path / str(factor), {"k": (factor, 1)})
        k = torch.tensor([30.0]) / (30 / 448 * factor)
        is_zero = not k.to(torch.float8_e4m3fn).float().any()
        assert ("K becomes all zeros in layer 0" in printed) == is_zero == (code == 1)
