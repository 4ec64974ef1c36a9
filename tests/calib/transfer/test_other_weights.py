"""Statistics of other weights than a checkpoint's: nothing is made of them, or it is said."""

import json
import shutil

import pytest
from apply_cases import calibrated, copy
from command_line import fp8kv, one_line_error, ran
from families import edit_json


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


def test_nothing_is_made_of_the_absmax_of_other_weights(outputs, tmp_path):
    own, other = outputs
    done = fp8kv("repair", own, "--stats", other, "-o", tmp_path / "out")
    one_line_error(done, f"the scales of '{other}' do not fit", "0.12 times what it was")
    done = fp8kv("verify", other, "--against", own, "--engine", "vllm")
    one_line_error(done, f"the scales of '{own}' do not fit", "times what it was")
    mixed = shutil.copytree(own, tmp_path / "mixed")
    weights = next(mixed.glob("model-0*.safetensors"))
    weights.unlink()
    shutil.copy(next(other.glob("model-0*.safetensors")), weights)
    done = fp8kv("convert", mixed, "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    one_line_error(done, "do not fit", "times what it was")
    assert not (tmp_path / "out").exists()


def test_eval_and_generate_say_whose_scales_are_of_other_weights(model, outputs):
    own, other = outputs
    flags = ("--variants", "none", "--samples", "2", "--seq-len", "32", "--allow-few-tokens")
    given = ("--scales", own, "--scales", other)
    done = ran("eval", model, *given, *flags, "--dataset", "random", "--json")
    told = [w for w in json.loads(done.stdout)["warnings"] if "do not fit" in w]
    assert [f"the scales of '{other}'" in each for each in told] == [True]
    for scales in outputs:
        flags = ("--max-new-tokens", "2", "--backend", "torch", "--json")
        done = ran("generate", model, "w5", *flags, "--scales", scales)
        assert (f"the scales of '{other}' do not fit" in done.stdout) is (scales == other)


def test_verify_compares_with_no_absmax_of_another_rope(outputs, tmp_path):
    """Somebody turned YaRN on in config.json, which makes K larger."""
    own, _ = outputs
    longer = shutil.copytree(own, tmp_path / "longer")
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    edit_json(longer / "config.json", rope_parameters=yarn)
    ran("verify", own, "--against", own, "--engine", "vllm")
    done = fp8kv("verify", longer, "--against", longer, "--engine", "vllm")
    one_line_error(done, "is of another model: its config says rope_parameters", "'yarn'")
