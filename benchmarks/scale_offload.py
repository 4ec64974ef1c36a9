"""A model three times the size of the memory it may take, beside the same model in memory.

Writes a Llama of 3 billion random parameters, calibrates it both ways, each in a process of its
own and with none of its files cached by the system, and compares memory, bytes read and time.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scale_child import calibrate_in_child
from torch import Tensor
from transformers import LlamaConfig

from calib.files.text import parse_size
from calib.models.sources import builtin_model

TOKENIZER = "builtin:smollm2"
MAX_MEMORY = "2GiB"
LAYERS = 28
# few tokens: a CPU without bfloat16 products takes minutes for each hundred
DATA = {"data.samples": 4, "data.seq_len": 96}
# the shapes of Llama 3.2 3B
CONFIG = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
LAYERS_PER_SHARD = 4
# beside peak <= --max-memory
READ_TARGET = 1.05  # bytes read over bytes of weights
WALL_TARGET = 1.4  # wall time over that in memory, loading included


def measure(scratch: Path) -> dict[str, Any]:
    """Write the model under `scratch` and calibrate it both ways."""
    model = scratch / "llama"
    print("writing the model", file=sys.stderr, flush=True)
    weights = write_model(model, LAYERS)
    modes = {
        "layerwise": {"offload": "layerwise", "max_memory": MAX_MEMORY},
        "in memory": {"offload": "none"},
    }
    runs = {}
    for name, mode in modes.items():
        _uncache(model)
        runs[name] = calibrate_in_child(model, scratch / mode["offload"], DATA | mode)
    shutil.rmtree(model)
    return {
        "model": CONFIG | {"num_hidden_layers": LAYERS, "weights": "random, bfloat16"},
        "weight_bytes": weights,
        "max_memory": MAX_MEMORY,
        "runs": runs,
        "comparison": compare(runs, weights, parse_size(MAX_MEMORY)),
    }


def write_model(directory: Path, num_layers: int) -> int:
    """Write a random Llama, shard by shard, and return the bytes of its weights."""
    shutil.copytree(builtin_model(TOKENIZER), directory, ignore=shutil.ignore_patterns("*.safe*"))
    config = LlamaConfig(**CONFIG, num_hidden_layers=num_layers, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    ends = {"model.embed_tokens.weight": [config.vocab_size, config.hidden_size]}
    shards = [ends | {"model.norm.weight": [config.hidden_size]}]
    for first in range(0, num_layers, LAYERS_PER_SHARD):
        indices = range(first, min(first + LAYERS_PER_SHARD, num_layers))
        shards.append({n: shape for i in indices for n, shape in _layer_shapes(config, i).items()})
    weight_map, total = {}, 0
    for number, shapes in enumerate(shards):
        tensors = {name: _random(shape, generator) for name, shape in shapes.items()}
        shard = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, directory / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _layer_shapes(config: LlamaConfig, index: int) -> dict[str, list[int]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    return {f"model.layers.{index}.{name}.weight": shape for name, shape in shapes.items()}


def _random(shape: list[int], generator: torch.Generator) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    return tensor.fill_(1) if len(shape) == 1 else tensor.normal_(0, 0.02, generator=generator)


def _uncache(directory: Path) -> None:
    """Have the system drop what it holds of the weight files, so that both runs read the disk."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(runs: dict[str, Any], weights: int, limit: int) -> dict[str, Any]:
    """Judge the layerwise run against its targets; both must have measured the same."""
    layered, whole = runs["layerwise"], runs["in memory"]
    read = layered["bytes_read"]["calls"] / weights
    wall = layered["wall_seconds"] / whole["wall_seconds"]
    return {
        "same_statistics": layered["digest"] == whole["digest"],
        "peak_bytes": layered["peak_bytes"],
        "peak_met": layered["peak_bytes"] <= limit,
        "read_ratio": read,
        "read_met": read <= READ_TARGET,
        "wall_ratio": wall,
        "wall_met": wall <= WALL_TARGET,
    }
