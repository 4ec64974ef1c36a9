"""Real outputs of other tools, written by benchmarks/peers/, are read as safetensors reads them."""

import json
from pathlib import Path

import pytest
import torch
from command_line import fp8kv
from measured_amax import save_amax
from scale_directories import lines_of

from calib.engines.scale_fit import measured_convention
from calib.files.cache_type import nvfp4_convention
from calib.files.model_directory import open_model_directory
from calib.files.names import layer_of
from calib.files.stored_scales import read_scales
from calib.scales.stats_file import load_stats

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent for path in GOLDEN.glob("*/*/expected.json"))
# AutoRound keeps the absmax of its last forward, for FP8
LAST = [c for c in CASES if "auto-round" in c.parent.name and c.name != "nvfp4"]


# the model runs in bfloat16, 2^-9 each rounding: attention by another kernel shifts K of the next
# layer by a step or two, and llm-compressor divides and stores in bfloat16 as well
BFLOAT16 = 2**-6


def expected(directory):
    return json.loads((directory / "expected.json").read_text())


def named(case):
    return f"{case.parent.name}-{case.name}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_scale_is_found_and_exact(case):
    tools = {case.parent.name.rpartition("-")[0] for case in CASES}
    assert tools == {"llmcompressor", "nvidia-modelopt", "auto-round"}
    wanted = expected(case)["scales"]
    tensors = open_model_directory(case, weights=False).tensors
    found = {t.name: {"values": list(t.values), "shape": list(t.shape)} for t in tensors}
    assert found == {name: {key: each[key] for key in ("values", "shape")} for name, each in wanted.items()}


@pytest.mark.parametrize("case", [case for case in CASES if case not in LAST], ids=named)
def test_k_and_v_are_what_was_measured(case):
    amax = expected(case)["amax"]
    # AutoRound derives 4 bits of 6 of E2M1 times 448 of E4M3
    largest = 2688.0 if case.match("auto-round-*/nvfp4") else 448.0
    for layer in read_scales(case).layers:
        measured = amax[f"model.layers.{layer.layer}.self_attn"]
        for letter in "kv":
            scales, heads = getattr(layer, letter), measured[letter]
            wanted = heads if len(scales) == len(heads) else [max(heads)]
            assert scales == pytest.approx([x / largest for x in wanted], rel=BFLOAT16)


def statistics(case, directory):
    """The measured absmax, less what its rounding may add, as a calibration of ours writes it."""
    amax = {
        (layer_of(module), letter): torch.tensor(heads) * (1 - BFLOAT16)
        for module, measured in expected(case)["amax"].items()
        for letter, heads in measured.items()
    }
    return save_amax(amax, directory)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_wrong_with_them_is_said(case, tmp_path):
    done = fp8kv("verify", case, "--engine", "vllm", "--against", statistics(case, tmp_path))
    said = lines_of(done)
    # llm-compressor never measures Q: uninitialised memory, which is not the same every time
    assert ("problem: Q scales " in said) == case.name.endswith("qkv")
    # AutoRound keeps the last forward's absmax only; what nobody wrote may look like a scale of Q
    assert ("layers clip what was measured" in said) == (case in LAST or case.match("*/tensor-qkv"))
    alone = case.match("nvidia-modelopt-*/kv") or case.match("nvidia-modelopt-*/nvfp4-kv")
    assert ("quant_algo is missing" in said) == alone


@pytest.mark.parametrize(
    ("tool", "name", "said"),
    [
        ("nvidia-modelopt", "nvfp4-kv", "absmax / 448 (ModelOpt 0.47.0 writes it so"),
        ("nvidia-modelopt", "fp8-nvfp4-kv", "absmax / 448 (ModelOpt 0.47.0 writes it so"),
        ("auto-round", "nvfp4", "absmax / 2688 (k_global_scale is AutoRound's name)"),
    ],
)
def test_the_convention_of_nvfp4_values_is_named(tool, name, said, tmp_path):
    (case,) = (c for c in CASES if c.parent.name.startswith(tool) and c.name == name)
    assert f"values of an NVFP4 cache: {said}" in lines_of(fp8kv("inspect", case))
    # what was measured says the same
    found = nvfp4_convention(open_model_directory(case, weights=False))
    amax = load_stats(statistics(case, tmp_path)).amax_by_head()
    assert measured_convention(found, read_scales(case).layers, amax) == (found, [])
