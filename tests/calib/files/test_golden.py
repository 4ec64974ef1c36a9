"""Real outputs of other tools, written by benchmarks/peers/; the convention that NVFP4 values follow."""

import json
from pathlib import Path

import pytest
import torch
from command_line import fp8kv
from scale_directories import NVFP4, PROJ, lines_of, model, save_amax

from calib.engines.scale_fit import measured_convention
from calib.files.cache_type import nvfp4_convention
from calib.files.model_directory import open_model_directory
from calib.files.names import layer_of
from calib.files.stored_scales import read_scales
from calib.scales.stats_file import load_stats

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent for path in GOLDEN.glob("*/*/expected.json"))
# the model runs in bfloat16, 2^-9 each rounding: attention by another kernel shifts K of the next
# layer by a step or two, and llm-compressor divides and stores in bfloat16 as well
BFLOAT16 = 2**-6
BY_MODELOPT = "absmax / 448 (ModelOpt 0.47.0 writes it so"
CONVENTIONS = {"nvfp4-kv": BY_MODELOPT, "fp8-nvfp4-kv": BY_MODELOPT}
CONVENTIONS |= {"nvfp4": "absmax / 2688 (k_global_scale is AutoRound's name)"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_scales_of_other_tools_are_read_exactly_and_what_is_wrong_with_them_is_said(case, tmp_path):
    tools = {each.parent.name.rpartition("-")[0] for each in CASES}
    assert tools == {"llmcompressor", "nvidia-modelopt", "auto-round"}
    expected = json.loads((case / "expected.json").read_text())
    opened, layers = open_model_directory(case, weights=False), read_scales(case).layers
    found = {t.name: {"values": [*t.values], "shape": [*t.shape]} for t in opened.tensors}
    wanted = expected["scales"].items()
    assert found == {name: {key: each[key] for key in ("values", "shape")} for name, each in wanted}
    # AutoRound keeps the absmax of its last forward for FP8, and derives 4 bits of 6 of E2M1 times 448
    is_last = "auto-round" in case.parent.name and case.name != "nvfp4"
    largest = 2688.0 if case.match("auto-round-*/nvfp4") else 448.0
    amax = {(layer_of(m), x): heads for m, seen in expected["amax"].items() for x, heads in seen.items()}
    for layer, letter in ((layer, x) for layer in layers for x in "kv" if not is_last):
        scales, heads = layer.values(letter), amax[layer.layer, letter]
        wanted = heads if len(scales) == len(heads) else [max(heads)]
        assert scales == pytest.approx([x / largest for x in wanted], rel=BFLOAT16)
    # the measured absmax, less what its rounding may add
    less = {at: torch.tensor(heads) * (1 - BFLOAT16) for at, heads in amax.items()}
    statistics = save_amax(less, tmp_path)
    said = lines_of(fp8kv("verify", case, "--engine", "vllm", "--against", statistics))
    # llm-compressor never measures Q: uninitialised memory, which is not the same every time
    assert ("problem: Q scales " in said) == case.name.endswith("qkv")
    # what nobody wrote may look like a scale of Q
    assert ("layers clip what was measured" in said) == (is_last or case.match("*/tensor-qkv"))
    alone = case.match("nvidia-modelopt-*/kv") or case.match("nvidia-modelopt-*/nvfp4-kv")
    assert ("quant_algo is missing" in said) == alone
    if "nvfp4" in case.name:
        assert f"values of an NVFP4 cache: {CONVENTIONS[case.name]}" in lines_of(fp8kv("inspect", case))
        # what was measured says the same
        told, measured = nvfp4_convention(opened), load_stats(statistics).amax_by_head()
        assert measured_convention(told, layers, measured) == (told, [])


def of(directory, producer=None, names=PROJ, **changes):
    config = NVFP4 | ({"producer": producer} if producer else {}) | changes
    return open_model_directory(model(directory, config=config, names=names), weights=False)


def by(name, version=None, **more):
    return {"name": name, "version": version, **more}


def test_the_producer_names_and_other_words_of_the_config_tell(tmp_path):
    for producer, divisor in (
        (by("modelopt", "0.41.0"), 2688),  # before its #790
        (by("modelopt", "0.42.0rc1"), 448),
        (by("modelopt", "new"), None),
        (by("modelopt", None), None),
        (by("fp8kv", nvfp4_kv_divisor=448), 448),
        (by("fp8kv", nvfp4_kv_divisor=2688), 2688),
        (by("fp8kv", nvfp4_kv_divisor=7), None),
        (by("somebody", "0.47.0"), None),
        ("modelopt", None),
    ):
        found = nvfp4_convention(of(tmp_path, producer))
        assert found.divisor == divisor, producer
        assert ("not known" in str(found)) == (divisor is None)
    four_bits = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_quant_algo": None}
    for names, divisor in (("{module}.{x}_global_scale", 2688), ("{module}.{x}_scale", None)):
        told = nvfp4_convention(of(tmp_path, names=names, **said, kv_cache_scheme=four_bits))
        assert told.divisor == divisor  # the first are AutoRound's
    modelopt = by("modelopt", "0.47.0")
    assert "from Megatron, absmax / 2688" in str(nvfp4_convention(of(tmp_path, modelopt)))
    found = nvfp4_convention(of(tmp_path, modelopt, kv_cache_quant_algo="FP8"))
    assert found.divisor is None
    assert "name FP8 as well" in str(found)
    assert nvfp4_convention(open_model_directory(model(tmp_path), weights=False)) is None


@pytest.mark.parametrize("told", [448, 2688, None])
@pytest.mark.parametrize("true", [448, 2688])
def test_measured_absmax_tells_also_from_other_data(told, true, tmp_path):
    convention = nvfp4_convention(of(tmp_path, by("fp8kv", nvfp4_kv_divisor=told)))
    layers = read_scales(tmp_path).layers
    assert measured_convention(convention, layers, {}) == (convention, [])
    for other_data in (0.6, 1.5):
        size = true * other_data
        amax = {(x.layer, letter): (x.values(letter)[0] * size,) for x in layers for letter in "kv"}
        found, problems = measured_convention(convention, layers, amax)
        assert (found.divisor, bool(problems)) == (true, told not in (true, None))


def test_commands_say_that_they_are_no_fp8_scales(tmp_path):
    of(tmp_path, by("fp8kv", nvfp4_kv_divisor=2688))
    done = fp8kv("generate", tmp_path, "text")
    assert done.exit_code == 2
    assert "are for an NVFP4 cache, not for FP8" in lines_of(done) + done.stderr
    assert '"divisor": 2688' in fp8kv("inspect", tmp_path, "--json").stdout
