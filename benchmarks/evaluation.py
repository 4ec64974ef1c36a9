"""`fp8kv-eval` on a real model and on its stress twin: how long, and are the figures right?

Each suite runs as the command that a user types. KL and top-1 counts of the quick suite are then
recomputed with plain transformers, K and V rounded by torch's own casts where attention receives
them, no cache at all.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from evaluation_stages import LIMIT as STAGES_LIMIT
from evaluation_stages import measure_stages, print_stages
from machine import machine, write_result
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from calib.data import load_data
from calib.evaluate.inputs import (
    SUITES,
    calibrate_on,
    calibrate_on_random_tokens,
    complete_recipe,
)
from calib.evaluate.variants import Setup, Variant, build_variants
from calib.models.sources import builtin_model
from calib.recipe import load_recipe
from calib.scales.scales import LayerScales
from calib.scales.stats import KVStats
from fp8kv_runtime.hf import swap_attention

MODEL, DATASET = "builtin:smollm2", "builtin:python-docs"
LIMIT_MINUTES = {"quick": 4.0, "full": 30.0}
KL_TOLERANCE = 0.02
TWIN_LIMIT = 1.3  # KL on the twin over KL on the source, calibrated variants


def main() -> None:
    """Run, recompute, print, write the JSON."""
    args = _arguments()
    scratch = args.scratch
    facts = machine(args.date)
    minutes, reports = {}, {}
    for suite in args.suites.split(","):
        minutes[suite], reports[suite] = _evaluate(MODEL, suite, scratch / suite)
    _run("stress", MODEL, "-o", scratch / "twin", "--overwrite")
    _, reports["twin"] = _evaluate(str(scratch / "twin"), "quick", scratch / "twin-report")
    result = {
        "machine": facts,
        "minutes": minutes,
        "limit_minutes": LIMIT_MINUTES,
        "stages": measure_stages(MODEL, DATASET),
        "recomputed": _recomputed(reports["quick"]),
        "twin": _beside_twin(reports["quick"], reports["twin"]),
        "figures": {name: _figures(report) for name, report in reports.items()},
    }
    write_result(args.output, result)
    print(json.dumps({key: result[key] for key in ("minutes", "recomputed", "twin")}, indent=2))
    print_stages(result["stages"])
    sys.exit(0 if _is_met(result) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", default="quick,full")
    parser.add_argument("--date", help="date to record; default: today")
    parser.add_argument("--scratch", type=Path, default=Path("build/evaluation"))
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "evaluation.json")
    return parser.parse_args()


def _run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "calib", *map(str, arguments)], check=True)


def _evaluate(model: str, suite: str, output: Path) -> tuple[float, dict[str, Any]]:
    started = time.perf_counter()
    _run("eval", model, "--suite", suite, "-o", output, "--overwrite")
    minutes = (time.perf_counter() - started) / 60
    return minutes, json.loads((output / "report.json").read_text())


def _figures(report: dict[str, Any]) -> dict[str, Any]:
    metrics = ("kl", "kl_p99", "ppl_change", "top1", "same_tokens", "passkey")
    return {
        "tokens": report["data"]["tokens"],
        "noise_floor": report["noise_floor"],
        "advice": report["advice"],
        **{name: {k: row[k] for k in metrics if k in row} for name, row in report["variants"].items()},
    }


def _beside_twin(source: dict[str, Any], twin: dict[str, Any]) -> dict[str, Any]:
    """KL on the twin over KL on the source."""
    kl = {name: row["kl"]["value"] for name, row in twin["variants"].items()}
    names = ("e5m2", "tensor", "mse", "attn_head", "channel", "channel+k_center", "qkv")
    ratios = {name: kl[name] / source["variants"][name]["kl"]["value"] for name in names}
    return {"kl_at_scale_1": kl["none"], "ratios": ratios, "limit": TWIN_LIMIT}


def _recomputed(report: dict[str, Any]) -> dict[str, Any]:
    """Relative difference of KL, and difference of top-1 counts, by variant."""
    model, variants, documents, _ = prepared(MODEL)
    rows = {}
    for variant in variants:
        if variant.scales is None or variant.tensors != "kv":
            continue
        kl, agreed = _plainly(model, variant, documents)
        row = report["variants"][variant.name]
        rows[variant.name] = {
            "kl": kl,
            "kl_difference": row["kl"]["value"] / kl - 1,
            "top1_count_difference": row["top1_count"] - agreed,
        }
    return rows


def prepared(name: str) -> tuple[PreTrainedModel, list[Variant], list[Tensor], KVStats]:
    """Model, variants, held-out documents [T] int64 and calibration statistics of the quick suite."""
    suite = SUITES["quick"]
    directory = builtin_model(name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    recipe = complete_recipe(load_recipe(None, {"data.dataset": DATASET}), suite)
    samples = load_data(recipe.data, tokenizer, lambda: model).samples
    setup = Setup(model, tokenizer)
    stats = calibrate_on(setup, samples[: suite.calibration_samples], recipe)
    random = calibrate_on_random_tokens(setup, recipe)
    held_out = [torch.tensor(sample) for sample in samples[suite.calibration_samples :]]
    return model, build_variants(stats, random), held_out, stats


@torch.inference_mode()
def _plainly(model: PreTrainedModel, variant: Variant, documents: list[Tensor]) -> tuple[float, int]:
    kl, agreed = [], 0
    for token_ids in documents:
        p = model(token_ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        with _rounded_attention(model, variant):
            q = model(token_ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    return float(torch.cat(kl).mean()), agreed


@contextmanager
def _rounded_attention(model: PreTrainedModel, variant: Variant) -> Iterator[None]:
    assert variant.scales is not None
    layers = {layer.layer_idx: layer for layer in variant.scales.layers.values()}
    dtype = torch.float8_e5m2 if variant.scales.fp8_dtype == "e5m2" else torch.float8_e4m3fn

    def attend(
        original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        layer: LayerScales = layers[module.layer_idx]  # type: ignore[index]
        centre = torch.zeros(1) if layer.k_center is None else layer.k_center[:, None]
        key = _rounded(key - centre, layer.k, dtype) + centre
        return original(module, query, key, _rounded(value, layer.v, dtype), *args, **kwargs)

    with swap_attention(model, attend):
        yield


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # [1], [K] or [K, D] against [B, K, T, D]
    scale = scale[:, None] if scale.dim() == 2 else scale[:, None, None]
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(dtype).float() * scale


def _is_met(result: dict[str, Any]) -> bool:
    in_time = all(taken < LIMIT_MINUTES[suite] for suite, taken in result["minutes"].items())
    rows = result["recomputed"].values()
    right = all(abs(row["kl_difference"]) < KL_TOLERANCE for row in rows)
    exact = all(row["top1_count_difference"] == 0 for row in rows)
    twin = result["twin"]
    twin_holds = max(twin["ratios"].values()) <= TWIN_LIMIT and twin["kl_at_scale_1"] > 1
    is_fast = result["stages"]["cpu"]["ratio"] <= STAGES_LIMIT
    return in_time and right and exact and twin_holds and is_fast


if __name__ == "__main__":
    main()
