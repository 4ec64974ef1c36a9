"""`fp8kv inspect` and `fp8kv verify` on a checkpoint of a thousand shards: time and memory.

The shards are sparse files: 400 GB as far as their headers say, a few megabytes on disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, write_result

SHARDS = 1000
TENSORS_PER_SHARD = 12
SHARD_BYTES = 400 << 20
TARGET = {"seconds": 2.0, "peak_bytes": 200 << 20}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
}


def main() -> None:
    """Write the checkpoint, run both commands, print and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--date", help="date to record; default: today")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "many_shards.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8kv-shards-") as scratch:
        directory = Path(scratch) / "model"
        write_checkpoint(directory)
        runs = {name: measure(name, directory) for name in ("inspect", "verify")}
    met = all(run[key] < limit for run in runs.values() for key, limit in TARGET.items())
    result = {"machine": machine(args.date), "shards": SHARDS, "runs": runs, "target": TARGET}
    write_result(args.output, result | {"met": met})
    print(json.dumps(runs, indent=2))
    sys.exit(0 if met else 1)


def write_checkpoint(directory: Path) -> None:
    """Write sparse shards, each with one layer's weights and scales, an index and a config."""
    directory.mkdir()
    weight_map = {}
    for layer in range(SHARDS):
        file = f"model-{layer + 1:05}-of-{SHARDS:05}.safetensors"
        names = _write_shard(directory / file, layer)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "num_hidden_layers": SHARDS, "num_attention_heads": 8}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": COMPRESSED}))


def _write_shard(path: Path, layer: int) -> list[str]:
    module = f"model.layers.{layer}"
    each = SHARD_BYTES // TENSORS_PER_SHARD // 2 * 2
    names = [f"{module}.self_attn.k_proj.weight"]
    names += [f"{module}.mlp.experts.{i}.weight" for i in range(TENSORS_PER_SHARD - 1)]
    header: dict[str, Any] = {}
    for letter, begin in (("k", 0), ("v", 4)):
        header[f"{module}.self_attn.{letter}_scale"] = _tensor("F32", [1], begin, begin + 4)
    for i, name in enumerate(names):
        header[name] = _tensor("BF16", [each // 2], 8 + i * each, 8 + (i + 1) * each)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(np.array([0.02, 0.01], np.float32).tobytes())
        file.truncate(8 + len(text) + 8 + each * len(names))
    return [*header]


def _tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def measure(command: str, directory: Path) -> dict[str, float]:
    """Seconds and peak resident memory of one command, its start included."""
    script = (
        "import sys, atexit; from pathlib import Path\n"
        "def peak():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    print(next(l for l in lines if l.startswith('VmHWM')).split()[1], file=sys.stderr)\n"
        "atexit.register(peak)\n"
        "from calib.commands.app import app\n"
        "app()\n"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, command, str(directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": 1024 * int(done.stderr.splitlines()[-1])}


if __name__ == "__main__":
    main()
