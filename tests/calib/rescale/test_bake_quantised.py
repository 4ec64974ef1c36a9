"""`fp8kv bake` of quantised weights: factors go into scales, as fine as these and engines hold."""

import json

import pytest
import torch
from coded_forms import FORMS
from command_line import calibrate, fp8kv, one_line_error
from families import save_model, tiny_model
from quantized_models import edit_json
from safetensors.torch import load_file, save_file

from calib.errors import UnsupportedModelError
from calib.files.model_directory import open_model_directory
from calib.files.tensors import stored_tensors
from calib.models.quantized.coded_weight import CodedWeight, WeightScheme
from calib.rescale.proof import load_exact, observe
from calib.rescale.stored_weights import edited_scales
from calib.scales.stats_file import load_scales

# finest factors of K and V: of each head, or of the layer
HELD = {
    "compressed-w4": ("head", "head"),
    "compressed-w4-asymmetric": ("head", "head"),
    "compressed-w4-ordered": ("head", "head"),
    "compressed-w3": ("head", "head"),
    "compressed-w8-channel": ("head", "layer"),
    "compressed-fp8-channel": ("head", "layer"),
    "compressed-int8": ("head", "layer"),
    "compressed-int8-asymmetric": ("head", "layer"),
    "compressed-mxfp4": ("head", "head"),
    "gptq-4": ("head", "head"),
    "gptq-4-ordered": ("head", "layer"),
    "gptq-v2": ("head", "head"),
    "awq": ("head", "head"),
    "fp8-block": ("layer", "layer"),
}
REFUSED = {
    "compressed-fp8": "engines requantise Q, K and V",
    "compressed-nvfp4": "nobody has checked how engines fuse",
    "modelopt-fp8": "engines requantise Q, K and V",
}


def quantised(form, path, octaves=2, k_size=90.0, v_size=60.0):
    """A model whose heads and channels are of different sizes, as `form` stores it."""
    model = tiny_model("llama", hidden_size=128, head_dim=32)
    with torch.no_grad():
        for layer in model.model.layers:
            # scales in float16, which Q's and the output's become smaller in
            layer.self_attn.q_proj.weight.mul_(32)
            layer.self_attn.o_proj.weight.mul_(32)
            for name, size in (("k_proj", k_size), ("v_proj", v_size)):
                rows = getattr(layer.self_attn, name).weight
                rows.mul_(torch.tensor([size, size / 5]).repeat_interleave(32)[:, None])
                rows.mul_(torch.linspace(0, -octaves, 64).exp2()[:, None])
    source = save_model(model.to(torch.bfloat16), path)
    return FORMS[form].quantise(source, path.with_name("plain"))


def calibrated(source, out):
    done = calibrate(source, "-o", out, "--dtype", "float32", "--strategy", "attn_head", "--format", "fp8kv")
    assert done.exit_code == 0, done.stderr
    return out


def scales_of(directory):
    layers = load_scales(directory).layers.values()
    return torch.stack([torch.stack([layer.k, layer.v]) for layer in layers])


@pytest.mark.parametrize("form", HELD)
def test_scale_one_becomes_right(form, tmp_path):
    source = quantised(form, tmp_path / "source")
    before = calibrated(source, tmp_path / "before")
    done = fp8kv("bake", source, "--scales", before, "--for", "fp8", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    old, new = (observe(load_exact(open_model_directory(d))) for d in (source, tmp_path / "out"))
    assert torch.equal(old.logits, new.logits)
    after = scales_of(calibrated(tmp_path / "out", tmp_path / "after"))
    factors = scales_of(before) / after
    assert factors.log2().frac().abs().max() == 0
    for index, held in enumerate(HELD[form]):
        scales = after[:, index]
        assert scales.max() <= 1
        assert scales.min() > 0.5 if held == "head" else scales.amax(-1).min() > 0.5
        assert bool((factors[:, index, 0] == factors[:, index, 1]).all()) == (held == "layer")
    names = {"model.safetensors", "fp8kv_bake.json", "README.md"}
    for file in source.iterdir():
        same = (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
        assert same != (file.name in names)


@pytest.mark.parametrize("form", ["gptq-4", "awq"])
def test_factors_as_large_as_the_scales_hold(form, tmp_path):
    source = quantised(form, tmp_path / "source", v_size=0.05)
    before = calibrated(source, tmp_path / "before")
    out = ("-o", tmp_path / "out")
    done = fp8kv("bake", source, "--scales", before, "--for", "fp8", *out)
    assert done.exit_code == 0, done.stderr
    assert "note: V of some heads stays up to 2^" in " ".join(done.stdout.split())
    said = json.loads((tmp_path / "out" / "fp8kv_bake.json").read_text())
    after = scales_of(calibrated(tmp_path / "out", tmp_path / "after"))
    lost = 2 ** said["octaves_short"]["v"]
    assert 0.5 < after[:, 1].min() * lost <= 1
    assert after[:, 1].min() > 8 * scales_of(before)[:, 1].min()
    assert after.max() <= 1


def test_a_bias_that_holds_no_larger_factor(tmp_path):
    source = quantised("gptq-4", tmp_path / "source", k_size=0.1)
    file = source / "model.safetensors"
    tensors = load_file(file)
    small = {}
    for module in (f"model.layers.{i}.self_attn" for i in range(3)):
        for letter, size in {"q": 128, "k": 64, "v": 64, "o": 128}.items():
            # halved, it is rounded
            value = 2.0**-14 * 1.999 if letter == "q" else 0.0
            bias = torch.full((size,), value, dtype=torch.float16)
            small[f"{module}.{letter}_proj.bias"] = bias
    save_file(tensors | small, file, {"format": "pt"})
    edit_json(source / "config.json", attention_bias=True)
    before = calibrated(source, tmp_path / "before")
    done = fp8kv("bake", source, "--scales", before, "--for", "fp8", "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["octaves_short"]["k"] > 0


@pytest.mark.parametrize("form", REFUSED)
def test_what_engines_would_round(form, tmp_path):
    source = quantised(form, tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales")
    done = fp8kv("bake", source, "--scales", scales, "--for", "fp8", "-o", tmp_path / "out")
    one_line_error(done, REFUSED[form])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["compressed-w4", "compressed-fp8-channel", "gptq-4"])
def test_channels_of_k_become_even(form, tmp_path):
    source = quantised(form, tmp_path / "source", octaves=10)
    scales = calibrated(source, tmp_path / "scales")
    done = fp8kv("bake", source, "--scales", scales, "--for", "int8", "-o", tmp_path / "o", "--json")
    assert done.exit_code == 0, done.stderr
    # V would need factors per input channel of the output projection
    assert json.loads(done.stdout)["layers_with_factors_per_head"] == {"k": 3, "v": 0}


def test_a_layer_that_holds_no_factor_is_left(tmp_path):
    source = quantised("compressed-w4", tmp_path / "source", octaves=10)
    file = source / "model.safetensors"
    tensors = load_file(file)
    for letter in "qo":  # float16's smallest numbers: no half of them
        scale = f"model.layers.1.self_attn.{letter}_proj.weight_scale"
        tensors[scale] = torch.full_like(tensors[scale], 2.0**-24)
    save_file(tensors, file, {"format": "pt"})
    scales = calibrated(source, tmp_path / "scales")
    flags = ("--scales", scales, "-o", tmp_path / "out")
    done = fp8kv("bake", source, *flags, "--for", "int8", "--json")
    assert done.exit_code == 0, done.stderr
    assert "cannot hold" in json.loads(done.stdout)["left"]["model.layers.1.self_attn"]
    said = json.loads((tmp_path / "out" / "fp8kv_bake.json").read_text())["factors"]
    assert set(torch.tensor(said["model.layers.1.self_attn"]["k"]).flatten().tolist()) == {1.0}
    assert len(set(torch.tensor(said["model.layers.0.self_attn"]["k"]).flatten().tolist())) > 1
    shown = fp8kv("bake", source, *flags, "--for", "int8", "--overwrite").stdout
    assert "note: 1 layers stay as they are" in " ".join(shown.split())


def test_another_dtype_is_refused(tmp_path):
    source = quantised("compressed-w4", tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales")
    flags = ("--for", "int8", "--dtype", "float32")
    done = fp8kv("bake", source, "--scales", scales, "-o", tmp_path / "out", *flags)
    one_line_error(done, "are quantised", "leave --dtype away")


def test_the_scale_of_what_goes_into_the_output_projection(tmp_path):
    source = quantised("compressed-fp8-channel", tmp_path / "source")
    file = source / "model.safetensors"
    tensors = load_file(file)
    module = "model.layers.0.self_attn.o_proj"
    save_file(tensors | {f"{module}.input_scale": torch.tensor([0.25])}, file)
    stored = stored_tensors(open_model_directory(source))
    parts = {"scale": f"{module}.weight_scale"}
    weight = CodedWeight(f"{module}.weight", (128, 128), parts, WeightScheme((1, None)))
    found = edited_scales(weight, stored, torch.full((1, 128), 0.125))
    assert found[f"{module}.input_scale"].item() == 2
    assert torch.equal(found[f"{module}.weight_scale"], tensors[f"{module}.weight_scale"] / 8)
    uneven = torch.ones(1, 128)
    uneven[0, 0] = 2
    with pytest.raises(UnsupportedModelError, match="different factors"):
        edited_scales(weight, stored, uneven)
