"""What a baked model says of itself holds: the FP8 type, how to serve it, and what lies beside."""

import json

import pytest
import torch
from baking import bake, calibrated, model_directory, scales_of
from command_line import fp8kv, one_line_error
from families import save_model, tiny_model

from calib.rescale.pipeline import RescalePlan
from calib.rescale.weight_changes import LayerFactors


def verified(*flags):
    done = fp8kv("verify", *flags, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(("fp8_dtype", "largest"), [("e5m2", 1), ("e4m3fnuz", 240 / 448)])
def test_which_fp8_type_it_fits(fp8_dtype, largest, tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "s", "--fp8-dtype", fp8_dtype, "--format", "fp8kv")
    baked = tmp_path / "baked"
    assert bake(source, scales, baked, "--for", "fp8").exit_code == 0
    after = scales_of(calibrated(baked, tmp_path / "after", "--strategy", "attn_head"))
    assert largest / 2 < after.min() <= after.max() <= largest
    assert verified(baked)[0] == 0
    code, found = verified(baked, "--fnuz")
    if fp8_dtype == "e4m3fnuz":
        assert code == 0
    else:
        assert code == 1
        assert "ends at 240" in found["problems"][0]


def test_one_is_compared_with_what_was_measured(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    baked = tmp_path / "baked"
    assert bake(source, scales, baked, "--for", "fp8").exit_code == 0
    after = calibrated(baked, tmp_path / "after", "--strategy", "attn_head")
    code, found = verified(baked, "--against", after)
    assert (code, found["problems"]) == (0, [])
    assert [0.5 < x <= 1 for fit in found["against"] for x in fit["used"].values()] == [True] * 6
    code, found = verified(baked, "--against", scales)
    assert code == 1
    assert any("measured on the model that was baked" in problem for problem in found["problems"])


def test_scales_beside_the_weights(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales", "--format", "json")
    (source / "kv_cache_scales.json").write_bytes((scales / "kv_cache_scales.json").read_bytes())
    done = bake(source, scales, tmp_path / "out", "--for", "fp8")
    one_line_error(done, "has KV scales ('kv_cache_scales.json')")


def test_wider_weights_are_served_as_such(tmp_path):
    source = model_directory(tmp_path / "source", "gemma3_text")
    scales = calibrated(source, tmp_path / "scales")
    baked = tmp_path / "baked"
    assert bake(source, scales, baked, "--for", "fp8", "--dtype", "float32").exit_code == 0
    card = (baked / "README.md").read_text()
    assert f"vllm serve {baked} --kv-cache-dtype fp8 --dtype float32\n" in card
    assert "trtllm-serve" not in card  # which has no such flag


def test_integers_need_a_model_that_follows_factors(tmp_path):
    source = save_model(tiny_model("bitnet").to(torch.bfloat16), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    done = bake(source, scales, tmp_path / "out", "--for", "int8")
    one_line_error(done, "does not follow a factor in front of it")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("purpose", "octaves"), [("fp8", (2, 3)), ("int8", (0, 2))])
def test_what_all_channels_of_a_head_lack_costs_integers_nothing(purpose, octaves):
    wanted = torch.tensor([[8.0, 16.0], [4.0, 4.0]])
    k, v = wanted / 4, wanted / torch.tensor([[2.0, 8.0], [1.0, 1.0]])
    plan = RescalePlan({"": LayerFactors(k, v)}, {"": LayerFactors(wanted, wanted)}, {}, [], {})
    assert plan.missing_octaves(purpose) == octaves
