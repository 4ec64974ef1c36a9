"""Scales beside measured absmax: too small, swapped, shifted, too large, and of which kind they look."""

import json
from itertools import product

import pytest
import torch
from command_line import fp8kv, one_line_error
from safetensors.torch import save_file
from scale_directories import lines_of, model, save_amax

from calib.engines.scale_fit import Limits, MeasuredAmax, compare, judge
from calib.files.cache_type import FP8_MAX, FP8_SMALLEST
from calib.files.stored_scales import StoredLayer
from fp8kv_runtime.fp8 import FP8_DTYPES

AMAX = {"k": ([9.0, 30.0], [4.0, 12.0]), "v": ([2.0, 0.5], [3.0, 1.5])}  # of two layers and heads
SMALLEST = FP8_SMALLEST["e4m3fn"]
TIMES_448_240 = {"k": (14 / 15, 7 / 15), "v": (7 / 30, 7 / 60)}


def measured(directory, k=(0.5, 0.25), v=(0.125, 0.0625)):
    """Statistics whose absmax is 448 times the given scales."""
    scales = {(i, x): scale for x, layers in {"k": k, "v": v}.items() for i, scale in enumerate(layers)}
    return save_amax({key: [1.0, 448 * scale] for key, scale in scales.items()}, directory)


def test_scales_are_compared_with_measured_absmax(tmp_path):
    against = measured(tmp_path / "measured")
    for scales, status, said in (
        ({}, 0, "Measured absmax"),
        ({"k": (0.5, 0.249)}, 0, "Measured absmax"),
        ({"k": (0.5, 0.125)}, 1, "problem: 1 layers clip what was measured, layer 1 the most: its"),
        ({"k": (0.125, 0.0625), "v": (0.5, 0.25)}, 1, "they are swapped"),
        ({"k": (0.9, 0.5), "v": (0.2, 0.125)}, 1, "fit the measured absmax of the layer before"),
        ({"k": (0.25, 0.1), "v": (0.0625, 0.2)}, 1, "fit the measured absmax of the next layer"),
        (TIMES_448_240, 1, "is 448 / 240 times absmax / 448"),
        (TIMES_448_240 | {"kv_cache_torch_dtype": "float8_e4m3fnuz"}, 0, "Measured absmax"),
        ({"k": (0.25, 0.125), "v": (0.0625, 0.03125)}, 1, "every scale is half of absmax / 448"),
    ):
        done = fp8kv("verify", model(tmp_path / "model", **scales), "--against", against)
        printed = lines_of(done)
        assert done.exit_code == status, scales
        assert said in printed
        assert ("problem:" in printed) == status


def judged(factors, change=lambda scale: scale, amax=AMAX, *, per_head=True):
    """The problems and the warnings of true scales, each changed, times the factors of its two layers."""
    layers = [StoredLayer(i) for i in (0, 1)]
    for x, layer in product("kv", layers):
        heads, factor = amax[x][layer.layer], factors.get(x, (1, 1))[layer.layer]
        right = [(a or max(heads)) / 448 for a in (heads if per_head else [max(heads)])]
        setattr(layer, x, tuple(change(scale) * factor for scale in right))
    measured = {(i, x): tuple(each) for x, both in amax.items() for i, each in enumerate(both)}
    fits = compare(layers, measured, Limits(448.0, SMALLEST))
    findings = judge(layers, fits, MeasuredAmax(measured, 1.0, [], {}), 448.0)
    return ([each.text for each in findings if each.is_problem == kind] for kind in (True, False))


@pytest.mark.parametrize("per_head", [False, True])
def test_scales_that_are_too_large(per_head):
    for factors, change, problem, warning in (
        # headroom may be 16, rounded to bfloat16
        ({"k": (16, 16), "v": (16.05, 16)}, float, None, None),
        ({"k": (1e3, 30)}, float, None, "K uses under 1/16 of the FP8 range in layers 0, 1, 0.1% in layer 0"),
        ({"v": (1, 20)}, float, None, "V uses under 1/16 of the FP8 range in layer 1, 5% in"),
        (dict.fromkeys("kv", (100, 100)), float, "V scales are all 100 times absmax / 448 in layers", None),
        ({}, lambda s: 1 / s, "V scales look like 1/scale (448 / absmax) in layers 0, 1", None),
        ({}, lambda s: 448 * s, "K scales look like absmax itself, not divided by 448,", None),
        ({"k": (1, 1.5e7)}, float, "K becomes all zeros in layer 1: scales are too large, 4.02e+05 in", None),
    ):
        problems, warnings = judged(factors, change, per_head=per_head)
        assert (problem in " ".join(problems)) if problem else not problems
        assert (warning in " ".join(warnings)) if warning else not warnings


def test_one_head_of_many_is_seen():
    amax = AMAX | {"k": ([400.0, 0.4], [4.0, 0.0])}

    def spoiled(factor):
        return [*judged({}, lambda scale: scale * factor if scale == 0.4 / 448 else scale, amax)]

    assert spoiled(1) == [[], []]
    problems, (warning,) = spoiled(100)
    assert not problems
    assert warning.startswith("K uses under 1/16 of the FP8 range in layer 0, 1% in layer 0")
    (problem,), _ = spoiled(1e6)
    assert problem.startswith("K becomes all zeros in layer 0: scales are too large, 893 in layer 0")


@pytest.mark.parametrize("name", FP8_MAX)
def test_a_value_at_which_all_becomes_zero_is_that_of_the_type(name):
    dtype, half = FP8_DTYPES[name], torch.tensor([FP8_SMALLEST[name] / 2])
    above = torch.nextafter(half, torch.ones(1))
    assert [float(half.to(dtype)), float(above.to(dtype))] == [0, FP8_SMALLEST[name]]
    assert FP8_MAX[name] == torch.finfo(dtype).max
    for amax, zero in ((SMALLEST, ["k"]), (1.0001 * SMALLEST, [])):  # over a scale of 2: half of it
        (fit,) = compare([StoredLayer(0, (2.0,))], {(0, "k"): (amax,)}, Limits(1, SMALLEST))
        assert fit.zero == zero


def test_statistics_that_prove_nothing_are_refused(tmp_path):
    broken, foreign = measured(tmp_path / "a", k=(0.5, float("nan"))), measured(tmp_path / "b")
    report = {"fp8kv_calibration": 1, "model": "m", "checkpoint": "c", "warnings": [], "layers": []}
    report |= {"config": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}}
    report |= {"dataset": {"source": "s", "samples": 1, "tokens": 1}}
    (foreign / "fp8kv_calibration.json").write_text(json.dumps(report))
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    for statistics, message in (
        (broken, "layers.1.self_attn K: NaN or Inf"),
        (foreign, "is of another model: its config says model_type gemma"),
        (tmp_path / "x.safetensors", "is not a fp8kv_stats.safetensors of a version that this fp8kv reads"),
        ("/nowhere", "'/nowhere' does not exist"),
    ):
        one_line_error(fp8kv("verify", model(tmp_path / "model"), "--against", statistics), message)
