"""Our calibration beside other tools': same documents, same model, each in its own process.

Timed is the phase between a loaded model and finished scales. Ours runs before each of theirs, so
that a drifting machine hits both. A result stands beside those of other numbers of threads.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import machine, write_result
from rich.console import Console
from rich.table import Table
from workload import DATASET, DTYPE, MODEL, load_documents, make_recipe

from calib.files.strict_json import read_object
from calib.models.sources import find_model

HERE = Path(__file__).parent
OURS = "fp8kv"
# (tool, pipeline) -> how many times its tokens/s ours is to reach, its batch size being its best
TARGETS = {
    ("llm-compressor", "default"): 3.0,
    ("llm-compressor", "basic"): 1.5,
    ("ModelOpt", "default"): None,
    ("Quark", "default"): None,
    ("Quark", "post_rope"): None,
}
# after the name of llm-compressor's environment
ENVIRONMENTS = {"llm-compressor": "", "ModelOpt": "-modelopt", "Quark": "-quark"}

Run = dict[str, Any]


def main() -> None:
    """Write the documents, run everybody, print the table, write the JSON."""
    args = _arguments()
    args.scratch.mkdir(parents=True, exist_ok=True)
    documents, fingerprint = _write_documents(args)
    runs = _run_all(args, documents)
    result = {
        "machine": machine(args.date) | {"threads": args.threads},
        "workload": _describe(args, fingerprint),
        "runs": runs,
        "comparison": {" ".join(peer): _compare(runs, peer) for peer in TARGETS if _of_peer(runs, peer)},
    }
    kept = read_object(args.output) if args.output.exists() else {}
    write_result(args.output, kept | {f"threads: {args.threads}": result})
    _print(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    only = "has llm-compressor, which is then the only other; default: the Makefile's environments"
    parser.add_argument("--peer-python", type=Path, help=only)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], help="of the others")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--device",
        default="cpu",
        help="ours; llm-compressor takes a GPU if it finds one",
    )
    parser.add_argument("--date", help="date to record; default: today")
    parser.add_argument("--scratch", type=Path, default=Path("build/bench"))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "peers.json")
    args = parser.parse_args()
    return args


def _write_documents(args: argparse.Namespace) -> tuple[Path, str]:
    recipe = make_recipe(args.samples, args.seq_len)
    data = load_documents(find_model(MODEL), recipe)
    path = args.scratch / "documents.json"
    write_result(path, {"fingerprint": data.fingerprint, "samples": data.samples})
    return path, data.fingerprint


def _run_all(args: argparse.Namespace, documents: Path) -> list[Run]:
    peers, runs = [peer for peer in TARGETS if not (args.peer_python and ENVIRONMENTS[peer[0]])], []
    for _, size, (tool, pipeline) in itertools.product(range(args.repeats), args.batch_sizes, peers):
        python = args.peer_python or Path(f".venv-peers{ENVIRONMENTS[tool]}/bin/python")
        options = ("--tool", tool, "--pipeline", pipeline, "--batch-size", str(size))
        ours = _run(args, documents, Path(sys.executable), "peer_speed_fp8kv.py", "--device", args.device)
        theirs = _run(args, documents, python, "peer_speed_theirs.py", *options)
        runs += [{"tool": OURS, **ours}, {"tool": tool, **theirs}]
    return runs


def _run(args: argparse.Namespace, documents: Path, python: Path, script: str, *options: str) -> Run:
    output, log = args.scratch / "run.json", args.scratch / "run.log"
    output.unlink(missing_ok=True)
    command = [python.absolute(), HERE / script, "--output", output, "--documents", documents]
    command += ["--model", find_model(MODEL).path, "--seq-len", args.seq_len]
    command += ["--threads", args.threads, *options]
    print(script, *options, file=sys.stderr, flush=True)
    with log.open("w") as file:
        subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, check=True)
    run = read_object(output)
    return run | {"tokens_per_second": run["tokens"] / run["seconds"]["calibrate"]}


def _compare(runs: list[Run], peer: tuple[str, str]) -> dict[str, Any]:
    ours = [run for run in runs if run["tool"] == OURS]
    theirs = _of_peer(runs, peer)
    target = TARGETS[peer]
    by_size = {
        size: _speed([run for run in theirs if run["batch_size"] == size])
        for size in sorted({run["batch_size"] for run in theirs})
    }
    best = max(by_size, key=lambda size: by_size[size])
    ratios = {size: _speed(ours) / speed for size, speed in by_size.items()}
    return {
        "fp8kv_tokens_per_second": _speed(ours),
        "peer_tokens_per_second": by_size[best],
        "peer_batch_size": best,
        "ratios": ratios,
        "ratio": ratios[best],
        "target": target,
        "target_met": None if target is None else ratios[best] >= target,
        "processor_ratio": _processor_seconds(theirs) / _processor_seconds(ours),
        "k_scale_over_ours": {
            run["batch_size"]: _scale_ratios(run["k_scales"], ours[0]["k_scales"]) for run in theirs
        },
    }


def _of_peer(runs: list[Run], peer: tuple[str, str]) -> list[Run]:
    return [run for run in runs if (run["tool"], run.get("pipeline")) == peer]


def _speed(runs: list[Run]) -> float:
    return statistics.median(run["tokens_per_second"] for run in runs)


def _processor_seconds(runs: list[Run]) -> float:
    return statistics.median(run["processor_seconds"] for run in runs)


def _scale_ratios(theirs: dict[str, float], ours: dict[str, float]) -> dict[str, float]:
    # ours is the largest magnitude seen / 448: below 1, theirs clips its own calibration data
    ratios = [theirs[name] / scale for name, scale in ours.items()]
    return {"min": min(ratios), "mean": statistics.mean(ratios), "max": max(ratios)}


def _describe(args: argparse.Namespace, fingerprint: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "dataset": DATASET,
        "dtype": DTYPE,
        "samples": args.samples,
        "seq_len": args.seq_len,
        "fingerprint": fingerprint,
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=100)
    facts = result["machine"]
    console.print(f"{facts['cpu']}, {facts['threads']} threads, load {facts['load_average']:.1f}")
    table = Table(
        "tool", "pipeline", "batch", "load s", "calibrate s", "processor s", "write s", "tok/s", "MiB"
    )
    for run in result["runs"]:
        load, calibrate, write = (f"{run['seconds'][phase]:.1f}" for phase in ("load", "calibrate", "write"))
        row = [run["tool"], run.get("pipeline", ""), str(run["batch_size"]), load, calibrate]
        row += [f"{run['processor_seconds']:.1f}", write, f"{run['tokens_per_second']:.0f}"]
        table.add_row(*row, f"{run['peak_bytes'] / 2**20:.0f}")
    console.print(table)
    for name, row in result["comparison"].items():
        _print_comparison(console, name, row)


def _print_comparison(console: Console, name: str, row: dict[str, Any]) -> None:
    verdict = "met" if row["target_met"] else "MISSED"
    target = f" (target >= {row['target']}x: {verdict})" if row["target"] else ""
    console.print(
        f"{row['ratio']:.2f}x {name} at its best batch size, {row['peer_batch_size']}{target}; "
        f"{row['processor_ratio']:.2f}x in processor time"
    )
    for size, scale in row["k_scale_over_ours"].items():
        spread = f"min {scale['min']:.3f}, mean {scale['mean']:.3f}, max {scale['max']:.3f}"
        console.print(f"    batch {size}: {row['ratios'][size]:.2f}x; its k_scale over ours: {spread}")


if __name__ == "__main__":
    main()
