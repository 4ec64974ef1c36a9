"""Engines that serve a cache, by the sections `caches` of the catalogue, and the kernels beside them."""

import json
from pathlib import Path
from typing import get_args

import pytest
from caches_page import PAGE, kernel_table, page
from pydantic import ValidationError

from calib.caches.types import ALL_CACHES, Shape
from calib.choices import AttentionMode
from calib.engines.cache_support import check_place, find_offer, find_support, serving_engines
from calib.engines.catalogue import GPUS, CacheSupport, find_engine
from calib.errors import InputError

DEEPSEEK = Shape(1, 512, 64, "sparse latents")
LATENTS = DEEPSEEK._replace(attention="latents")
DOCS = Path(__file__).parents[3] / "docs"
FP8 = "--kv-cache-dtype fp8"


def heads(size, value_size=None):
    return [(1, size, value_size or size)]


@pytest.mark.parametrize(
    ("name", "layers", "place", "engine", "flag", "gpus"),
    [
        ("fp8", heads(80), (), "vllm", FP8, ("l40s", "h100", "h200", "b200")),
        ("fp8", heads(128, 64), (), "vllm", FP8, ("l40s", "h100", "h200", "b200", "a100")),
        ("fp8", heads(128), ("lmdeploy", "h100"), "lmdeploy", "--quant-policy 16", ("h100",)),
        ("nvfp4", heads(64), ("sglang",), "sglang", "--kv-cache-dtype nvfp4", ("b200",)),
        ("fp8", [Shape(1, 576, 192, "latents")], ("vllm", "h100"), "vllm", FP8, ("h100",)),
        ("fp8", [LATENTS], ("sglang",), "sglang", f"{FP8}_e4m3", ("l40s", "h100", "h200", "b200")),
        ("fp8_ds_mla", [DEEPSEEK], (None, "h100"), "vllm", f"{FP8}_ds_mla", ("h100",)),
        ("fp8_ds_mla", [DEEPSEEK], ("sglang", "h200"), "sglang", f"{FP8}_e4m3", ("h200",)),
    ],
)
def test_the_first_engine_that_serves_it(name, layers, place, engine, flag, gpus):
    offer = find_offer(name, layers, *place)
    assert (offer.engine, offer.flag, offer.gpus) == (engine, flag, gpus)
    assert offer.version == find_engine(engine).caches.version


@pytest.mark.parametrize(
    ("name", "layers", "place", "why"),
    [
        ("fp8_k_nvfp4_v", heads(64), (), "no engine serves fp8_k_nvfp4_v yet"),
        (
            "int8_per_token_head", heads(64), ("sglang", "h100"),
            "sglang does not have int8_per_token_head, which is in vllm",
        ),
        ("nvfp4_4over6", heads(128), (None, "h100"), "nvfp4_4over6 is served on b200 (vllm), not on h100"),
        (
            "nvfp4_4over6", heads(80), ("vllm",),
            "nvfp4_4over6 is served with heads of 64, 128, 256, 512 (vllm), not of 80",
        ),
        (
            "nvfp4", [(1, 128, 80), (1, 96, 128)], ("vllm", "h100"),
            "nvfp4 is served on h100 with heads of 128, 256, 512 (vllm), not of 80 and 96",
        ),
        (
            "fp8_ds_mla", [LATENTS], (),
            "fp8_ds_mla is served for sparse latents (vllm, sglang), not for latents",
        ),
        (
            "fp8_ds_mla", [DEEPSEEK._replace(k=576, v=192)], (None, "h100"),
            "fp8_ds_mla is served on h100 with latents of 512 + 64 (vllm, sglang), not of 576 + 192",
        ),
        (
            "fp8", [LATENTS], ("vllm", None, "minicpm3"),
            "vllm: not known to cache latents of minicpm3 models",
        ),
        (
            "fp8", heads(64), ("sglang", "mi300x"),
            "FP8 at scale 1.0 is measured up to 448, and on mi300x FP8 ends at 240",
        ),
    ],
)  # fmt: skip
def test_why_nobody_serves_it(name, layers, place, why):
    assert find_offer(name, layers, *place) == why


def test_scales_of_a_checkpoint():
    def gpus(engine, gpu, strategy):
        return getattr(find_offer("fp8", heads(128), engine, gpu, strategy=strategy), "gpus", None)

    # SGLang doubles the scales that vLLM reads as they are, but for ModelOpt's where that GPU is named
    assert "mi300x" in gpus("sglang", None, "tensor")
    assert "mi300x" not in gpus("vllm", None, "tensor")
    assert gpus("vllm", "mi300x", "tensor") == ("mi300x",)
    assert gpus("vllm", None, "attn_head") == ("h100", "h200", "b200")
    assert gpus("vllm", "a100", "attn_head") is None
    offer = find_offer("fp8", heads(128), "vllm", "h100", strategy="attn_head")
    assert offer.flag == f"{FP8} --attention-backend FLASH_ATTN"


def test_unknown_places():
    with pytest.raises(InputError, match="engine 'tgi' is not one of vllm, sglang, lmdeploy"):
        check_place("tgi", None)
    with pytest.raises(InputError, match="gpu 'h1000' is not one of a100, l40s, h100"):
        check_place(None, "h1000")
    nothing = "no type of KV cache but 16 bits is known for lmdeploy on mi300x"
    with pytest.raises(InputError, match=nothing):
        check_place("lmdeploy", "mi300x")
    for place in ((None, None), ("lmdeploy", None), (None, "mi300x"), ("sglang", "mi300x")):
        check_place(*place)
    with pytest.raises(ValidationError, match="GPU 'h1000' is not one of a100, l40s, h100"):
        CacheSupport(flag="", gpus=("h1000",))


def test_every_engine_and_gpu_serves_a_known_type():
    assert list(serving_engines()) == ["vllm", "sglang", "lmdeploy"]
    support = [pair for name in ALL_CACHES for pair in find_support(name)]
    assert {gpu for pair in support for gpu in pair.way.gpus} == set(GPUS)
    for engine in serving_engines().values():
        assert {*engine.caches.types} <= {*ALL_CACHES}


# its class in vLLM caches latents, and vLLM's `use_mla` says of its type that it does not: never served
CONTRADICTED = {"vllm": {"SarvamMLAForCausalLM"}, "sglang": set()}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_latents_are_served_for_the_model_types_whose_classes_were_seen_to_cache_them(engine):
    classes = find_engine(engine).classes
    for file in (Path(__file__).parents[3] / "tools/engine_classes/architectures").glob("*.json"):
        config = json.loads(file.read_text())
        was_run = file.stem in classes.results
        if not was_run or "kv_lora_rank" not in config or "index_topk" in config:
            continue
        offer = find_offer("fp8", [LATENTS], engine, None, config["model_type"])
        served = {*classes.latent} - CONTRADICTED[engine]
        assert isinstance(offer, str) == (file.stem not in served), file.stem


def test_every_mode_has_a_kernel():
    assert {"exact", *find_engine("vllm").kernels} == set(get_args(AttentionMode))
    for row in kernel_table().splitlines():
        assert row in (DOCS / "evaluation.md").read_text().splitlines(), "copy it there"


def test_the_page():
    assert PAGE.read_text() == page(), "make caches-page"
    assert "| `nvfp4` | NVFP4" in page()
    assert "| 4.5 | 4.5 | - |" in page()
    assert "| - | - | 9.11 |" in page()  # 656 bytes for 576 values
    assert "| `int8_per_token_head` | vllm 0.33 | `--kv-cache-dtype int8_per_token_head` |" in page()
    count = len(ALL_CACHES) + sum(len(find_support(name)) for name in ALL_CACHES)
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert len(rows) == count + 2 * 2  # each table's titles and line
