"""The catalogue: every rule file, which holds for which version, the copies of scales that backends read."""

import pytest
from command_line import fp8kv, one_line_error
from engines_page import PAGE, page
from pydantic import ValidationError
from scale_directories import lines_of, model

from calib.engines.catalogue import Engine, find_engine, load_catalogue


def test_every_rule_file_is_read():
    engines = load_catalogue()
    assert {engine.name for engine in engines.values()} == {
        *("vllm", "aphrodite", "sglang", "tgi", "tensorrt-llm", "lmdeploy"),
    }
    assert all(name == f"{engine.name}-{engine.since}" for name, engine in engines.items())
    assert {"vllm-0.4.1", "sglang-0.5.0"} <= engines.keys()
    assert [n for n, engine in engines.items() if engine.ran] == ["sglang-0.5.23", "vllm-0.23", "vllm-0.33"]
    for name, rules in engines.items():  # those that were read promise nothing beyond what they were read for
        kinds = {method.kind for method in (*rules.methods.values(), rules.without_method) if method}
        reads = rules.reads == "json" or kinds != {"none"}
        assert rules.classes or not reads or (rules.architectures and rules.until), name
    assert PAGE.read_text() == page(), "make engines-page"


def test_an_engine_or_version_without_rules_is_one_line(tmp_path):
    for engine, version, message in (
        ("vlm", None, "--engine vlm is not one of aphrodite, lmdeploy, sglang"),
        (None, "0.23", "of which engine? Add --engine"),
        ("vllm", "0.10", "no rules hold for vLLM 0.10; there are some for 0.4"),
        ("vllm", "0.22", "0.4.2, on ROCm; 0.23 to 0.32; 0.33 and newer"),
        ("vllm", "9" * 5000, "is not a version such as 0.23.1"),
        ("tgi", "9", "no rules hold for TGI 9; there are some for 2.4 to 3.3"),
        ("tensorrt-llm", "0.1", "hold for TensorRT-LLM 0.1; there are some for"),
    ):
        flags = [*(("--engine", engine) if engine else ()), *(("--version", version) if version else ())]
        one_line_error(fp8kv("verify", model(tmp_path), *flags), message)


def test_a_version_is_known_where_its_classes_were_run(tmp_path):
    for engine, version, known in (
        ("vllm", "v0.32.0+cpu", True),
        ("vllm", "0.32", True),
        ("vllm", "0.33.0", True),
        ("vllm", "0.32.0rc1", False),
        ("vllm", "0.32.0.post1", False),
        ("vllm", "0.34.0", False),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.23rc1", False),  # before 0.5.23, whose config it does not read
    ):
        done = fp8kv("verify", model(tmp_path), "--engine", engine, "--version", version)
        assert done.exit_code == (not known), version
        printed = lines_of(done)
        assert version in printed
        if not known and (ran := find_engine(engine, version).classes_version):
            assert f"{version} │ not known │ not known" in printed
            assert f"not known: its classes were run at {ran} alone" in printed


def test_a_copy_that_the_engine_does_not_have_is_refused():
    engine = find_engine("sglang").model_dump() | {"classes": None}
    engine["backends"]["fa3"]["read"] = ["tensor", "cpu"]
    with pytest.raises(ValidationError, match="backend fa3: cpu is not one of tensor, float"):
        Engine.model_validate(engine)
