"""Our side of `peer_speed.py`, in a process of its own: load, calibrate, write, and time each."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from machine import laps, machine, peak_bytes, reset_peak, write_result
from workload import make_recipe

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.data import make_batches, resolve_batch_size
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.strict_json import read_object
from calib.formats import export
from calib.formats.directory import write_checkpoint
from calib.models.config import load_config
from calib.models.load import load_model
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales


def main() -> None:
    """Run one calibration as told and write what it took."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    samples = read_object(args.documents)["samples"]
    recipe = make_recipe(len(samples), args.seq_len, device=args.device)
    checkpoint = open_model_directory(args.model)
    clock = [time.perf_counter()]
    model = load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
    clock.append(time.perf_counter())
    reset_peak()
    processor = time.process_time()
    batch_size = resolve_batch_size(recipe.data, args.device)
    attention = map_attention(model)
    batches = make_batches(samples, batch_size, pad_id=0)
    stats = calibrate(model, batches, recipe, attention=attention)
    scales = derive_scales(stats, recipe)
    clock.append(time.perf_counter())
    processor, peak = time.process_time() - processor, peak_bytes()
    _write(scales, checkpoint)
    clock.append(time.perf_counter())
    result = {
        "tokens": stats.tokens,
        "batch_size": batch_size,
        "observer": recipe.observer.name,
        "seconds": laps(clock),
        "processor_seconds": processor,
        "peak_bytes": peak,
        "k_scales": {name: layer.k.item() for name, layer in scales.layers.items()},
        "machine": machine(),
    }
    write_result(args.output, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def _write(scales: KVScales, checkpoint: ModelDirectory) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = export(scales, checkpoint, "vllm")
        write_checkpoint(made, checkpoint, Path(directory), weights="link", readme="")


if __name__ == "__main__":
    main()
