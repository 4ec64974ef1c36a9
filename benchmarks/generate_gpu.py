"""`generate` on the FP8 cache and on transformers' own, on a GPU: whole models, random weights.

    python benchmarks/generate_gpu.py [--config FILE ...] [--prompts N ...] [--output FILE]

First every model's FP8 logits with the kernels are compared with those in plain torch; where they
differ nothing is timed. Without a GPU that is all, on a model of the same kind that is small.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Triton looks when it is imported
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# a checkout is enough: nothing has to be installed
sys.path.insert(0, str(Path(__file__).parent.parent))

from kernel_report import describe_machine
from machine import write_result
from random_model import random_model
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fp8kv_runtime.hf import fp8_attention

HERE = Path(__file__).parent
SCALE = 0.05  # speed does not depend on it; K and V of random weights fit
# Relative error. From the second layer on one value in 2^7 lies so near the border of two FP8
# codes, 2^-4 apart, that float16's rounding takes it over: 2^-7.5, or 5.5e-3, in every layer.
LOGITS = 5e-2


@dataclass(frozen=True)
class LayerScales:
    """One attention layer's, per tensor."""

    layer_idx: int
    k: Tensor
    v: Tensor
    q: None = None
    k_center: None = None


@dataclass(frozen=True)
class Scales:
    """All layers'."""

    layers: dict[str, LayerScales]
    fp8_dtype: str = "e4m3fn"


def main() -> None:
    """Compare, then measure where there is a GPU."""
    args = _arguments()
    gpu = torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for file in args.config:
            model = random_model(AutoConfig.from_pretrained(file), small=not gpu)
            scales = _scales(model)
            error = _logits_error(model, scales)
            print(f"{file.stem:16} logits, kernels against torch: relative error {error:.1e}")
            if not error <= LOGITS:
                sys.exit(f"more than {LOGITS:.0e}: nothing was timed")
            if gpu:
                for tokens in args.prompts:
                    rows.append({"model": file.stem, **_measure(model, scales, tokens, args)})
                    facts = describe_machine(args.commit)
                    write_result(args.output, {"machine": facts, "rows": rows})
                    print(_line(rows[-1]), flush=True)
            del model
    if not gpu:
        print("no GPU here: small models were compared, nothing was timed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    configs = [HERE / "configs" / f"{name}.json" for name in ("smollm2-135m", "llama-3.1-8b")]
    parser.add_argument("--config", type=Path, nargs="+", default=configs)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 32768], metavar="N")
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="recorded in place of what git says")
    results = HERE / "results" / "generate_gpu.json"
    parser.add_argument("--output", type=Path, default=results, metavar="FILE")
    return parser.parse_args()


def _scales(model: PreTrainedModel) -> Scales:
    count, one = model.config.num_hidden_layers, torch.full((1,), SCALE)
    return Scales({f"{i}": LayerScales(i, one, one) for i in range(count)})


def _logits_error(model: PreTrainedModel, scales: Scales) -> float:
    """Of the last token of 100, and of two more in a row, on the FP8 cache; the worst."""
    ids = torch.arange(102, device=model.device)[None] % model.config.vocab_size
    logits = {}
    for backend in ("triton", "torch"):
        with fp8_attention(model, scales, backend=backend):
            out = model(ids[:, :100], use_cache=True, logits_to_keep=1)
            rows = [out.logits]
            for at in (100, 101):
                out = model(ids[:, at : at + 1], past_key_values=out.past_key_values)
                rows.append(out.logits)
        logits[backend] = torch.cat(rows).double()
    error = (logits["triton"] - logits["torch"]).flatten(1).norm(dim=1)
    return float((error / logits["torch"].flatten(1).norm(dim=1)).max())


def _measure(model: PreTrainedModel, scales: Scales, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token and to the last, each way in turn."""
    prompt = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    names = ("16-bit", "fp8")
    first: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-1, args.rounds):  # the first round warms up
        for name in sorted(names, reverse=bool(i % 2)):
            inside: AbstractContextManager[None] = nullcontext()
            if name == "fp8":
                inside = fp8_attention(model, scales)
            with inside:
                times = [_seconds(model, prompt, n) for n in (1, args.new_tokens)]
            if i >= 0:
                first[name].append(times[0])
                last[name].append(times[1])
    return _row(tokens, args.new_tokens, first, last)


def _row(
    tokens: int, new: int, first: dict[str, list[float]], last: dict[str, list[float]]
) -> dict[str, Any]:
    prefill = {name: statistics.median(times) for name, times in first.items()}
    total = {name: statistics.median(times) for name, times in last.items()}
    step = {name: (total[name] - prefill[name]) / (new - 1) for name in total}
    return {
        "prompt_tokens": tokens,
        "new_tokens": new,
        "first_token_seconds": prefill,
        "seconds": total,
        "milliseconds_per_token": {name: 1e3 * each for name, each in step.items()},
        "ratio": total["16-bit"] / total["fp8"],
        "ratio_first_token": prefill["16-bit"] / prefill["fp8"],
        "ratio_per_token": step["16-bit"] / step["fp8"],
        "all_seconds": {"first": first, "last": last},
    }


def _seconds(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _line(row: dict[str, Any]) -> str:
    step = row["milliseconds_per_token"]
    return (
        f"{row['model']:16} prompt of {row['prompt_tokens']}: per token {step['16-bit']:.2f} ms in "
        f"16 bits, {step['fp8']:.2f} in FP8, {row['ratio_per_token']:.2f}x; first token "
        f"{row['ratio_first_token']:.2f}x; {row['new_tokens']} tokens {row['ratio']:.2f}x"
    )


if __name__ == "__main__":
    main()
