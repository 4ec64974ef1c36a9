"""A two-layer checkpoint on disk and scales for it, made by hand so that goldens stay readable."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.files.model_directory import open_model_directory
from calib.scales.scales import KVScales, LayerScales

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(config=None, names=None, extra=None):
        directory = tmp_path / "source"
        directory.mkdir(exist_ok=True)
        names = names or [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
        tensors = {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}
        save_file({**tensors, **(extra or {})}, directory / "model.safetensors")
        layers = 1 + max(int(part) for part in ".".join(names).split(".") if part.isdecimal())
        document = {**CONFIG, "num_hidden_layers": layers, **(config or {})}
        (directory / "config.json").write_text(json.dumps(document))
        (directory / "tokenizer.json").write_text("{}")
        return open_model_directory(directory)

    return make


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint()


def make_scales(strategy="tensor", *, q=False, fp8_dtype="e4m3fn", modules=None):
    kv, heads = {"tensor": ([1], [1]), "attn_head": ([2], [4]), "channel": ([2, 3], [4, 3])}[strategy]
    layers = {}
    for i, name in enumerate(modules or [f"model.layers.{i}.self_attn" for i in range(2)]):
        query = ramp(heads, 0.5 + i) if q else None
        # the larger is K's in the first layer, V's in the next
        layers[name] = LayerScales(i, k=ramp(kv, 0.25 + i), v=ramp(kv, 0.125 + 3 * i), q=query)
    return KVScales(strategy, fp8_dtype, layers)


def ramp(shape, start):
    return start + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 64


def describe(out):
    """Every JSON document, and every tensor of the extra shard, of an output directory."""
    documents = {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    documents.pop("tokenizer.json", None)
    shard = out / "model-fp8kv-scales.safetensors"
    tensors = sorted(load_file(shard).items()) if shard.exists() else ()
    found = {name: [str(x.dtype), list(x.shape), x.flatten().tolist()] for name, x in tensors}
    return {"documents": documents, "tensors": found}
