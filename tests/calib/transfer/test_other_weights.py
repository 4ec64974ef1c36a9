"""Statistics of other weights than a checkpoint's: nothing is made of them, or it is said."""

import json
import shutil

import pytest
from apply_cases import calibrated, config_of, copy
from command_line import fp8kv, one_line_error, ran

STATS = "fp8kv_stats.safetensors"


def louder_values(tensors):
    for name in [*tensors]:
        if "v_proj" in name:
            tensors[name] = tensors[name] * 8


@pytest.fixture(scope="module")
def outputs(model, tmp_path_factory):
    """A calibration of a model, and one of a copy whose V is eight times as large."""
    scratch = tmp_path_factory.mktemp("outputs")
    other = copy(model, scratch / "louder", louder_values)
    return calibrated(model, scratch / "own"), calibrated(other, scratch / "other")


def test_repair_and_verify_take_no_absmax_of_other_weights(outputs, tmp_path):
    own, other = outputs
    done = fp8kv("repair", own, "--stats", other, "-o", tmp_path / "out")
    one_line_error(done, f"the scales of '{other}' do not fit", "0.12 times what it was")
    assert not (tmp_path / "out").exists()
    done = fp8kv("verify", other, "--against", own, "--engine", "vllm")
    one_line_error(done, f"the scales of '{own}' do not fit", "times what it was")


def test_values_for_nvfp4_come_from_no_absmax_of_other_weights(outputs, tmp_path):
    own, other = outputs
    mixed = shutil.copytree(own, tmp_path / "mixed")
    weights = next(mixed.glob("model-0*.safetensors"))
    weights.unlink()
    shutil.copy(next(other.glob("model-0*.safetensors")), weights)
    done = fp8kv("convert", mixed, "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    one_line_error(done, "do not fit", "times what it was")


def test_eval_says_whose_scales_are_of_other_weights(model, outputs):
    own, other = outputs
    flags = ("--variants", "none", "--samples", "2", "--seq-len", "32", "--allow-few-tokens")
    given = ("--scales", own, "--scales", other)
    done = ran("eval", model, *given, *flags, "--dataset", "random", "--json")
    told = [w for w in json.loads(done.stdout)["warnings"] if "do not fit" in w]
    assert [f"the scales of '{other}'" in each for each in told] == [True]


def test_generate_says_whose_scales_are_of_other_weights(model, outputs):
    own, other = outputs
    for scales, warned in ((own, False), (other, True)):
        flags = ("--max-new-tokens", "2", "--backend", "torch", "--json")
        done = ran("generate", model, "w5", *flags, "--scales", scales)
        assert (f"the scales of '{other}' do not fit" in done.stdout) is warned


def test_verify_compares_with_no_absmax_of_another_rope(outputs, tmp_path):
    """Somebody turned YaRN on in config.json, which makes K larger."""
    own, _ = outputs
    longer = shutil.copytree(own, tmp_path / "longer")
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    (longer / "config.json").unlink()
    config = config_of(own) | {"rope_parameters": yarn}
    (longer / "config.json").write_text(json.dumps(config))
    ran("verify", own, "--against", own, "--engine", "vllm")
    done = fp8kv("verify", longer, "--against", longer, "--engine", "vllm")
    one_line_error(done, "is of another model: its config says rope_parameters", "'yarn'")
