"""Whole jobs on models with uneven heads, and on those that the FP8 runtime may not run."""

import json
import shutil

import families
import pytest
import torch
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import edit_tensors, published_gemma4, save_model, tiny_model
from families_page import compare_amax, plain_caches
from generation import PROMPT
from safetensors.torch import load_file

from calib.files.names import SCALES_SHARD
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf.layers import Fp8CacheLayer

HEADS = {  # KV heads, K's channels, V's
    "mimo_v2_flash": [(4, 24, 16), (4, 24, 16), (2, 24, 16)],
    "gemma4": [(4, 16, 16), (2, 32, 32), (2, 32, 32)],
}
_ODD = families.LATENT["deepseek_v3"] | {"kv_lora_rank": 17}
REFUSED = {
    "a latent and k_pe must have an even number of values": ("deepseek_v3", _ODD),
    "the code of LlamaForCausalLM fails there (TypeError: ": ("llama", {}),
}
TEXT = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--variants", "none")
GENERATE = (PROMPT, "--max-new-tokens", 3)


@pytest.fixture(scope="module", params=HEADS)
def job(request, tmp_path_factory):
    """A family, its directory, and the output of its calibration per head."""
    family, root = request.param, tmp_path_factory.mktemp("uneven")
    (root / "model").mkdir()
    if family == "gemma4":
        published_gemma4(root / "model")
    else:
        save_model(tiny_model(family, **families.UNEVEN[family]), root / "model")
    succeeded(calibrate(root / "model", "-o", root / "out", "--strategy", "attn_head"))
    return family, root / "model", root / "out"


def test_scales_are_those_of_a_plain_forwards_own_cache(job, tmp_path):
    family, directory, out = job
    flags = ("--strategy", "attn_head", "--offload", "layerwise")
    succeeded(calibrate(directory, "-o", tmp_path / "out", *flags))
    caches = plain_caches(directory, out)
    assert compare_amax(out, caches) == "right"
    assert [(*k.shape[::2], v.shape[2]) for k, v in caches.values()] == HEADS[family]
    for made in (out, tmp_path / "out"):
        for layer in load_scales(made).layers.values():
            for scale, held in zip((layer.k, layer.v), caches[layer.layer_idx], strict=True):
                assert torch.equal(scale, held.abs().amax((1, 2)) / 448)


def test_an_engine_has_a_scale_for_each_head_of_its_layer_and_of_no_other(job, tmp_path):
    family, _, out = job
    (engine,) = json_of("verify", out, "--engine", "vllm")["engines"]
    for letter in "kv":
        values = [layer["values"] for layer in engine["layers"] if layer["letter"] == letter]
        assert values == [getattr(layer, letter).tolist() for layer in load_scales(out).layers.values()]
        assert [len(each) for each in values] == [heads for heads, _, _ in HEADS[family]]
    spoilt = shutil.copytree(out, tmp_path / "spoilt")
    first, *_, last = (name for name in sorted(load_file(spoilt / SCALES_SHARD)) if name.endswith("k_scale"))
    edit_tensors(spoilt, lambda tensors: tensors.update({last: tensors[first].clone()}), SCALES_SHARD)
    done = fp8kv("verify", spoilt, "--engine", "vllm")
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    assert "K has 4 scales in layer 2 (one per query head), but" in said
    assert "the model has 2 KV heads there" in said


def test_every_command_reads_it_and_counts_the_bytes_of_a_token(job, tmp_path):
    family, model, out = job
    ran("inspect", out)
    ran("convert", out, "--to", "sglang", "--reduce", "max", "-o", tmp_path / "sglang")
    ran("generate", model, PROMPT, "--max-new-tokens", 3, "--cache", "int8_per_token_head")
    ran("eval", model, *TEXT, "--scales", out, "-o", tmp_path / "report")
    size = sum(heads * (k + v) for heads, k, v in HEADS[family])
    largest = sum(2 * heads * max(k, v) for heads, k, v in HEADS[family])
    found = json_of("generate", out, PROMPT, "--max-new-tokens", 3)
    assert (found["bytes_per_token"], found["bytes_per_token_16bit"]) == (size, 2 * size)
    assert found["bytes_per_token_in_blocks"] == largest
    printed = ran("generate", out, PROMPT, "--max-new-tokens", 3).stdout
    assert f"KV cache: {size} bytes a token in FP8, {2 * size} in 16 bits (0.50x)" in printed
    assert (f"({largest} bytes a token: smaller heads are filled up)" in printed) == (largest > size)


def test_weights_are_rescaled_but_for_v_where_the_model_normalises_it(job, tmp_path):
    family, model, out = job
    for purpose in ("fp8", "int8"):
        baked = tmp_path / purpose
        done = ran("bake", model, "--scales", out, "--for", purpose, "-o", baked)
        assert "the source's, bit for bit" in done.stdout
        assert ("V of 3 of 3 layers stays as it is" in done.stdout) == (family == "gemma4")
        factors = json.loads((baked / "fp8kv_bake.json").read_text())["factors"]
        assert any(set(map(str, each["k"])) != {"1.0"} for each in factors.values())
    flags = ()
    if family == "gemma4":
        done = fp8kv("stress", model, "-o", tmp_path / "twin")
        one_line_error(done, "normalises V, which undoes a factor in front of it")
        flags = ("--v-factor", "1")
    ran("stress", model, "-o", tmp_path / "twin", *flags)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_later_commands_cannot_do_is_said_at_once(reason, tmp_path, monkeypatch):
    family, options = REFUSED[reason]
    if not options:
        monkeypatch.setattr(Fp8CacheLayer, "get_mask_sizes", None)
    model, out = save_model(tiny_model(family, **options), tmp_path / "model"), tmp_path / "out"
    done = succeeded(calibrate(model, "-o", out, "--format", "fp8kv"))
    assert "fp8kv generate" not in done.stdout
    warnings = json.loads((out / "fp8kv_calibration.json").read_text())["warnings"]
    start = "eval and generate cannot run this model on an FP8 cache: "
    (said,) = (each for each in warnings if each.startswith(start))
    assert reason in said
    assert said.endswith("; its scales are not affected")
    assert said in " ".join(done.stderr.split())
    one_line_error(fp8kv("eval", model, *TEXT), said)
    one_line_error(fp8kv("generate", model, *GENERATE, "--scales", out), said)
    if not options:  # transformers' own cache: six tokens of the prompt, and two that were read again
        assert "\n8 tokens: " in ran("generate", model, *GENERATE, "--cache", "int8_per_token_head").stdout
