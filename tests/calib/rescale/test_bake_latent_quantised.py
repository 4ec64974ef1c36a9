"""`fp8kv bake` of quantised latent attention (MLA): as DeepSeek-V3 is, and where k_pe is mixed."""

import json
from dataclasses import replace

import pytest
import torch
from baking import bake, calibrated
from coded_forms import FORMS
from command_line import one_line_error
from families import LATENT, save_model, tiny_model
from safetensors.torch import load_file, save_file

from calib.files.model_directory import open_model_directory
from calib.rescale.proof import load_exact, observe
from calib.scales.stats_file import load_stats

# blocks of 32 lie as DeepSeek-V3's of 128 do: a head's queries end amid one, keys end with one
ALIGNED = {"qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 16}
MIXED = ALIGNED | {"qk_nope_head_dim": 24, "v_head_dim": 40}
WEIGHTS = r"(?:_proj|_mqa)\.weight$"
BLOCK = {
    "says": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    "options": {"high": 32, "wide": 32, "name": "weight_scale_inv"},
}


def quantised(form, path, *, latent=0.003, k_pe=9000.0, sizes=ALIGNED):
    options = {**LATENT["deepseek_v3"], **sizes, "q_lora_rank": 32, "kv_lora_rank": 64}
    model = tiny_model("deepseek_v3", **options, first_k_dense_replace=9)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.mul_(latent)
            layer.self_attn.kv_a_proj_with_mqa.weight[64:].mul_(k_pe)
    source = save_model(model.to(torch.bfloat16), path)
    changes = BLOCK if form == "fp8-block" else {}
    return replace(FORMS[form], **changes, weights=WEIGHTS).quantise(source, path.with_name("p"))


def baked(source, out, *flags):
    scales = calibrated(source, out.with_name("s"), "--strategy", "tensor", "--format", "fp8kv")
    return bake(source, scales, out, "--for", "fp8", "--json", *flags)


def both(*directories):
    return (observe(load_exact(open_model_directory(each))) for each in directories)


def amax(directory, out):
    stats = load_stats(
        calibrated(directory, out, "--strategy", "tensor", "--format", "fp8kv")
    ).layers.values()
    return [[x.amax.max().item() for x in (layer.k, layer.v)] for layer in stats]


@pytest.mark.parametrize(
    ("form", "latent"),
    [
        *((form, 0.003) for form in ("fp8-block", "compressed-fp8-channel", "compressed-mxfp4")),
        # of which scales in float16 hold no factors as small as the latent's would be
        *((form, 3000.0) for form in ("compressed-w4", "gptq-4")),
    ],
)
def test_scale_one_becomes_right(form, latent, tmp_path):
    source, out = quantised(form, tmp_path / "source", latent=latent), tmp_path / "out"
    done = baked(source, out)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["octaves_short"] == {"k": 0, "v": 0}
    old, new = both(source, out)
    assert torch.equal(old.logits, new.logits)
    for latent, k_pe in amax(out, tmp_path / "after"):
        assert 224 < latent <= 448
        assert 224 < k_pe <= 448
    codes = ["weight_packed", "qweight", "weight"]
    before, after = (load_file(each / "model.safetensors") for each in (source, out))
    for name in said["changed"]:
        assert name.endswith("norm.weight") or name.rpartition(".")[2] not in codes
        assert not torch.equal(before[name], after[name])


def test_k_pe_too_small_stays_where_blocks_mix_it(tmp_path):
    source = quantised("fp8-block", tmp_path / "source", k_pe=0.25, sizes=MIXED)
    done = baked(source, tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    before, after = (amax(tmp_path / d, tmp_path / f"{d}-s") for d in ("source", "out"))
    octaves = [(torch.tensor(448 / k_pe)).log2().floor().item() for _, k_pe in before]
    assert said["octaves_short"] == {"k": 0, "v": max(octaves)}
    assert min(octaves) > 2
    assert [k_pe for _, k_pe in before] == [k_pe for _, k_pe in after]
    assert all(224 < latent <= 448 for latent, _ in after)
    assert not any("q_b_proj" in name or "mqa" in name for name in said["changed"])
    shown = bake(source, tmp_path / "s", tmp_path / "again", "--for", "fp8").stdout
    assert "note: k_pe of some layers stays up to 2^" in " ".join(shown.split())


def test_k_pe_too_large_is_refused_where_blocks_mix_it(tmp_path):
    source = quantised("fp8-block", tmp_path / "source", sizes=MIXED)
    one_line_error(baked(source, tmp_path / "out"), "that share a scale need different factors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("k_pe", [0.25, 9000.0])
def test_static_scales_of_what_keys_and_values_are_made_of(k_pe, tmp_path):
    """One that is measured for the latent moves with it, where keys alone do not."""
    source = quantised("compressed-fp8-channel", tmp_path / "source", k_pe=k_pe)
    file = source / "model.safetensors"
    name = "model.layers.0.self_attn.kv_b_proj.input_scale"
    save_file(load_file(file) | {name: torch.tensor([0.25])}, file, {"format": "pt"})
    done = baked(source, tmp_path / "out")
    if k_pe > 1:
        one_line_error(done, "has one input scale")
        return
    assert done.exit_code == 0, done.stderr
    said = json.loads((tmp_path / "out" / "fp8kv_bake.json").read_text())
    factor = said["factors"]["model.layers.0.self_attn"]
    assert factor["k"] != [1.0]
    assert factor["v"] == [1.0]
    assert load_file(tmp_path / "out" / "model.safetensors")[name].item() == 0.25 * factor["k"][0]


@pytest.mark.parametrize("form", ["compressed-fp8", "modelopt-fp8", "compressed-nvfp4"])
def test_what_engines_would_round(form, tmp_path):
    source = quantised(form, tmp_path / "source")
    done = baked(source, tmp_path / "out")
    assert done.exit_code == 2
    one_line_error(done, "scale")
