"""What is predicted of SGLang; `make interop` asks its loader code about all directories."""

import re
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
SCHEME = COMPRESSED["kv_cache_scheme"]
GROUP = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}
FP8 = {"quant_method": "fp8"}


def statuses(directory, engine="sglang", version=None):
    found = simulated(directory, engine, version)
    return found.refused or {outcome.status for outcome in found.outcomes if outcome.letter != "q"}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({}, {"loaded"}),
        ({"strategy": "attn_head"}, {"default"}),
        ({"type": "int"}, {"default"}),
        ({"dynamic": True}, {"default"}),
        ({"symmetric": False}, {"default"}),
    ],
)
def test_a_scheme_it_does_not_know_is_ignored(scheme, expected, tmp_path):
    config = COMPRESSED | {"kv_cache_scheme": SCHEME | scheme}
    directory = model(tmp_path, config=config)
    assert statuses(directory) == expected
    assert statuses(directory, version=OLD) == {"default"}


def test_groups_without_weights_are_refused(tmp_path):
    directory = model(tmp_path, config=COMPRESSED | {"config_groups": {"attention": GROUP}})
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
    ("architecture", "shown", "why"),
    [
        ("Qwen3ForCausalLM", "no place", "the attention layers of the model's class have no place"),
        ("Qwen2ForCausalLM", "dropped", "the model's class drops it"),
        ("GraniteForCausalLM", "crashes", "the model's class does not start with 'model.layers.0.self_attn"),
    ],
)
def test_the_table_says_why_nothing_arrives(architecture, shown, why, tmp_path):
    done = fp8kv("verify", model(tmp_path, architectures=[architecture]), "--engine", "sglang")
    assert done.exit_code == 1
    assert f"│ {shown} │ {shown} │" in lines_of(done)
    assert why in lines_of(done)
    assert architecture in lines_of(done)


def test_classes_do_not_matter_without_scales_and_are_known_for_llama_alone_in_older_versions(tmp_path):
    bare = model(tmp_path / "bare", k=None, v=None, architectures=["Qwen3ForCausalLM"])
    assert statuses(bare) == {"default"}
    llama = model(tmp_path / "llama", config=FP8)
    gemma = model(tmp_path / "gemma", config=FP8, architectures=["Gemma3ForCausalLM"])
    assert (statuses(llama, version=OLD), statuses(gemma, version=OLD)) == ({"loaded"}, {"unknown"})


MONTH = r"(?:Jan|Febr?|March|April|May|June|July|Aug|Sept?|Oct|Nov|Dec)\w* \d{4}"


def test_its_first_version_with_these_scales_has_one_home():
    root = Path(__file__).parents[3]
    texts = [root / "README.md", *(root / "docs").glob("*.md")]
    texts += [file for name in ("calib", "commands") for file in (root / name).rglob("*.py")]
    texts += (root / "calib" / "engines").glob("sglang*.yaml")
    version = rf"{MONTH}|\d+\.\d+\.\d+"
    said = re.compile(rf"SGLang[^|.;`()]{{0,40}}?({version})|(?:since|until): ({version})")
    found = {(file.name, a or b) for file in texts for a, b in said.findall(file.read_text())}
    since = find_engine("sglang").since
    assert {named for _, named in found} == {since}
    # the rules and what is written for people; code reads it from the rules
    assert {name for name, _ in found if name.endswith(".py")} == set()
    assert {name for name, _ in found} >= {"README.md", "formats.md", "sglang-0.5.23.yaml"}
    assert find_engine("sglang", "0.5").until == since
    assert since in FORMATS["sglang"].note
    assert "fp8kv verify" in FORMATS["sglang"].note, "it promises no more"
    assert since in FORMATS["modelopt"].engine


def test_quark_and_mixed_precision_are_read_otherwise_than_by_vllm(tmp_path):
    """What differs; `make interop` compares these with SGLang's own config classes."""
    cases = {case.name: case for case in CASES}
    for name, vllm, sglang in (
        ("quark, kv_cache_group by pattern", {"loaded"}, "has no such entry"),
        ("quark, attention left out", {"default"}, {"loaded"}),
        ("mixed precision", {"loaded"}, {"loaded"}),
        ("mixed precision, FP8 layers", {"loaded"}, {"default"}),
        ("mixed precision, no layers", "no 'quantized_layers'", {"default"}),
        ("mixed precision, no cache", {"default"}, {"unknown"}),
        ("mixed precision, word for the cache", {"default"}, {"loaded"}),
    ):
        directory = write_case(cases[name], tmp_path / name)
        for engine, expected in (("vllm", vllm), ("sglang", sglang)):
            found = statuses(directory, engine)
            assert found == expected or expected in found, (name, engine, found)


def test_latents_have_no_place_under_mixed_precision_in_vllm(tmp_path):
    case = next(case for case in CASES if case.name == "mixed precision")
    document = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 8}
    directory = model(tmp_path, config=case.config, **document)
    assert statuses(directory, "vllm") == {"default"}
    assert "layers that cache latents" in simulated(directory, "vllm").ignored[0][1]
