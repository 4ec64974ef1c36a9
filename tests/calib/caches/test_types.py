"""Facts about cache types."""

import json
from pathlib import Path

import pytest

from calib.caches.types import ALL_CACHES, CACHES, ENGINES, GPUS, Shape, cache_type
from calib.engines.catalogue import find_engine
from calib.errors import InputError

# of one head of 64 values of K and V; NVFP4 as 32 bytes and 4 scales
BYTES = {
    "fp8": 64 + 64,
    "fp8_per_token_head": 64 + 4 + 64 + 4,
    "int8_per_token_head": 64 + 4 + 64 + 4,
    "int4_per_token_head": 32 + 4 + 32 + 4,
    "nvfp4": 32 + 4 + 32 + 4,
    "nvfp4_4over6": 32 + 4 + 32 + 4,
    "fp8_k_nvfp4_v": 64 + 32 + 4,
    "lmdeploy_int8": 64 + 4 + 64 + 4,
    "lmdeploy_int4": 32 + 4 + 32 + 4,
}


@pytest.mark.parametrize("name", ["fp8", *CACHES])
def test_bytes_per_token(name):
    kind = cache_type(name)
    assert kind.name == name
    assert kind.bytes_per_token([(1, 64, 64)]) == BYTES[name]
    assert kind.bytes_per_token([(3, 64, 64)] * 5) == 15 * BYTES[name]
    assert kind.bytes_per_token([]) == 0


def test_layers_and_k_and_v_are_counted_apart():
    kind = cache_type("fp8_k_nvfp4_v")
    assert kind.bytes_per_token([(2, 128, 64), (1, 32, 256)]) == 2 * (128 + 36) + 32 + 144


@pytest.mark.parametrize(
    ("name", "head_dim", "multiple"),
    [("nvfp4", 72, 16), ("int4_per_token_head", 7, 2), ("lmdeploy_int4", 7, 2), ("fp8", 0, 1)],
)
def test_head_sizes_that_do_not_fit(name, head_dim, multiple):
    with pytest.raises(InputError, match=f"{name}: head size {head_dim} is not .* of {multiple}"):
        cache_type(name).bytes_per_token([(1, head_dim, head_dim)])


def test_the_first_engine_that_serves_it():
    both = cache_type("fp8").serving(None, None, [(1, 80, 80)])
    assert {(each.engine, each.flag) for each in both} == {("vllm", "--kv-cache-dtype fp8")}
    assert ["mi300x" in each.gpus for each in both] == [False, True]  # where Q is rounded otherwise
    (found,) = cache_type("fp8").serving("lmdeploy", "h100", [(1, 128, 128)])
    assert found.flag.endswith("--quant-policy 16")
    (found,) = cache_type("nvfp4").serving("sglang", None, [(1, 64, 64)])
    assert found.gpus == ("b200",)
    several = cache_type("fp8").serving(None, None, [(1, 128, 64)])
    assert [(each.engine, "a100" in each.gpus) for each in several] == [
        ("vllm", False),
        ("vllm", False),
        ("vllm", True),
    ]


@pytest.mark.parametrize(
    ("name", "asked", "why"),
    [
        ("fp8_k_nvfp4_v", (None, None, 64), "no engine serves fp8_k_nvfp4_v yet"),
        (
            "int8_per_token_head",
            ("sglang", "h100", 64),
            "sglang does not have int8_per_token_head, which is in vllm",
        ),
        ("nvfp4_4over6", (None, "h100", 128), "nvfp4_4over6 is served on b200 (vllm), not on h100"),
        (
            "nvfp4",
            ("vllm", "h100", 64),
            "nvfp4 is served on h100 with heads of 128, 256, 512 (vllm), not of 64",
        ),
        (
            "nvfp4_4over6",
            ("vllm", None, 80),
            "nvfp4_4over6 is served with heads of 64, 128, 256, 512 (vllm), not of 80",
        ),
    ],
)
def test_why_nobody_serves_it(name, asked, why):
    engine, gpu, size = asked
    assert cache_type(name).serving(engine, gpu, [(1, size, size)]) == why


def test_k_and_v_of_other_sizes():
    layers = [(1, 128, 80), (1, 96, 128)]
    assert cache_type("nvfp4").serving("vllm", "h100", layers) == (
        "nvfp4 is served on h100 with heads of 128, 256, 512 (vllm), not of 80 and 96"
    )


def test_unknown_names():
    with pytest.raises(InputError, match="cache 'int7' is not one of fp8, fp8_per_token_head"):
        cache_type("int7")
    with pytest.raises(InputError, match="engine 'tgi' is not one of vllm, sglang, lmdeploy"):
        cache_type("fp8").serving("tgi", None, [])
    with pytest.raises(InputError, match="GPU 'h1000' is not one of a100, l40s, h100"):
        cache_type("fp8").serving(None, "h1000", [])


def test_every_engine_and_gpu_serves_something():
    servings = [s for name in ALL_CACHES for s in cache_type(name).servings]
    assert {s.engine for s in servings} == set(ENGINES)
    assert {gpu for s in servings for gpu in s.gpus} == set(GPUS)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_latents_are_served_for_the_model_types_whose_classes_were_seen_to_cache_them(engine):
    classes = find_engine(engine).classes
    for file in (Path(__file__).parents[2] / "interop" / "architectures").glob("*.json"):
        config = json.loads(file.read_text())
        was_run = file.stem in classes.results
        if not was_run or "kv_lora_rank" not in config or "index_topk" in config:
            continue
        served = cache_type("fp8").serving(engine, None, [Shape(1, 512, 64, "latents")], config["model_type"])
        assert isinstance(served, list) == (file.stem in classes.latent), file.stem
