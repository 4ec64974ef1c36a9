"""What is predicted of SGLang; `make interop` asks its loader code about all directories."""

import sys
from pathlib import Path

import pytest
from command_line import fp8kv
from scale_directories import COMPRESSED, lines_of, model, simulated

from calib.engines.catalogue import find_engine
from calib.formats import FORMATS

sys.path.append(str(Path(__file__).parents[2] / "interop"))
from scale_cases import CASES, write_case

OLD = "0.5.9"
FP8 = {"quant_method": "fp8"}


def statuses(directory, engine="sglang", version=None):
    found = simulated(directory, engine, version)
    return found.refused or {outcome.status for outcome in found.outcomes if outcome.letter != "q"}


def test_a_scheme_it_does_not_know_is_ignored(tmp_path):
    wrong = ({"strategy": "attn_head"}, {"type": "int"}, {"dynamic": True}, {"symmetric": False})
    for changes, expected in (({}, "loaded"), *((change, "default") for change in wrong)):
        scheme = COMPRESSED["kv_cache_scheme"] | changes
        directory = model(tmp_path / "model", config=COMPRESSED | {"kv_cache_scheme": scheme})
        assert statuses(directory) == {expected}, changes
        assert statuses(directory, version=OLD) == {"default"}


def test_groups_without_weights_are_refused(tmp_path):
    group = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}
    directory = model(tmp_path, config=COMPRESSED | {"config_groups": {"attention": group}})
    assert "'attention' without weights" in statuses(directory)
    assert statuses(directory, "vllm") == {"loaded"}
    done = fp8kv("verify", directory, "--engine", "sglang")
    assert done.exit_code == 1
    assert "write it again with fp8kv convert --to vllm" in lines_of(done)


@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [(0.0, 0.0, {"default"}), (0.0, 0.5, "K scale of 0"), (0.5, 0.0, {"loaded"})],
)
def test_zeros_of_both_are_as_none(k, v, expected, tmp_path):
    found = statuses(model(tmp_path, k=(k, k), v=(v, v), config=FP8))
    assert found == expected or expected in found


@pytest.mark.parametrize(
    ("family", "shown", "why"),
    [
        ("Qwen3", "no place", "the attention layers of the model's class have no place"),
        ("Qwen2", "dropped", "the model's class drops it"),
        ("Granite", "crashes", "the model's class does not start with 'model.layers.0.self_attn"),
    ],
)
def test_the_table_says_why_nothing_arrives(family, shown, why, tmp_path):
    architecture = f"{family}ForCausalLM"
    done = fp8kv("verify", model(tmp_path, architectures=[architecture]), "--engine", "sglang")
    assert done.exit_code == 1
    assert all(words in lines_of(done) for words in (f"│ {shown} │ {shown} │", why, architecture))


def test_classes_do_not_matter_without_scales_and_are_known_for_llama_alone_in_older_versions(tmp_path):
    bare = model(tmp_path / "bare", k=None, v=None, architectures=["Qwen3ForCausalLM"])
    assert statuses(bare) == {"default"}
    llama = model(tmp_path / "llama", config=FP8)
    gemma = model(tmp_path / "gemma", config=FP8, architectures=["Gemma3ForCausalLM"])
    assert (statuses(llama, version=OLD), statuses(gemma, version=OLD)) == ({"loaded"}, {"unknown"})


def test_its_first_version_with_these_scales_has_one_home():
    since = find_engine("sglang").since
    assert find_engine("sglang", "0.5").until == since
    assert since in FORMATS["sglang"].note
    assert since in FORMATS["modelopt"].engine


def test_quark_and_mixed_precision_are_read_otherwise_than_by_vllm(tmp_path):
    """What differs; `make interop` compares these with SGLang's own config classes."""

    def of_case(name):
        return write_case(next(case for case in CASES if case.name == name), tmp_path / name)

    for name, expected in (
        ("quark, attention left out", {"loaded"}),
        ("mixed precision", {"loaded"}),
        ("mixed precision, FP8 layers", {"default"}),
        ("mixed precision, no cache", {"unknown"}),
        ("mixed precision, word for the cache", {"loaded"}),
    ):
        assert statuses(of_case(name)) == expected, name
    directory = of_case("mixed precision, no layers")
    assert statuses(directory) == {"default"}
    assert "no 'quantized_layers'" in statuses(directory, "vllm")
    assert "has no such entry" in statuses(of_case("quark, kv_cache_group by pattern"))


def test_latents_have_no_place_under_mixed_precision_in_vllm(tmp_path):
    case = next(case for case in CASES if case.name == "mixed precision")
    directory = model(tmp_path, config=case.config, architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=8)
    assert statuses(directory, "vllm") == {"default"}
    assert "layers that cache latents" in simulated(directory, "vllm").ignored[0][1]
