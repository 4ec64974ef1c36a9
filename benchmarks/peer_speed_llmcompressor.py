"""llm-compressor's side of `peer_speed.py`; its environment holds llm-compressor, not ours.

The KV-only recipe of its documentation. The tokenizer is loaded outside the timed call, and the
documents are not shuffled, which spares it truncation when it batches.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from machine import laps, machine, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def main() -> None:
    """Run one calibration as told and write what it took."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    samples = json.loads(args.documents.read_text())["samples"]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    clock = [time.perf_counter()]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    clock.append(time.perf_counter())
    pipeline = {} if args.pipeline == "default" else {"pipeline": args.pipeline}
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=_dataset(samples),
        recipe=QuantizationModifier(kv_cache_scheme=scheme),
        max_seq_length=args.seq_len,
        num_calibration_samples=len(samples),
        shuffle_calibration_samples=False,
        batch_size=args.batch_size,
        **pipeline,
    )
    clock.append(time.perf_counter())
    _write(model)
    clock.append(time.perf_counter())
    result = {
        "tokens": _tokens_read(samples, args.batch_size),
        "batch_size": args.batch_size,
        "pipeline": args.pipeline,
        "observer": scheme.observer or "its default",
        "seconds": laps(clock),
        "k_scales": _k_scales(model),
        "machine": machine(),
    }
    write_result(args.output, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--pipeline", choices=["default", "basic"], required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def _dataset(samples: list[list[int]]) -> Dataset:
    masks = [[1] * len(sample) for sample in samples]
    return Dataset.from_dict({"input_ids": samples, "attention_mask": masks})


def _write(model: PreTrainedModel) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, save_compressed=True)


def _tokens_read(samples: list[list[int]], batch_size: int) -> int:
    # longest first; its collator cuts each batch to the shortest of its rows
    lengths = sorted(map(len, samples), reverse=True)
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return sum(min(batch) * len(batch) for batch in batches)


def _k_scales(model: PreTrainedModel) -> dict[str, Any]:
    scales = {name: getattr(module, "k_scale", None) for name, module in model.named_modules()}
    return {name: scale.float().item() for name, scale in scales.items() if scale is not None}


if __name__ == "__main__":
    main()
