"""Scales that `fp8kv apply` puts beside quantised versions of SmolLM2, and those measured there.

llm-compressor writes each version in a process of its own, and says how large K, V and Q are with
weights that compressed-tensors decodes: fp8kv must find the same.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_result
from workload import DATASET, MODEL, load_documents, make_recipe

from calib.files.stored_scales import read_scales
from calib.files.strict_json import read_object
from calib.models.sources import find_model
from calib.scales.stats_file import load_stats

HERE = Path(__file__).parent
SAMPLES, SEQ_LEN = 4, 512
# version -> texts of 256 tokens to quantise with; AWQ is slow
VERSIONS = {
    "fp8-dynamic": 32,
    "fp8-static": 32,
    "w8a8-smoothquant": 32,
    "w4a16-rtn": 32,
    "w4a16-gptq": 32,
    "w4a16-awq": 4,
}
RESAMPLED = ("w4a16-gptq",)
SAME = 1e-3  # relative, of every head's amax

Result = dict[str, Any]


def main() -> None:
    """Quantise, measure, apply, compare, write the JSON; what --scratch holds is not done again."""
    args = _arguments()
    documents = _write_documents(args.scratch)
    measured = args.scratch / "measured"
    _calibrate(MODEL, measured, "--weights", "none")
    versions = {}
    for name in args.versions.split(","):
        _write(args, name, documents)
        kept = args.scratch / f"{name}-fp8kv.json"
        if not kept.exists():
            write_result(kept, _version(args.scratch, name, measured))
        versions[name] = read_object(kept)
        print(json.dumps({name: versions[name]}, indent=2), flush=True)
    workload = {"model": MODEL, "dataset": DATASET, "samples": SAMPLES, "seq_len": SEQ_LEN}
    write_result(
        args.output,
        {"machine": machine(args.date), "workload": workload, "versions": versions},
    )
    right = all(max(v["amax_off"].values()) <= SAME for v in versions.values())
    sys.exit(0 if right and all(v["linked"] for v in versions.values()) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    python = Path(".venv-peers/bin/python")
    parser.add_argument("--peer-python", type=Path, default=python, help="has llm-compressor")
    parser.add_argument("--versions", default=",".join(VERSIONS))
    parser.add_argument("--date", help="date to record; default: today")
    parser.add_argument("--scratch", type=Path, default=Path("build/apply"))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "apply.json")
    return parser.parse_args()


def _write_documents(scratch: Path) -> Path:
    """Token ids: the first documents to measure, the last ones to quantise with."""
    everything = load_documents(find_model(MODEL), make_recipe(10**6, SEQ_LEN)).samples
    file = scratch / "documents.json"
    last = [row[:256] for row in everything[-max(VERSIONS.values()) :]]
    write_result(file, {"measure": everything[:SAMPLES], "quantise": last})
    return file


def _write(args: argparse.Namespace, name: str, documents: Path) -> None:
    if (args.scratch / f"{name}.json").exists():
        return
    command = [args.peer_python.absolute(), HERE / "peers" / "write_smollm2.py", name]
    command += ["--model", find_model(MODEL).path, "--documents", documents]
    command += ["--samples", VERSIONS[name], "--output", args.scratch / name]
    subprocess.run(list(map(str, command)), check=True)


def _fp8kv(*arguments: object) -> None:
    command = [sys.executable, "-m", "calib", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _calibrate(model: str | Path, output: Path, *options: object) -> None:
    data = ("--dataset", DATASET, "--samples", SAMPLES, "--seq-len", SEQ_LEN)
    if not output.exists():
        _fp8kv("calibrate", model, "-o", output, *data, *options, "--quiet")


def _version(scratch: Path, name: str, measured: Path) -> Result:
    model, wrote = scratch / name, read_object(scratch / f"{name}.json")
    out = scratch / f"{name}-fp8kv"
    before = _digest(model)
    _fp8kv("apply", measured, model, "-o", out / "applied", "--overwrite")
    linked = _digest(model) == before and any(
        os.path.samefile(file, model / "model.safetensors")
        for file in (out / "applied").glob("*.safetensors")
    )
    _calibrate(model, out / "own")
    exact = ("--dtype", "float32", "--targets", "qkv", "--format", "fp8kv", "--weights", "none")
    _calibrate(model, out / "float32", *exact)
    found: Result = {
        "seconds_to_quantise": wrote["seconds"],
        "linked": linked,
        "amax_off": _amax_off(out / "float32", wrote["amax"]),
        "applied": _compare(out / "applied", out / "own"),
    }
    if name in RESAMPLED:  # how far the model's own scales move with the text
        _calibrate(model, out / "other-text", "--seed", 43)
        found["other_text"] = _compare(out / "other-text", out / "own")
    return found


def _digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def _amax_off(calibration: Path, expected: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Return the largest relative difference of any head's amax, of K, V and Q."""
    layers = load_stats(calibration).layers
    assert layers.keys() == expected.keys()
    return {
        letter: max(
            float((getattr(layer, letter).amax.amax(1) / torch.tensor(by[letter]) - 1).abs().max())
            for layer, by in ((layers[name], expected[name]) for name in layers)
        )
        for letter in "kvq"
    }


def _compare(one: Path, other: Path) -> Result:
    """Scales of `one` over those of `other`: K's and V's of every layer."""
    pairs = zip(read_scales(one).layers, read_scales(other).layers, strict=True)
    off = {
        f"{a.layer}.{letter}": getattr(a, letter)[0] / getattr(b, letter)[0] - 1
        for a, b in pairs
        for letter in "kv"
    }
    worst = sorted(off, key=lambda name: -abs(off[name]))
    sizes = [abs(value) for value in off.values()]
    return {
        "scales": len(off),
        "within_5_percent": sum(size <= 0.05 for size in sizes),
        "within_10_percent": sum(size <= 0.1 for size in sizes),
        "median": statistics.median(sizes),
        "largest": max(sizes),
        "worst": {name: off[name] for name in worst[:5]},
    }


if __name__ == "__main__":
    main()
