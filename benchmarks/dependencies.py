"""What each dependency costs: megabytes, those that it alone brings, and CPU time of importing.

Only what the base and the extras need is counted, whatever else is installed. `--table` prints the
table of docs/dependencies.md from results/dependencies.json.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

RESULTS = Path(__file__).parent / "results" / "dependencies.json"
_ROUNDS = 3
_MB = 1e6
_TIME = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"
_EXTRAS = ("report", "pictures", "demo")
_USES = {
    "accelerate": "models on the meta device; transformers asks for it to spread weights over devices",
    "datasets": "datasets of the Hub, streamed",
    "filelock": "two processes that want one output, or one cache",
    "gguf": "weights of the built-in model, once",
    "huggingface-hub": "models, configs and packs of the Hub; its HTTP client asks servers",
    "jinja2": "chat templates, READMEs of outputs, `report.html`",
    "matplotlib": "pictures of reports and of scales",
    "numpy": "bootstrap, sketches of text, sound, built-in pictures",
    "packaging": "versions of engines and of formats, compared",
    "pillow": "pictures that a model reads",
    "psutil": "how much memory there is; whether a process still lives",
    "pyarrow": "local parquet files",
    "pydantic": "recipes, reports and rules of engines, checked; errors that name the key",
    "pyyaml": "recipes, rules of engines, types of caches",
    "rich": "tables and progress on a terminal",
    "safetensors": "writing tensors; headers are read by `calib/files/safetensors_header.py`",
    "torch": "all arithmetic",
    "transformers": "models, tokenizers, processors, and the cache that is compared with",
    "triton": "kernels of the bundled runtime",
    "typer": "flags, `--help`, completion",
}
_MODULES = {"pyyaml": "yaml", "pillow": "PIL"}  # that are not called what their distribution is


def normal(name: str) -> str:
    """Spell a distribution's name as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(dist: Distribution, extras: tuple[str, ...] = ()) -> set[str]:
    """Names of what `dist` needs here, with these extras."""
    found = map(Requirement, dist.requires or [])
    asked = [{"extra": extra} for extra in ("", *extras)]
    return {
        normal(each.name)
        for each in found
        if not each.marker or any(each.marker.evaluate(extra) for extra in asked)
    }


def closure(names: set[str]) -> set[str]:
    """`names` and everything that they need."""
    found: set[str] = set()
    while names:
        found |= names
        names = set().union(*(needed(distribution(name)) for name in names)) - found
    return found


def megabytes(names: set[str]) -> float:
    """Size of their files, with the compiled Python beside them."""
    paths = (file.locate() for name in names for file in distribution(name).files or [])
    return sum(Path(path).stat().st_size for path in paths if Path(path).exists()) / _MB


def import_seconds(module: str) -> float:
    """Median CPU seconds to import it in a new process, the files being in memory."""
    command = [sys.executable, "-c", _TIME.format(module)]
    times = [float(subprocess.check_output(command)) for _ in range(_ROUNDS + 1)]
    return statistics.median(times[1:])


def measure() -> dict[str, object]:
    """Measure every direct dependency of what is installed here."""
    ours = distribution("fp8kv")
    base = needed(ours)
    direct = dict.fromkeys(base, "")
    for extra in _EXTRAS:
        direct |= dict.fromkeys(needed(ours, (extra,)) - base, extra)
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "base_mb": round(megabytes(closure(base)), 1),
        "rows": [_row(name, extra, base) for name, extra in sorted(direct.items())],
    }


def _row(name: str, extra: str, base: set[str]) -> dict[str, object]:
    module = _MODULES.get(name, name.replace("-", "_"))
    alone = closure(base | {name}) - closure(base - {name})
    return {
        "name": name,
        "version": distribution(name).version,
        "extra": extra,
        "mb": round(megabytes({name}), 1),
        "alone_mb": round(megabytes(alone), 1),
        "brings": sorted(alone - {name}),
        "import_seconds": round(import_seconds(module), 2),
    }


def table(result: dict[str, object]) -> str:
    """Return the table of docs/dependencies.md, the largest first."""
    lines = ["| package | for | MB | MB that it alone brings | import, s | in |", "|---|---|---|---|---|---|"]
    for row in sorted(result["rows"], key=lambda row: -row["mb"]):
        where = f"`{row['extra']}`" if row["extra"] else "base"
        figures = f"{row['mb']:.1f} | {row['alone_mb']:.1f} | {row['import_seconds']:.2f}"
        lines.append(f"| {row['name']} {row['version']} | {_USES[row['name']]} | {figures} | {where} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.table:
        options.output.write_text(json.dumps(measure(), indent=2) + "\n")
    print(table(json.loads(options.output.read_text())))


if __name__ == "__main__":
    main()
