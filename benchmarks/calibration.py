"""What calibration costs over a bare forward pass, in time and memory, measured in one run.

Two views: short rounds of one batch, with the variants in changing order so that a drifting machine
hits all alike, and one full pass of each variant, which also gives the memory.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernel_report import describe_machine
from machine import machine, peak_bytes, reset_peak, write_result
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from workload import DATASET, MODEL, Workload, load_workload, make_recipe, random_workload

from calib.capture import running_amax as running
from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.data import Batch
from calib.scales.stats import derive_scales

BARE = "bare forward"
SPEED_TARGETS = {"absmax": 0.97, "mse": 0.90}  # least share of the bare forward's tokens/s
PEAK_TARGET = 1.05  # most resident memory, as a multiple of the bare forward's
CURVES_TARGET = 0.01  # most of a calibration's time for what is kept of single tokens

# reads the batches once and returns what is left to do until the scales are known
Variant = Callable[[Iterable[Batch]], Callable[[], Any]]


def main() -> None:
    """Measure, print the tables, write the JSON."""
    args = _arguments()
    random = args.config and random_workload(args.config, args.samples, args.seq_len)
    work = random or load_workload(args.samples, args.seq_len, args.threads)
    facts = describe_machine(None) if _is_on_gpu(work) else machine(args.date)
    variants = _variants(work, args)
    for variant in variants.values():  # threads, code paths and allocator settle
        variant(work.batches[:1])
    rounds = _rounds(variants, work.batches, args.rounds or 3 * len(work.batches))
    full = {name: _full_pass(name, variant, work) for name, variant in variants.items()}
    result = {
        "machine": facts,
        "workload": _describe(work, args),
        "rounds": _summarise_rounds(rounds),
        "full_pass": _compare_full_passes(full),
        "curves": _curves(variants["absmax"], work),
    }
    write_result(args.output, result)
    _print(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, help="one batch each; default: each batch thrice")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--config", type=Path, help="a model of this shape and tokens, both random")
    parser.add_argument("--date", help="date to record; default: today")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "calibration.json")
    return parser.parse_args()


def _variants(work: Workload, args: argparse.Namespace) -> dict[str, Variant]:
    observers = {name: _calibration(work.model, args, name) for name in SPEED_TARGETS}
    return {BARE: _bare_forward(work.model), **observers}


def _bare_forward(model: PreTrainedModel) -> Variant:
    decoder = model.get_decoder()

    @torch.inference_mode()
    def forward(batches: Iterable[Batch]) -> Callable[[], None]:
        for batch in batches:
            ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
            decoder(input_ids=ids, attention_mask=mask, use_cache=False)
        return lambda: None

    return forward


def _calibration(model: PreTrainedModel, args: argparse.Namespace, observer: Any) -> Variant:
    recipe = make_recipe(args.samples, args.seq_len, observer)
    attention = map_attention(model)  # the job does this once, while it loads

    def measure(batches: Iterable[Batch]) -> Callable[[], Any]:
        stats = calibrate(model, batches, recipe, attention=attention)
        return lambda: derive_scales(stats, recipe)

    return measure


def _rounds(
    variants: dict[str, Variant], batches: list[Batch], count: int
) -> list[tuple[int, dict[str, float]]]:
    """Run each variant over one batch per round: (tokens of the batch, variant -> seconds)."""
    orders = list(itertools.permutations(variants))
    rounds = []
    for i in range(count):
        print(f"round {i + 1} of {count}", file=sys.stderr, flush=True)
        batch = batches[i % len(batches)]
        seconds = {name: _seconds(variants[name], batch) for name in orders[i % len(orders)]}
        rounds.append((batch.num_tokens, seconds))
    return rounds


def _seconds(variant: Variant, batch: Batch) -> float:
    start = time.perf_counter()
    variant([batch])
    _wait()
    return time.perf_counter() - start


def _full_pass(name: str, variant: Variant, work: Workload) -> dict[str, Any]:
    print(f"full pass: {name}", file=sys.stderr, flush=True)
    gpu = _is_on_gpu(work)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    measurable = reset_peak()
    start = time.perf_counter()
    derive = variant(work.batches)
    _wait()
    measured = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if gpu else peak_bytes() if measurable else None
    derive()
    return {
        "tokens": work.tokens,
        "seconds": measured - start,
        "derive_seconds": time.perf_counter() - measured,
        "peak_bytes": peak,
    }


def _is_on_gpu(work: Workload) -> bool:
    return work.model.device.type == "cuda"


def _wait() -> None:
    """Work on a GPU goes on behind the call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _curves(calibration: Variant, work: Workload) -> dict[str, Any]:
    """Time that curves, positions and tails take of a full pass, timed from within."""
    print("full pass: curves", file=sys.stderr, flush=True)
    whole, inside = running.per_token_statistics, 0.0

    def timed(*args: Any) -> Any:
        nonlocal inside
        _wait()
        start = time.perf_counter()
        found = whole(*args)
        _wait()
        inside += time.perf_counter() - start
        return found

    start = time.perf_counter()
    with mock.patch.object(running, "per_token_statistics", timed):
        calibration(work.batches)
    _wait()
    seconds = time.perf_counter() - start
    share = {"seconds": inside, "of_seconds": seconds, "share": inside / seconds}
    return share | _verdict("target", CURVES_TARGET, inside / seconds, at_least=False)


def _summarise_rounds(rounds: list[tuple[int, dict[str, float]]]) -> dict[str, Any]:
    tokens = sum(count for count, _ in rounds)
    summary = {}
    for name in rounds[0][1]:
        total = sum(seconds[name] for _, seconds in rounds)
        ratios = [seconds[BARE] / seconds[name] for _, seconds in rounds]
        bare = sum(seconds[BARE] for _, seconds in rounds)
        summary[name] = {
            "tokens": tokens,
            "seconds": total,
            "tokens_per_second": tokens / total,
            "ratio": bare / total,
            "ratio_min": min(ratios),
            "ratio_median": statistics.median(ratios),
            "ratio_max": max(ratios),
            **_verdict("target", SPEED_TARGETS.get(name), bare / total, at_least=True),
        }
    return {"count": len(rounds), "variants": summary, "each": [seconds for _, seconds in rounds]}


def _compare_full_passes(full: dict[str, dict[str, Any]]) -> dict[str, Any]:
    bare = full[BARE]
    for name, row in full.items():
        row["peak_ratio"] = row["peak_bytes"] and row["peak_bytes"] / bare["peak_bytes"]
        target = None if name == BARE else PEAK_TARGET
        row |= _verdict("peak_target", target, row["peak_ratio"], at_least=False)
    return full


def _verdict(key: str, target: float | None, value: float | None, *, at_least: bool) -> dict[str, Any]:
    if target is None or value is None:
        return {}
    return {key: target, f"{key}_met": value >= target if at_least else value <= target}


def _describe(work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.config.stem if args.config else MODEL,
        "dataset": "random" if args.config else DATASET,
        "dtype": str(work.model.dtype).removeprefix("torch."),
        "samples": args.samples,
        "seq_len": args.seq_len,
        "tokens": work.tokens,
        "batches": [list(batch.input_ids.shape) for batch in work.batches],
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=100)
    facts, rounds = result["machine"], result["rounds"]
    console.print(f"{facts['cpu']}, {facts['threads']} threads, load {facts['load_average']:.1f}")
    table = Table("variant", "tokens/s", "ratio", "min / median / max", "target")
    table.title = f"{rounds['count']} rounds of one batch, in changing order"
    for name, row in rounds["variants"].items():
        spread = " / ".join(f"{row[f'ratio_{k}']:.3f}" for k in ("min", "median", "max"))
        table.add_row(name, *_speed(row), spread, _target(row, "target", ">="))
    console.print(table)
    # these passes run once, one after the other: right for memory, no measure of speed
    table = Table("variant", "peak", "ratio", "target")
    table.title = f"memory of a full pass, {result['workload']['tokens']} tokens"
    for name, row in result["full_pass"].items():
        memory = "not measurable", ""  # no /proc/self/clear_refs that can be written
        if row["peak_bytes"]:
            memory = f"{row['peak_bytes'] / 2**20:.0f} MiB", f"{row['peak_ratio']:.3f}"
        table.add_row(name, *memory, _target(row, "peak_target", "<="))
    console.print(table)
    curves = result["curves"]
    told = _target(curves, "target", "<=")
    console.print(f"curves, positions and tails: {curves['share']:.2%} of a full pass ({told})")


def _speed(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['tokens_per_second']:.0f}", f"{row['ratio']:.3f}"


def _target(row: dict[str, Any], key: str, sign: str) -> str:
    if key not in row:
        return ""
    return f"{sign} {row[key]:.2f}: {'met' if row[f'{key}_met'] else 'MISSED'}"


if __name__ == "__main__":
    main()
