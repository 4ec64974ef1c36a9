"""Scales beside measured absmax: too small, swapped, shifted, too large, and of which kind they look."""

import json

import pytest
import torch
from command_line import fp8kv, one_line_error
from measured_amax import save_amax
from safetensors.torch import save_file
from scale_directories import COMPRESSED, PER_HEAD, lines_of, model

from calib.files.cache_type import FP8_MAX, FP8_SMALLEST
from fp8kv_runtime.fp8 import FP8_DTYPES

AMAX = {"k": ([9.0, 30.0], [4.0, 12.0]), "v": ([2.0, 0.5], [3.0, 1.5])}  # of two layers and heads


def measured(directory, k=(0.5, 0.25), v=(0.125, 0.0625)):
    """Statistics whose absmax is 448 times the given scales."""
    amax = {
        (i, x): torch.tensor([[448 * scale, 1.0], [2.0, 3.0]]).clamp(max=448 * scale)
        for x, scales in {"k": k, "v": v}.items()
        for i, scale in enumerate(scales)
    }
    return save_amax(amax, directory)


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ({}, None),
        ({"k": (0.5, 0.125)}, "1 layers clip what was measured, layer 1 the most: its"),
        ({"k": (0.5, 0.251)}, None),
        ({"k": (0.125, 0.0625), "v": (0.5, 0.25)}, "they are swapped"),
        ({"k": (0.9, 0.5), "v": (0.2, 0.125)}, "fit the measured absmax of the layer before"),
        ({"k": (0.25, 0.1), "v": (0.0625, 0.2)}, "fit the measured absmax of the next layer"),
        ({"k": (14 / 15, 7 / 15), "v": (7 / 30, 7 / 60)}, "is 448 / 240 times absmax / 448"),
        ({"k": (0.25, 0.125), "v": (0.0625, 0.03125)}, "every scale is half of absmax / 448"),
    ],
)  # fmt: skip
def test_scales_are_compared_with_measured_absmax(scales, problem, tmp_path):
    directory = model(tmp_path / "model", **scales)
    done = fp8kv("verify", directory, "--engine", "vllm", "--against", measured(tmp_path / "measured"))
    printed = lines_of(done)
    assert done.exit_code == (1 if problem else 0)
    assert (problem in printed) if problem else "problem" not in printed
    assert "Measured absmax" in printed


def test_scales_for_fnuz_are_compared_with_what_fnuz_holds(tmp_path):
    k, v = ([448 / 240 * scale for scale in scales] for scales in ((0.5, 0.25), (0.125, 0.0625)))
    directory = model(tmp_path / "model", k, v, kv_cache_torch_dtype="float8_e4m3fnuz")
    statistics = measured(tmp_path / "measured")
    done = fp8kv("verify", directory, "--engine", "tgi", "--against", statistics, "--json")
    assert done.exit_code == 0, done.stdout
    fits = json.loads(done.stdout)["against"]
    assert [fit["used"] for fit in fits] == [pytest.approx({"k": 1, "v": 1})] * 2


def unchanged(scale):
    return scale


def verified(tmp_path, factors, change=unchanged, *, config=COMPRESSED, amax=AMAX):
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
    done = fp8kv("verify", directory, "--engine", "vllm", "--against", against, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == bool(found["problems"])
    return found["problems"], found["warnings"]


K_ONLY, BOTH, FIRST = {"k": (1000, 30)}, {"k": (100, 100), "v": (100, 100)}, {"k": (1, 1e6 * 15)}


@pytest.mark.parametrize(
    ("factors", "change", "problem", "warning"),
    [
        # headroom may be 16, rounded to bfloat16
        ({"k": (16, 16), "v": (16.05, 16)}, None, None, None),
        (K_ONLY, None, None, "K uses under 1/16 of the FP8 range in layers 0, 1, 0.1% in layer 0"),
        ({"v": (1, 20)}, None, None, "V uses under 1/16 of the FP8 range in layer 1, 5% in"),
        (BOTH, None, "V scales are all 100 times absmax / 448 in layers 0, 1", None),
        ({}, lambda s: 1 / s, "V scales look like 1/scale (448 / absmax) in layers 0, 1", None),
        ({}, lambda s: 448 * s, "K scales look like absmax itself, not divided by 448,", None),
        (FIRST, None, "K becomes all zeros in layer 1: scales are too large, 4.02e+05 in", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [COMPRESSED, PER_HEAD], ids=["tensor", "attn_head"])
def test_scales_that_are_too_large(factors, change, problem, warning, config, tmp_path):
    problems, warnings = verified(tmp_path, factors, change or unchanged, config=config)
    assert (problem in " ".join(problems)) if problem else not problems
    assert (warning in " ".join(warnings)) if warning else not warnings


def test_one_head_of_many_is_seen(tmp_path):
    amax = {"k": ([400.0, 0.4], [4.0, 0.0]), "v": AMAX["v"]}
    assert verified(tmp_path / "right", {}, config=PER_HEAD, amax=amax) == ([], [])

    def spoiled(factor):
        def change(scale):
            return scale * factor if scale == 0.4 / 448 else scale

        return verified(tmp_path / str(factor), {}, change, config=PER_HEAD, amax=amax)

    problems, (warning,) = spoiled(100)
    assert not problems
    assert warning.startswith("K uses under 1/16 of the FP8 range in layer 0, 1% in layer 0")
    (problem,), _ = spoiled(1e6)
    assert problem.startswith("K becomes all zeros in layer 0: scales are too large, 893 in layer 0")


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
        problems, _ = verified(tmp_path / str(factor), {"k": (factor, 1)})
        k = torch.tensor([30.0]) / (30 / 448 * factor)
        is_zero = not k.to(torch.float8_e4m3fn).float().any()
        assert any("K becomes all zeros in layer 0" in problem for problem in problems) == is_zero


def test_statistics_that_prove_nothing_are_refused(tmp_path):
    directory = model(tmp_path / "model")

    def refuse(statistics, message):
        one_line_error(fp8kv("verify", directory, "--engine", "vllm", "--against", statistics), message)

    for value in (float("nan"), float("inf")):
        broken = measured(tmp_path / str(value), k=(0.5, value))
        refuse(broken, "layers.1.self_attn K: NaN or Inf")
    foreign = measured(tmp_path / "foreign")
    said = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    report = {"fp8kv_calibration": 1, "model": "m", "checkpoint": "c", "warnings": [], "layers": []}
    report |= {"config": said, "dataset": {"source": "s", "samples": 1, "tokens": 1}}
    (foreign / "fp8kv_calibration.json").write_text(json.dumps(report))
    refuse(foreign, "is of another model: its config says model_type gemma")
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    refuse(tmp_path / "x.safetensors", "is not a fp8kv_stats.safetensors of a version that this fp8kv reads")
    refuse("/nowhere", "'/nowhere' does not exist")
