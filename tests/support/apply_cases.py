"""Commands on a tiny Llama, on edited copies of it, on its scales, and on packs of them."""

import json
import shutil

import torch
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from families import edit_json, edit_tensors
from safetensors.torch import load_file, save_file

from calib.files.stored_scales import read_scales

LAYERS, ATTENTION = range(3), "model.layers.{}.self_attn.{}_proj.weight"
NORMS = {"input_layernorm": [f"self_attn.{letter}" for letter in "qkv"]}
NORMS |= {"post_attention_layernorm": ["mlp.gate", "mlp.up"]}
PACK_FILES = {"README.md", "fp8kv_calibration.json", "fp8kv_pack.json", "fp8kv_stats.safetensors"}
PACK_FILES |= {"kv_cache_scales.json"}


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def report_of(directory):
    return json.loads((directory / "fp8kv_calibration.json").read_text())


def calibrated(model, out, *flags):
    succeeded(calibrate(model, "-o", out, *flags))
    return out


def scales(directory):
    return [(layer.layer, layer.k, layer.v, layer.q) for layer in read_scales(directory).layers]


def applied(measured, model, out, *flags):
    ran("apply", measured, model, "-o", out, *flags)
    return out


def packed(measured, path, *flags):
    ran("pack", measured, "-o", path, *flags)
    return path


def manifest(pack):
    return json.loads((pack / "fp8kv_pack.json").read_text())


def refused(measured, model, out, *phrases, flags=(), status=2):
    one_line_error(fp8kv("apply", measured, model, "-o", out, *flags), *phrases, status=status)
    assert not out.exists()


def copy(model, path, edit=lambda tensors: None, config=None):
    shutil.copytree(model, path)
    edit_tensors(path, edit)
    edit_json(path / "config.json", **(config or {}))
    return path


def edited(measured, path, **changes):
    shutil.copytree(measured, path)
    edit_json(path / "fp8kv_calibration.json", **changes)
    return path


def smooth(tensors, size=0.5):
    """Move factors from norms into the weights that read them, as AWQ and SmoothQuant do."""
    generator = torch.Generator().manual_seed(1)
    for layer in LAYERS:
        for norm, readers in NORMS.items():
            factors = torch.rand(64, generator=generator) * 2 * size + 1 - size
            tensors[f"model.layers.{layer}.{norm}.weight"] /= factors
            for reader in readers:
                tensors[f"model.layers.{layer}.{reader}_proj.weight"] *= factors


def rescale_values(tensors, factor=1.5, channels=slice(None)):
    for layer in LAYERS:
        tensors[ATTENTION.format(layer, "v")][channels] *= factor


def damage(directory, out, changes):
    """A copy of an output whose scales, by name, are changed; None takes one away."""
    shutil.copytree(directory, out)
    path, index = out / "model-fp8kv-scales.safetensors", out / "model.safetensors.index.json"
    tensors, document = load_file(path), json.loads(index.read_text())
    for name, value in changes.items():
        if value is None:
            del tensors[name], document["weight_map"][name]
        else:
            is_tensor = isinstance(value, torch.Tensor)
            tensors[name] = value if is_tensor else torch.full_like(tensors[name], value)
    save_file(tensors, path, {"format": "pt"})
    index.write_text(json.dumps(document))
    return out
