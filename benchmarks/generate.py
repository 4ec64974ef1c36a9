"""`generate` on the FP8 cache beside transformers' own cache, on the same model, prompt and tokens.

Rounds alternate between the two, so that a drifting machine hits both alike.
"""

import argparse
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_result
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from workload import DATASET, DTYPE, MODEL, Workload, load_workload

from calib.capture.attention import map_attention
from calib.scales.scales import KVScales, LayerScales
from fp8kv_runtime.hf import fp8_attention, paged_cache

PROMPTS = (8, 256, 1024)  # tokens
TARGET = 0.95  # least share of transformers' own tokens/s on a CPU


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = _arguments()
    work = load_workload(1, max(PROMPTS), args.threads)
    scales = _scales(work.model)
    facts = machine(args.date)
    rows = [_measure(work, scales, tokens, args) for tokens in PROMPTS]
    workload = {"model": MODEL, "dataset": DATASET, "dtype": DTYPE, "new_tokens": args.new_tokens}
    write_result(args.output, {"machine": facts, "workload": workload, "rows": rows})
    _print(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--date", help="date to record; default: today")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "generate.json")
    return parser.parse_args()


def _scales(model: PreTrainedModel) -> KVScales:
    # speed does not depend on the values, so nothing is calibrated for it
    layers = {
        name: LayerScales(module.layer_idx, *(torch.full((module.num_kv_heads,), 0.05),) * 2)
        for name, module in map_attention(model).cached.items()
    }
    return KVScales("attn_head", "e4m3fn", layers)


def _measure(work: Workload, scales: KVScales, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    prompt = work.batches[0].input_ids[:1, :tokens]
    seconds: dict[str, list[float]] = {"16-bit": [], "fp8": []}
    cache_bytes = 0
    for i in range(-1, args.rounds):  # the first round warms up
        print(f"{tokens} tokens: round {i + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for name in sorted(seconds, reverse=bool(i % 2)):
            inside: AbstractContextManager[None] = nullcontext()
            if name == "fp8":
                inside = fp8_attention(work.model, scales)
            with inside:
                taken, cache = _generate(work.model, prompt, args.new_tokens)
            if name == "fp8":
                cache_bytes = paged_cache(cache).num_bytes_used
            if i >= 0:
                seconds[name].append(taken)
    ratios = [a / b for a, b in zip(seconds["16-bit"], seconds["fp8"], strict=True)]
    return {
        "prompt_tokens": tokens,
        "tokens_per_second": {n: args.new_tokens / statistics.median(s) for n, s in seconds.items()},
        "ratio_min": min(ratios),
        "ratio": statistics.median(ratios),
        "ratio_max": max(ratios),
        "target": TARGET,
        "target_met": statistics.median(ratios) >= TARGET,
        "cache_bytes_fp8": cache_bytes,
        "seconds": seconds,
    }


def _generate(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> tuple[float, Any]:
    start = time.perf_counter()
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return time.perf_counter() - start, output.past_key_values


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("prompt", "16-bit tokens/s", "FP8 tokens/s", "ratio", "min / max", "target")
    for row in rows:
        speed = row["tokens_per_second"]
        table.add_row(
            f"{row['prompt_tokens']}",
            f"{speed['16-bit']:.1f}",
            f"{speed['fp8']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_min']:.2f} / {row['ratio_max']:.2f}",
            f">= {TARGET}: {'met' if row['target_met'] else 'MISSED'}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
