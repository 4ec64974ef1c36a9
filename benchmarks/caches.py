"""Every KV cache type on SmolLM2 and its stress twin, full suite; and whether `recommend` is right.

Writes results/caches.json, and the picture of the README. `fp8kv recommend` measures less text:
its answers are compared with those that the full suite gives.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, write_result
from schemes import write_schemes

from calib.caches.types import CACHES
from calib.engines.cache_support import find_support
from calib.evaluate.inputs import SUITES, whole_text_only
from calib.evaluate.measure import VariantResults
from calib.evaluate.page.charts import Point, chart_style, draw_kl_by_bytes
from calib.evaluate.recommend import Wish, recommend
from calib.evaluate.report import Figure, Report
from calib.evaluate.run import evaluate
from calib.evaluate.statistics import ratio
from calib.evaluate.summarize import Evaluation, summarize
from calib.evaluate.verdict import Judgement
from calib.recipe import load_recipe

MODEL, DATASET = "builtin:smollm2", "builtin:python-docs"
STATIC = ("none", "tensor", "mse", "attn_head")
WISH = Wish(kl=0.02, gpu="h100")  # answered by the quick suite and by the full one


def main() -> None:
    """Measure, compare, draw, write the JSON."""
    args, facts = _arguments(), machine()
    twin = args.scratch / "twin"
    run_fp8kv("stress", MODEL, "-o", twin, "--overwrite")
    found: dict[str, Any] = {"machine": facts, "models": {}}
    for name, model in (("SmolLM2", MODEL), ("stress twin", str(twin))):
        evaluation = _evaluate(model)
        report = summarize(evaluation)
        found["models"][name] = _figures(evaluation, report)
        found["models"][name]["recommend"] = _answers(model, evaluation, report)
    write_result(args.output, found)
    _draw(found["models"]["SmolLM2"])
    for name, each in found["models"].items():
        print(name, json.dumps(each["ratios"] | {"recommend": each["recommend"]}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path("build/caches"))
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "caches.json")
    return parser.parse_args()


def run_fp8kv(*arguments: object) -> str:
    """Run a command of fp8kv; its output."""
    command = [sys.executable, "-m", "calib", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _evaluate(model: str) -> Evaluation:
    choices = {"data.dataset": DATASET, "evaluation.caches": ["all"]}
    recipe = load_recipe(None, choices | {"evaluation.variants": list(STATIC)})
    return evaluate(model, recipe, suite=whole_text_only(SUITES["full"]))


def _figures(evaluation: Evaluation, report: Report) -> dict[str, Any]:
    rows = report.variants
    kl = {name: row.kl.model_dump() | {"bytes_per_token": row.bytes_per_token} for name, row in rows.items()}
    best = min(STATIC, key=lambda name: rows[name].kl.value)
    measured, int8 = evaluation.measured, "int8_per_token_head"
    pairs = [(int8, best), (f"{int8}, baked", best), (f"{int8}, baked", int8)]
    ratios = {
        f"{one} / {other}": ratio(*(sums(measured[name]) for name in (one, other))).model_dump()
        for one, other in pairs
    }
    return {"kl": kl, "noise_floor": report.noise_floor, "ratios": ratios}


def sums(measured: VariantResults) -> Any:
    """KL of each document, summed over its tokens."""
    return np.array([float(each.kl.double().sum()) for each in measured.documents])


def _answers(model: str, evaluation: Evaluation, report: Report) -> dict[str, Any]:
    """Return what the command says, how long it takes, and what the full suite says."""
    assert evaluation.offers is not None
    # the command does not measure this one
    rows = {name: row for name, row in report.variants.items() if name != "mse"}
    judgement = Judgement(evaluation.measured, rows, report.noise_floor)
    full = recommend(judgement, evaluation.offers, WISH)
    start = time.perf_counter()
    flags = ("--budget-kl", WISH.kl, "--gpu", WISH.gpu, "--json")
    said = json.loads(run_fp8kv("recommend", model, *flags))["chosen"]
    seconds = time.perf_counter() - start
    return {
        "budget_kl": WISH.kl,
        "gpu": WISH.gpu,
        "quick": said["cache"],
        "quick_kl": said["kl"],
        "full": full.chosen.cache,
        "full_kl": full.chosen.kl.model_dump(),
        "seconds": seconds,
        "serve": said["commands"][-1].replace(model, "MODEL"),
    }


def _draw(found: dict[str, Any]) -> None:
    """Draw the README's picture: caches that an engine has."""
    whole = found["kl"]["reference"]["bytes_per_token"]
    points = [
        Point(name, kl["bytes_per_token"] / whole, Figure(**kl), name == "int8_per_token_head")
        for name, kl in found["kl"].items()
        if name in STATIC or _is_offered(name)
    ]
    points = [point for point in points if point.kl.low > 0]
    with chart_style():
        write_schemes(draw_kl_by_bytes(points, found["noise_floor"]), "caches")


def _is_offered(name: str) -> bool:
    kind = name.removesuffix(", baked")
    return kind in ("fp8", *CACHES) and bool(find_support(kind))


if __name__ == "__main__":
    main()
