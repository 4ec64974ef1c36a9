"""What llm-compressor writes of the tiny Llama: one scale per layer, per head, and query scales.

Runs in an environment that holds llm-compressor, not ours: `make bench-golden`.
"""

import tempfile
from pathlib import Path
from typing import Any

import tiny_llama
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier


def main() -> None:
    """Write and keep each."""
    for strategy in ("tensor", "attn_head"):
        args = QuantizationArgs(
            num_bits=8,
            type="float",
            strategy=strategy,
            dynamic=False,
            symmetric=True,
            observer="static_minmax",
        )
        queries = QuantizationScheme(targets=["LlamaAttention"], input_activations=args)
        _write(f"{strategy}-kv", kv_cache_scheme=args)
        _write(f"{strategy}-qkv", kv_cache_scheme=args, config_groups={"attention": queries})


def _write(case: str, **recipe: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = tiny_llama.make(scratch / "model")
        amax = tiny_llama.true_amax(model)
        ids = tiny_llama.token_ids().tolist()
        masks = [[1] * len(row) for row in ids]
        oneshot(
            model=model,
            processor=tiny_llama.tokenizer(),
            dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": masks}),
            recipe=QuantizationModifier(**recipe),
            max_seq_length=tiny_llama.LENGTH,
            num_calibration_samples=tiny_llama.SAMPLES,
            shuffle_calibration_samples=False,
        )
        model.save_pretrained(scratch / "output", save_compressed=True)
        tiny_llama.keep(scratch / "output", "llmcompressor", case, amax)


if __name__ == "__main__":
    main()
