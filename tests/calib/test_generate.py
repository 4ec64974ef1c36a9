"""`fp8kv generate`: text, speed, bytes, a line for each mistake; whole jobs on models with uneven heads."""

import json
import re
import shutil

import families
import pytest
import torch
from apply_cases import copy, rescale_values
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import edit_json, edit_tensors, published_gemma4, save_model, tiny_model
from families_page import compare_amax, plain_caches
from generation import PROMPT, as_json, continuation, generate
from safetensors.torch import load_file
from transformers import AutoTokenizer

from calib.caches.per_token_head import int8_per_token_head
from calib.caches.rounding import rounding
from calib.errors import InputError
from calib.files.names import CALIBRATION_FILE, SCALES_SHARD
from calib.generate import Generation, GenerationOptions, GenerationResult, generate_text
from calib.same_model.scale_ratios import compare_scales
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf import swap_attention
from fp8kv_runtime.hf.layers import Fp8CacheLayer

BYTES_PER_TOKEN = 3 * 2 * 2 * 16  # layers, K and V, KV heads, head_dim
VECTOR_SCALES = 3 * 2 * 2 * 4  # of a token, a float32 for each vector


@pytest.fixture(scope="module")
def calibrated(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "out"
    assert calibrate(model, "-o", out, "--strategy", "attn_head").exit_code == 0
    return out


def test_text_speed_and_bytes_are_printed_and_in_json_and_compare_adds_transformers_own(calibrated, model):
    expected = continuation(model, load_scales(calibrated))
    lines = succeeded(generate(calibrated, PROMPT)).stdout.splitlines()
    assert lines[0].split() == AutoTokenizer.from_pretrained(model).decode(expected).split()
    assert f"{len(expected)} tokens in " in lines[1]
    assert "tokens/s" in lines[1]
    assert lines[2] == "KV cache: 192 bytes a token in FP8, 384 in 16 bits (0.50x)"
    copy = "without the float32 copy that a CPU keeps beside it"
    assert lines[3] == f"14 tokens in blocks of 64: 0.01 MiB ({copy}); 0.02 MiB in 16 bits"
    facts = as_json(model, PROMPT, "--scales", calibrated)
    assert facts["fp8"]["token_ids"] == expected
    sizes = ("plain", "cached_tokens", "bytes_per_token", "cache_bytes", "cache_bytes_16bit")
    tokens = 6 + 9 - 1  # the last one is never fed back
    assert [facts[name] for name in sizes] == [None, tokens, *(n * BYTES_PER_TOKEN for n in (1, 64, 128))]
    facts = as_json(calibrated, PROMPT, "--compare")
    ours, plain = (facts[name]["token_ids"] for name in ("fp8", "plain"))
    assert plain == continuation(model)
    agrees = [a == b for a, b in zip(ours, plain, strict=True)]
    assert facts["same_tokens"] == [*agrees, False].index(False)
    compared = generate(calibrated, PROMPT, "--compare").stdout
    assert compared.startswith("with the cache in FP8:\n")
    assert re.search(r"with a 16-bit cache \([\d.]+ tokens/s; one run each is not a benchmark\)", compared)
    for theirs, same in (([4, 5, 6], 3), ([4, 5, 7], 2), ([8, 5, 6], 0), ([4], 1)):
        ours, plain = Generation("", [4, 5, 6], 1.0), Generation("", theirs, 1.0)
        assert GenerationResult(ours, plain, 3, 64, 1, 1, 1, 1).same_tokens == same


def test_sampling_repeats_with_its_seed_and_next_to_zero_is_greedy(calibrated, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of which a model on the CPU needs none
    before = torch.get_rng_state()
    one, again, other, cold, greedy = (
        as_json(calibrated, PROMPT, "--temperature", temperature, "--seed", seed)["fp8"]["token_ids"]
        for temperature, seed in (("2", 1), ("2", 1), ("2", 2), ("1e-300", 1), ("0", 2))
    )
    assert one == again != other
    assert cold == greedy
    assert torch.equal(torch.get_rng_state(), before)


def test_a_chat_template_is_applied(calibrated, tmp_path):
    model = shutil.copytree(calibrated, tmp_path / "chats")
    edit_json(model / "tokenizer_config.json", chat_template="w3 {{ messages[0]['content'] }} w4")
    assert as_json(model, PROMPT, "--chat")["cached_tokens"] == 1 + 6 + 1 + 9 - 1
    edit_json(model / "tokenizer_config.json", chat_template="{% if false %}{% endif %}")
    one_line_error(fp8kv("generate", model, PROMPT, "--chat"), "makes no token of this prompt")


def test_mistakes_get_one_line_before_the_model_is_loaded(calibrated, model, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.generate.load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, text in (("bad", "{"), ("longer", '{"kv_cache": {"scaling_factor": {"0": {"3": 1.0}}}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kv_cache_scales.json").write_text(text)
    louder = copy(model, tmp_path / "louder", lambda tensors: rescale_values(tensors, 8))
    succeeded(calibrate(louder, "-o", tmp_path / "own", "--strategy", "attn_head"))
    note = "note: A and B are of models with other weights: "
    assert note in " ".join(ran("compare", calibrated, tmp_path / "own").stdout.split())
    rope = shutil.copytree(calibrated, tmp_path / "rope") / CALIBRATION_FILE
    marks = json.loads(rope.read_text())["marks"]
    edit_json(rope, marks={**marks, "settings": {**marks["settings"], "rope_parameters": "another"}})
    (note,) = compare_scales(calibrated, rope.parent).notes
    assert note.startswith("A and B are of other models: rope_parameters {")
    cut, lost = shutil.copytree(calibrated, tmp_path / "cut"), "model.layers.1.self_attn.v_scale"
    edit_tensors(cut, lambda tensors: tensors.pop(lost), SCALES_SHARD)
    nvfp4 = ("--cache", "nvfp4")
    # layers and heads are as many
    mistral = save_model(tiny_model("mistral"), tmp_path / "mistral")
    own = f"'{calibrated}' is of another model: its config says model_type llama, that of '{mistral}' mistral"
    for arguments, said in (
        ((calibrated, " "), "makes no token of this prompt"),
        ((model, PROMPT), "given with --scales DIR, and 1.0 with --scales none"),
        ((model, PROMPT, "--scales", tmp_path / "no"), f"'{tmp_path / 'no'}' is not a directory"),
        ((model, PROMPT, "--scales", tmp_path / "bad"), "kv_cache_scales.json' is not JSON"),
        ((mistral, PROMPT, "--scales", calibrated), own),
        ((louder, PROMPT, "--scales", calibrated), f"the scales of '{calibrated}' do not fit '{louder}'"),
        ((model, PROMPT, "--scales", tmp_path / "longer"), "has a layer 3, and"),
        ((calibrated, PROMPT, "--backend", "triton"), "--backend triton: its kernels need a GPU"),
        ((calibrated, PROMPT, "--chat"), "no chat template; leave out --chat"),
        ((model, PROMPT, "--cache", "fp8_e4m3"), "nvfp4_ds_mla (did you mean 'fp8'?)"),
        ((model, PROMPT, "--cache", "octave_k3v4"), "cache octave_k3v4 is not simulated: its writer is HIP"),
        ((model, PROMPT, "--cache", "fp8_ds_mla"), "fp8_ds_mla holds latents (MLA), and this model caches K"),
        ((cut, PROMPT), f"says '{lost}' is in '{SCALES_SHARD}', but it is not; put '{SCALES_SHARD}' back"),
        ((model, PROMPT, *nvfp4, "--scales", "none"), "--scales is for --cache fp8, not for nvfp4; leave it"),
        ((model, PROMPT, *nvfp4, "--backend", "triton"), "--backend triton is for --cache fp8"),
        ((calibrated, "w3 " * 248), "prompt + --max-new-tokens 257 is longer than the model's 256 positions"),
    ):
        one_line_error(generate(*arguments), said)
    with pytest.raises(InputError, match="the prompt is empty"):
        generate_text(str(calibrated), "", options=GenerationOptions(8), overrides={})


def test_scale_one_needs_no_calibration_and_a_head_of_another_size_is_refused(model, tmp_path):
    assert len(as_json(model, PROMPT, "--scales", "none")["fp8"]["token_ids"]) == 9
    broken = copy(model, tmp_path / "broken", lambda tensors: tensors["lm_head.weight"][0].fill_(torch.nan))
    for flags in (("--scales", "none"), ("--cache", "int8_per_token_head", "--temperature", 1)):
        one_line_error(generate(broken, PROMPT, *flags), "the model's logits hold NaN, which is not text")
    odd = save_model(tiny_model("llama", head_dim=24), tmp_path / "odd")
    one_line_error(generate(odd, PROMPT, "--cache", "nvfp4"), "nvfp4: head size 24 is not a multiple of 16")


def test_int8_is_what_attention_reads_and_its_bytes_and_speed_are_said(model, monkeypatch):
    def attend(original, module, query, key, value, *args, **kwargs):
        return original(module, query, int8_per_token_head(key), int8_per_token_head(value), *args, **kwargs)

    facts = as_json(model, PROMPT, "--cache", "int8_per_token_head", "--compare")
    size, plain = BYTES_PER_TOKEN + VECTOR_SCALES, 2 * BYTES_PER_TOKEN
    assert (facts["cache"], facts["block_size"]) == ("int8_per_token_head", None)
    plain_text = continuation(model)
    monkeypatch.setattr("generation.fp8_attention", swap_attention)
    assert facts["fp8"]["token_ids"] == continuation(model, attend)
    assert facts["plain"]["token_ids"] == plain_text
    assert (facts["bytes_per_token"], facts["bytes_per_token_16bit"]) == (size, plain)
    assert [facts[f"cache_bytes{x}"] for x in ("", "_16bit")] == [14 * size, 14 * plain]
    said = generate(model, PROMPT, "--cache", "int8_per_token_head", "--compare").stdout
    ratio = f"({size / plain:.2f}x)"
    assert f"KV cache: {size} bytes a token in int8_per_token_head, {plain} in 16 bits {ratio}" in said
    assert "simulated, so the speed is not an engine's; known from vLLM" in said
    assert "blocks of" not in said
    for coarser in ("int4_per_token_head", "nvfp4"):
        assert as_json(model, PROMPT, "--cache", coarser)["fp8"]["token_ids"] != plain_text


def test_lmdeploy_keeps_its_scales_in_the_dtype_of_the_config(tiny_directory, monkeypatch):
    taken = []
    spy = lambda name, layers, dtype: taken.append(dtype) or rounding(name, layers, dtype)  # noqa: E731
    monkeypatch.setattr("calib.generate.rounding", spy)
    edit_json(tiny_directory / "config.json", dtype=None, torch_dtype="bfloat16")
    as_json(tiny_directory, PROMPT, "--cache", "lmdeploy_int4", "--dtype", "float32")
    assert taken == [torch.bfloat16]


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
