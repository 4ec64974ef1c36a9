"""The catalogue of engines: every rule file, which holds for which version, and what caches are served."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import caches_page
import engines_page
import pytest
from command_line import fp8kv, one_line_error
from scale_directories import lines_of, model

from calib.caches.types import ALL_CACHES, UNSIMULATED, Shape
from calib.choices import AttentionMode
from calib.engines.cache_support import NotServed, check_place, find_offer, find_support, serving_engines
from calib.engines.catalogue import GPUS, find_engine, load_catalogue
from calib.errors import InputError

DEEPSEEK = Shape(1, 512, 64, "sparse latents")
LATENTS, ROOT = DEEPSEEK._replace(attention="latents"), Path(__file__).parents[3]
FP8 = "--kv-cache-dtype fp8"
HEADS, OF_64, UNEVEN = [(1, 128, 128)], [(1, 64, 64)], [(1, 128, 80), (1, 96, 128)]
SIZES, OF_DEEPSEEK = "128, 256, 512 (vllm)", "on h100 with latents of 512 + 64 (vllm, sglang, lmdeploy)"
OTHER = DEEPSEEK._replace(k=576, v=192)


def test_every_rule_file_is_read_and_an_engine_or_version_without_is_one_line(tmp_path):
    engines = load_catalogue()
    names = {"vllm", "aphrodite", "sglang", "tgi", "tensorrt-llm", "lmdeploy"}
    assert {engine.name for engine in engines.values()} == names
    assert all(name == f"{engine.name}-{engine.since}" for name, engine in engines.items())
    assert [n for n, engine in engines.items() if engine.ran] == ["sglang-0.5.23", "vllm-0.23", "vllm-0.33"]
    for name, rules in engines.items():  # those that were read promise nothing beyond what they were read for
        kinds = {method.kind for method in (*rules.methods.values(), rules.without_method) if method}
        reads = rules.reads == "json" or kinds != {"none"}
        assert rules.classes or not reads or (rules.architectures and rules.until), name
        assert {*rules.unknown_exceptions} <= (rules.classes.results.keys() if rules.classes else set())
        for backend in rules.backends.values():
            assert {*backend.write, *backend.read} <= rules.scale_copies.keys(), backend.source
    assert engines_page.PAGE.read_text() == engines_page.page(), "make pages"
    for engine, version, message in (
        ("vlm", None, "--engine vlm is not one of aphrodite, lmdeploy, sglang"),
        (None, "0.23", "of which engine? Add --engine"),
        ("vllm", "0.10", "no rules hold for vLLM 0.10; there are some for 0.4"),
        ("vllm", "0.22", "0.4.2, on ROCm; 0.23 to 0.32; 0.33 and newer"),
        ("vllm", "9" * 5000, "is not a version such as 0.23.1"),
        ("tgi", "9", "no rules hold for TGI 9; there are some for 2.4 to 3.3"),
        ("vllm", "0.34.dev1", "0.34.dev1: no vLLM after 0.33.0 was read; leave it out for that one"),
        ("lmdeploy", "0.19", "no LMDeploy after 0.18 was read"),
        ("tensorrt-llm", "2", "no rules hold for TensorRT-LLM 2; there are"),
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
        ("vllm", "0.33.1", False),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.23rc1", False),  # before 0.5.23, whose config it does not read
    ):
        done = fp8kv("verify", model(tmp_path), "--engine", engine, "--version", version)
        assert done.exit_code == (not known), version
        printed = lines_of(done)
        assert version in printed
        if not known and (ran := find_engine(engine, version).classes_version):
            assert f"{version} │ not known │ not known" in printed
            versions = "0.32.0 and 0.33.0" if engine == "vllm" else ran
            assert f"were run at {versions} alone; the nearest rules are those of --version {ran}" in printed


def test_the_first_engine_that_serves_it():
    for name, layers, place, engine, flag, gpus in (
        ("fp8", [(1, 80, 80)], (), "vllm", FP8, ("l40s", "h100", "h200", "b200")),
        ("fp8", [(1, 128, 64)], (), "vllm", FP8, ("l40s", "h100", "h200", "b200", "a100")),
        ("fp8", HEADS, ("lmdeploy", "h100"), "lmdeploy", "--backend pytorch --quant-policy 16", ("h100",)),
        ("nvfp4", OF_64, ("sglang",), "sglang", "--kv-cache-dtype nvfp4", ("b200",)),
        ("fp8", [Shape(1, 576, 192, "latents")], ("vllm", "h100"), "vllm", FP8, ("h100",)),
        ("fp8", [LATENTS], ("sglang",), "sglang", f"{FP8}_e4m3", ("l40s", "h100", "h200", "b200")),
        ("fp8_ds_mla", [DEEPSEEK], (None, "h100"), "vllm", f"{FP8}_ds_mla", ("h100",)),
        ("fp8_ds_mla", [DEEPSEEK], ("sglang", "h200"), "sglang", f"{FP8}_e4m3", ("h200",)),
    ):
        offer = find_offer(name, layers, *place)
        assert (offer.engine, offer.flag, offer.gpus) == (engine, flag, gpus)
        assert offer.version == find_engine(engine).caches.version


def test_why_nobody_serves_it():
    at_1 = "FP8 at scale 1.0 is measured up to 448"
    for name, layers, place, said in (
        ("fp8_k_nvfp4_v", OF_64, (), "fp8_k_nvfp4_v is in no engine yet"),
        ("int8_per_token_head", OF_64, ("sglang", "h100"), "{} is in vllm, not in sglang"),
        ("nvfp4_4over6", HEADS, (None, "h100"), "{} is served on b200 (vllm), not on h100"),
        ("nvfp4_4over6", [(1, 80, 80)], ("vllm",), f"{{}} is served with heads of 64, {SIZES}, not of 80"),
        ("int8_per_token_head", [(1, 8, 8)], (), "{} is served with heads of 32 and more (vllm), not of 8"),
        ("nvfp4", UNEVEN, (None, "h100"), f"{{}} is served on h100 with heads of {SIZES}, not of 80 and 96"),
        ("fp8_ds_mla", [LATENTS], ("vllm",), "{} is served for sparse latents (vllm), not for latents"),
        ("mxfp8", OF_64, (None, None, "llama"), "{} is served for inkling_mm_model (sglang), not for llama"),
        ("fp8_ds_mla", [OTHER], (None, "h100"), f"{{}} is served {OF_DEEPSEEK}, not of 576 + 192"),
        ("fp8", [LATENTS], ("vllm", None, "minicpm3"), "vllm: not known to cache latents of minicpm3 models"),
        ("fp8", OF_64, ("sglang", "mi300x"), f"{at_1}, and on mi300x FP8 ends at 240"),
    ):
        with pytest.raises(NotServed) as refusal:
            find_offer(name, layers, *place)
        assert str(refusal.value) == said.format(name)


def test_scales_of_a_checkpoint():
    def offer(engine, gpu, strategy):
        return find_offer("fp8", HEADS, engine, gpu, strategy=strategy)

    # SGLang doubles the scales that vLLM reads as they are, but for ModelOpt's where that GPU is named
    assert "mi300x" in offer("sglang", None, "tensor").gpus
    assert "mi300x" not in offer("vllm", None, "tensor").gpus
    assert offer("vllm", "mi300x", "tensor").gpus == ("mi300x",)
    assert offer("vllm", None, "attn_head").gpus == ("h100", "h200", "b200")
    assert offer("vllm", "h100", "attn_head").flag == f"{FP8} --attention-backend FLASH_ATTN"
    with pytest.raises(NotServed, match=r"^vllm has no scales per head on a100$"):
        offer("vllm", "a100", "attn_head")


def test_unknown_places():
    for place, problem in (
        (("tgi", None), "engine 'tgi' is not one of vllm, sglang, lmdeploy"),
        ((None, "h1000"), "gpu 'h1000' is not one of a100, l40s, h100"),
        (("lmdeploy", "mi300x"), "no type of KV cache but 16 bits is known for lmdeploy on mi300x"),
    ):
        with pytest.raises(InputError, match=problem):
            check_place(*place)
    for place in ((None, None), ("lmdeploy", None), (None, "mi300x"), ("sglang", "mi300x")):
        check_place(*place)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_latents_are_served_for_the_model_types_whose_classes_were_seen_to_cache_them(engine):
    classes = find_engine(engine).classes
    # its class in vLLM caches latents, and vLLM's `use_mla` says of its type that it does not: never served
    served = {*classes.latent} - ({"SarvamMLAForCausalLM"} if engine == "vllm" else set())
    for file in (ROOT / "tools/engine_classes/architectures").glob("*.json"):
        config = json.loads(file.read_text())
        if file.stem in classes.results and "kv_lora_rank" in config and "index_topk" not in config:
            with nullcontext() if file.stem in served else pytest.raises(NotServed):
                find_offer("fp8", [LATENTS], engine, None, config["model_type"])


def test_the_page_of_caches():
    page = caches_page.PAGE.read_text()
    assert page == caches_page.page(), "make pages"
    names = (*ALL_CACHES, *UNSIMULATED)
    (unserved,) = (name for name in names if not find_support(name))
    assert f"`{unserved}`, which no released engine has" in page.replace("\n", " ")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"the {len(names) - 1} [types]" in changelog
    evaluation = (ROOT / "docs/evaluation.md").read_text()
    assert {*caches_page.kernel_table().splitlines()} <= {*evaluation.splitlines()}
    assert {"exact", *find_engine("vllm").kernels} == {*get_args(AttentionMode)}
    assert {gpu for name in ALL_CACHES for pair in find_support(name) for gpu in pair.way.gpus} == {*GPUS}
    served = {name for engine in serving_engines().values() for name in engine.caches.types}
    assert served <= {*ALL_CACHES, *UNSIMULATED}
