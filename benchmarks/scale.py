"""Models larger than memory, more data, more processes, and kills: `make bench-scale`.

Four parts, each judged against its targets; exit 1 if one is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import scale_faults
import scale_offload
import scale_throughput
from machine import machine, write_result
from rich.console import Console

PARTS = {
    "offload": scale_offload.measure,
    "throughput": scale_throughput.measure_throughput,
    "processes": scale_throughput.measure_processes,
    "faults": scale_faults.measure_faults,
}


def main() -> None:
    """Run the parts, print what each came to, write the JSON."""
    args = _arguments()
    # parts that are not run again stay as they were
    result: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    result |= {"machine": machine(args.date), "minutes": result.get("minutes", {})}
    for name in args.parts.split(","):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=args.scratch, prefix="fp8kv-scale-") as scratch:
            result[name] = PARTS[name](Path(scratch))
        result["minutes"][name] = (time.perf_counter() - started) / 60
        Console(stderr=True).print(name, result[name]["comparison"])
    write_result(args.output, result)
    missed = [name for name in args.parts.split(",") if not _is_met(result[name]["comparison"])]
    print(f"{sum(result['minutes'].values()):.1f} minutes; missed: {missed or 'nothing'}")
    sys.exit(1 if missed else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--scratch", type=Path, help="where models go; default: TMPDIR")
    parser.add_argument("--date", help="date to record; default: today")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "scale.json")
    return parser.parse_args()


def _is_met(comparison: dict[str, Any]) -> bool:
    judged = [value for key, value in comparison.items() if key.endswith("_met")]
    return all(judged) and comparison.get("same_statistics", True)


if __name__ == "__main__":
    main()
