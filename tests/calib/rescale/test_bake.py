"""`fp8kv bake`: the same outputs bit for bit, and K and V that need no scales."""

import json
import re
from pathlib import Path

import pytest
import torch
from baking import OTHERS, bake, calibrated, in_float32, model_directory, scales_of, seen
from command_line import fp8kv, one_line_error
from families import FAMILIES, SHARED_KV, save_model, tiny_model
from safetensors.torch import load_file, save_file

from calib.errors import UnsupportedModelError
from calib.models.sources import find_model
from calib.rescale import rope_pairs
from calib.rescale.bake import baked_factors
from calib.rescale.factors import octave_factor, uniform_factors
from calib.rescale.rope_pairs import rotated_pairs
from calib.rescale.weight_changes import AttentionWeights, cached_attention, list_changes
from calib.scales.stats_file import load_stats

EXACT = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "glm4", "olmo2"),
    *("starcoder2", "gpt_neox", "gpt_oss", "granite", "cohere2", "falcon"),
    *("gemma2", "gemma3_text", "qwen3_next"),
]
# what their norms multiply by 1 + is not exact in bfloat16
FLAGS = dict.fromkeys(("qwen3_next", "gemma3_text"), ("--dtype", "float32"))
SHARED_BY_HEADS = {"qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"}
DOCS = Path(__file__).parents[3] / "docs" / "bake.md"
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCS.read_text(), re.MULTILINE))


@pytest.mark.parametrize("model_type", EXACT)
def test_scale_one_becomes_right(model_type, tmp_path):
    source = model_directory(tmp_path / "source", model_type)
    before = calibrated(source, tmp_path / "before", "--strategy", "attn_head")
    done = bake(source, before, tmp_path / "baked", "--for", "fp8", *FLAGS.get(model_type, ()))
    assert done.exit_code == 0, done.stderr
    (logits, kv), (same, baked_kv) = seen(source), seen(tmp_path / "baked")
    assert torch.equal(logits, same)
    assert any(not torch.equal(kv[name][0], baked_kv[name][0]) for name in kv)
    after = calibrated(tmp_path / "baked", tmp_path / "after", "--strategy", "attn_head")
    old, new = scales_of(before), scales_of(after)
    assert (old / new).log2().frac().abs().max() == 0
    assert new.max() <= 1
    # the largest head of each layer, and each head where no norm is shared, fills the upper octave
    smallest = new.amax(-1) if model_type in SHARED_BY_HEADS else new
    assert smallest.min() > 0.5
    flags = f", `{' '.join(FLAGS[model_type])}`" if model_type in FLAGS else ""
    k = f"per {'layer' if model_type in SHARED_BY_HEADS else 'head'}{flags}"
    assert ROWS[model_type] == f"{k} | per head"
    verified = fp8kv("verify", tmp_path / "baked", "--json")
    assert verified.exit_code == 0
    assert json.loads(verified.stdout)["baked"]


@pytest.mark.parametrize("model_type", EXACT)
def test_channels_become_even(model_type, tmp_path):
    source = model_directory(tmp_path / "source", model_type)
    before = calibrated(source, tmp_path / "before")
    done = bake(source, before, tmp_path / "baked", "--for", "int8", *FLAGS.get(model_type, ()))
    assert done.exit_code == 0, done.stderr
    (logits, _), (same, _) = seen(source), seen(tmp_path / "baked")
    said = json.loads((tmp_path / "baked" / "fp8kv_bake.json").read_text())
    assert torch.equal(logits, same) == said["exact"]
    assert said["exact"] or model_type == "gemma3_text"  # its 1 + 3.1e-6 takes all of float32
    model = in_float32(source)
    after = load_stats(calibrated(tmp_path / "baked", tmp_path / "after"))
    for name, module in cached_attention(model).items():
        pair = rotated_pairs(model, module)
        shared = AttentionWeights(module, model.get_submodule(name)).shares_k
        old, new = (load_stats(before).layers[name], after.layers[name])
        k_before, k = (x.k.amax.maximum(x.k.amax[:, pair]) for x in (old, new))
        if shared:
            k_before, k = (x.amax(0, keepdim=True) for x in (k_before, k))
        for was, became in ((k_before, k), (old.v.amax, new.v.amax)):
            # half of the way, of at most ten octaves, to the nearest power of two
            ratio = was / was.amax(-1, keepdim=True)
            wanted = ratio.log2() - ratio.clamp(min=2**-10).log2() / 2
            found = (became / was.amax(-1, keepdim=True)).log2()
            assert (found - wanted).abs().max() < 0.501


def test_baking_a_stress_twin_gives_the_same_model(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    assert fp8kv("stress", source, "-o", tmp_path / "twin").exit_code == 0
    baked = []
    for name in ("source", "twin"):
        scales = calibrated(tmp_path / name, tmp_path / f"{name}-scales")
        assert bake(tmp_path / name, scales, tmp_path / f"{name}-b", "--for", "fp8").exit_code == 0
        baked.append(load_file(tmp_path / f"{name}-b" / "model.safetensors"))
    assert baked[0].keys() == baked[1].keys()
    assert all(torch.equal(tensor, baked[1][name]) for name, tensor in baked[0].items())


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", [*range(8, 16), *range(8)]),
        # norms with weights of 0.3 beside 60: in bfloat16 the second hides the first
        ("qwen3", [*range(12, 24), *range(12)]),
        ("gemma3_text", [*range(12, 24), *range(12)]),
        ("glm4", [1, 0, 3, 2, 5, 4, 7, 6, *range(8, 16)]),
        ("cohere2", [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14]),
        ("gpt_neox", [2, 3, 0, 1, *range(4, 16)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_found_by_trying(model_type, expected, dtype):
    model = tiny_model(model_type, **(FAMILIES | OTHERS)[model_type]).to(dtype)
    for module in cached_attention(model).values():
        assert rotated_pairs(model, module).tolist() == expected


def test_pairs_that_turn_slowly_are_found():
    slow = {"rope_theta": 1e13, "rope_type": "default", "partial_rotary_factor": 0.5}
    options = OTHERS["glm4"] | {"rope_parameters": slow, "max_position_embeddings": 2**20}
    model = tiny_model("glm4", **options).float()
    module = next(iter(cached_attention(model).values()))
    assert rotated_pairs(model, module).tolist() == [1, 0, 3, 2, 5, 4, 7, 6, *range(8, 16)]


def test_layers_without_rope(tmp_path):
    model = tiny_model("smollm3", no_rope_layers=[0, 1, 1], num_key_value_heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            rows = layer.self_attn.k_proj.weight
            rows.mul_(torch.linspace(-6, 6, len(rows)).exp2()[:, None])
    source = save_model(model.to(torch.bfloat16), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales")
    done = bake(source, scales, tmp_path / "baked", "--for", "int8")
    assert done.exit_code == 0, done.stderr
    said = json.loads((tmp_path / "baked" / "fp8kv_bake.json").read_text())["factors"]
    first, second = (torch.tensor(said[f"model.layers.{i}.self_attn"]["k"]) for i in range(2))
    half = first.shape[-1] // 2
    assert not torch.equal(first[:, :half], first[:, half:])
    assert torch.equal(second[:, :half], second[:, half:])


def test_wrong_pairs_are_not_proved(tmp_path, monkeypatch):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales")
    wrong = torch.arange(16) ^ 1
    monkeypatch.setattr(rope_pairs, "rotated_pairs", lambda *_: wrong)
    done = bake(source, scales, tmp_path / "baked", "--for", "int8")
    one_line_error(done, "cannot be baked: K of model.layers.0", "Nothing was written")
    assert not (tmp_path / "baked").exists()


def test_the_same_weights_in_another_dtype(tmp_path):
    wide = model_directory(tmp_path / "wide", "llama", dtype=torch.float32)
    scales = calibrated(wide, tmp_path / "scales")
    narrow = model_directory(tmp_path / "narrow", "llama")
    assert bake(narrow, scales, tmp_path / "out", "--for", "fp8").exit_code == 0


def test_shards_that_do_not_change_are_linked(tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {"attention.safetensors": "self_attn", "rest.safetensors": ""}
    weight_map = {}
    for file, word in parts.items():
        held = {n: t for n, t in tensors.items() if word in n and n not in weight_map}
        save_file(held, source / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    scales = calibrated(source, tmp_path / "scales")
    out = tmp_path / "out"
    assert bake(source, scales, out, "--for", "fp8").exit_code == 0
    assert (out / "rest.safetensors").samefile(source / "rest.safetensors")
    assert not (out / "attention.safetensors").samefile(source / "attention.safetensors")
    name = "model.safetensors.index.json"
    assert (out / name).read_text() == (source / name).read_text()


@pytest.mark.parametrize(
    ("scale", "factor"),
    [(1.0, 1), (0.51, 1), (0.5, 2), (1.001, 0.5), (3e-5, 2**15), (448.0, 2**-9)],
)
def test_an_octave(scale, factor):
    assert octave_factor(torch.tensor([scale])).item() == factor


def test_a_factor_that_a_shared_norm_cannot_hold():
    model = tiny_model("qwen3", **FAMILIES["qwen3"])
    modules = cached_attention(model)
    name, module = next(iter(modules.items()))
    factors = uniform_factors({name: module}, 2.0, 1.0)
    factors[name].k[0] *= 2
    with pytest.raises(UnsupportedModelError, match="one weight for all heads"):
        list_changes(model, modules, factors)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gpt2", {}, "has no linear layer named q_proj"),
        ("gemma3n_text", SHARED_KV, "attends to another layer's K and V"),
        ("olmo", {"clip_qkv": 0.5}, "clips Q, K and V"),
        ("llama4_text", {}, "does not follow a factor in front of it"),
        ("bitnet", {}, "does not follow a factor in front of it"),
    ],
)
def test_what_cannot_be_baked(model_type, options, reason, tmp_path):
    source = save_model(tiny_model(model_type, **options).to(torch.bfloat16), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    one_line_error(bake(source, scales, tmp_path / "out", "--for", "fp8"), reason)
    assert not (tmp_path / "out").exists()
    assert f"refused: {reason} |" in ROWS[model_type]


@pytest.mark.parametrize("head_dim", [6, 24, 80])  # no powers of two, nor K mixed by RoPE alone
def test_channels_that_a_norm_mixes_behind_rope(head_dim, tmp_path):
    model = tiny_model("llama4_text", head_dim=head_dim).to(torch.bfloat16)
    source = save_model(model, tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    refusal = "mixes channels of K in another way than RoPE's pairs"
    one_line_error(bake(source, scales, tmp_path / "out", "--for", "int8"), refusal)
    with pytest.raises(UnsupportedModelError, match=refusal):
        baked_factors(model.float(), find_model(str(source)), load_stats(scales), "int8")
    for cache in ("int4_per_token_head", "lmdeploy_int4"):
        done = fp8kv("generate", source, "w5", "--cache", cache, "--max-new-tokens", 2)
        assert done.exit_code == 0, done.stderr


def test_the_table_has_no_other_rows():
    assert ROWS.keys() == {*EXACT, "gpt2", "gemma3n_text", "olmo", "llama4_text", "bitnet"}


def test_layers_without_rope_before_those_with(tmp_path):
    options = {"no_rope_layers": [0, 1, 1]}
    source = save_model(tiny_model("smollm3", **options).bfloat16(), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales")
    done = bake(source, scales, tmp_path / "out", "--for", "int8")
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    "flags", [("--headroom", "0.1"), ("--observer", "percentile"), ("--fp8-dtype", "e5m2")]
)
def test_recipes_that_clip_or_reach_further(flags, tmp_path):
    source = model_directory(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "scales", *flags, "--format", "fp8kv")
    assert bake(source, scales, tmp_path / "out", "--for", "fp8").exit_code == 0
    after = calibrated(tmp_path / "out", tmp_path / "after", "--strategy", "attn_head")
    assert scales_of(after).min() > 0.5
    assert scales_of(after).max() <= 1
