"""Checkpoints with quantised weights, made from plain ones as the tools make them."""

import json

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
# as nvidia-modelopt 0.47 writes it, see tests/golden
MODELOPT = {
    "config_groups": {
        "group_0": {"input_activations": KV_SCHEME, "weights": KV_SCHEME, "targets": ["Linear"]}
    },
    "ignore": ["lm_head", "model.embed_tokens"],
    "quant_algo": "FP8",
    "kv_cache_scheme": KV_SCHEME,
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}
HF_QUANT_CONFIG = {
    "producer": MODELOPT["producer"],
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": MODELOPT["ignore"],
    },
}


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory, edit):
    """Replace each linear weight by the tensors that `edit` makes of its name and values."""
    file, kept = directory / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        is_linear = name.endswith("_proj.weight")
        kept |= edit(name.removesuffix(".weight"), tensor) if is_linear else {name: tensor}
    save_file(kept, file, {"format": "pt"})
    return directory


def modelopt_tensors(module, weight):
    """FP8 codes with one scale, a scale of activations, and KV scales, as ModelOpt writes them."""
    scale = weight.abs().max() / 448
    found = {f"{module}.weight": (weight / scale).to(FP8), f"{module}.weight_scale": scale}
    found[f"{module}.input_scale"] = torch.tensor(0.25)
    for letter in "kv":
        if module.endswith(f"{letter}_proj"):
            found[f"{module}.{letter}_scale"] = torch.tensor(0.5)
    return found


def modelopt(directory, *, config=True, document=True):
    """Quantise the weights of `directory` as ModelOpt's FP8 does, and say so in either file."""
    if config:
        edit_json(directory / "config.json", quantization_config=MODELOPT)
    if document:
        (directory / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
    return edit_tensors(directory, modelopt_tensors)


def block_fp8(directory, block=32):
    """Quantise in blocks, as DeepSeek's and Qwen's FP8 checkpoints are."""

    def edit(module, weight):
        rows, columns = weight.shape
        blocks = weight.view(rows // block, block, columns // block, block)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(FP8).view(rows, columns)
        return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}

    says = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block] * 2}
    edit_json(directory / "config.json", quantization_config=says)
    return edit_tensors(directory, edit)
