"""A model three times the size of the memory it may take, beside the same model in memory.

Writes a Llama of 3 billion random parameters, calibrates it both ways, each in a process of its
own and with none of its files cached by the system, and compares memory, bytes read and time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine, peak_bytes, write_result
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from calib.builtin import builtin_model
from calib.flags import assignments
from calib.job import run
from calib.offload.sizes import parse_size
from calib.recipe import load_recipe

HERE = Path(__file__).parent
DATASET = "builtin:python-docs"
TOKENIZER = "builtin:smollm2"
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


def main() -> None:
    """Write the model, calibrate it both ways, print the table, write the JSON."""
    args = _arguments()
    if args.child:
        print(json.dumps(_calibrate(args.child, args.set)))
        return
    facts = machine(args.date) | {"ram_bytes": _ram_bytes()}
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="fp8kv-scale-") as scratch:
        model = Path(scratch) / "llama"
        print("writing the model", file=sys.stderr, flush=True)
        weights = write_model(model, args.layers)
        modes = {
            "layerwise": {"offload": "layerwise", "max_memory": args.max_memory},
            "in memory": {"offload": "none"},
        }
        runs = {name: _run_child(model, mode, args) for name, mode in modes.items()}
    result = {
        "machine": facts,
        "workload": _describe(args, weights),
        "runs": runs,
        "comparison": compare(runs, weights, parse_size(args.max_memory)),
    }
    write_result(args.output, result)
    _print(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--max-memory", default="2GiB")
    parser.add_argument("--scratch", type=Path, help="where the model goes; default: TMPDIR")
    parser.add_argument("--date", help="date to record; default: today")
    output = HERE / "results" / "scale_offload.json"
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


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


def _run_child(model: Path, settings: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    _uncache(model)
    settings = settings | {
        "data.dataset": DATASET,
        "data.samples": str(args.samples),
        "data.seq_len": str(args.seq_len),
        "device": "cpu",
        "export.weights": "none",
    }
    command = [sys.executable, str(Path(__file__)), "--child", str(model)]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    print(f"calibrating: {settings['offload']}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, file=sys.stderr, flush=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return {"settings": settings, **measured}


def _uncache(directory: Path) -> None:
    """Have the system drop what it holds of the weight files, so that both runs read the disk."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _calibrate(model: Path, settings: list[str]) -> dict[str, Any]:
    recipe = load_recipe(None, assignments(settings))
    before, start = _io(), time.perf_counter()
    result = run(str(model), recipe, model.parent / recipe.offload, overwrite=True)
    wall = time.perf_counter() - start
    return {
        "wall_seconds": wall,
        "seconds": result.seconds,
        "tokens": result.tokens,
        "batch_size": result.recipe.data.batch_size,
        "peak_bytes": peak_bytes(),
        "bytes_read": {key: value - before[key] for key, value in _io().items()},
        "k_amax": [layer.k_amax for layer in result.layers],
    }


def _io() -> dict[str, int]:
    """Bytes that read calls returned, and bytes that came from the disk, also by mapped files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return {"calls": counts["rchar"], "disk": counts["read_bytes"]}


def _ram_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _describe(args: argparse.Namespace, weights: int) -> dict[str, Any]:
    return {
        "model": CONFIG | {"num_hidden_layers": args.layers, "weights": "random, bfloat16"},
        "weight_bytes": weights,
        "dataset": DATASET,
        "samples": args.samples,
        "seq_len": args.seq_len,
        "max_memory": args.max_memory,
    }


def compare(runs: dict[str, Any], weights: int, limit: int) -> dict[str, Any]:
    """Judge the layerwise run against its targets; both must have measured the same."""
    layered, whole = runs["layerwise"], runs["in memory"]
    read = layered["bytes_read"]["calls"] / weights
    wall = layered["wall_seconds"] / whole["wall_seconds"]
    return {
        "same_k_amax": layered["k_amax"] == whole["k_amax"],
        "peak_bytes": layered["peak_bytes"],
        "peak_met": layered["peak_bytes"] <= limit,
        "read_ratio": read,
        "read_met": read <= READ_TARGET,
        "wall_ratio": wall,
        "wall_met": wall <= WALL_TARGET,
    }


def _print(result: dict[str, Any]) -> None:
    table = Table("run", "wall", "load", "calibrate", "peak", "read by calls", "read from disk")
    for name, row in result["runs"].items():
        sizes = row["peak_bytes"], row["bytes_read"]["calls"], row["bytes_read"]["disk"]
        times = row["wall_seconds"], row["seconds"]["load"], row["seconds"]["calibrate"]
        table.add_row(
            name, *(f"{t:.1f} s" for t in times), *(f"{s / 2**30:.2f} GiB" for s in sizes)
        )
    console = Console(width=100)
    console.print(table)
    console.print_json(data=result["comparison"])


if __name__ == "__main__":
    main()
