"""SmolLM2 quantised by llm-compressor, and the K, V and Q that these weights give.

Runs in an environment that holds llm-compressor, not ours: `make bench-apply`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import write_llmcompressor_weights as tiny
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file
from tiny_llama import true_amax
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# rows of 576 values are no whole groups of 128; half of AWQ's grid, which is slow
GROUP = {"strategy": "group", "group_size": 64}
RECIPES = {
    "fp8-dynamic": lambda: [tiny.plain(tiny.scheme("FP8_DYNAMIC"))],
    "fp8-static": lambda: [tiny.plain(tiny.scheme("FP8"))],
    "w8a8-smoothquant": lambda: [
        SmoothQuantModifier(smoothing_strength=0.8),
        tiny.plain(tiny.scheme("W8A8")),
    ],
    "w4a16-rtn": lambda: [tiny.plain(tiny.scheme("W4A16", **GROUP))],
    "w4a16-gptq": lambda: [tiny.gptq(tiny.scheme("W4A16", **GROUP), "static")],
    "w4a16-awq": lambda: [AWQModifier(n_grid=10), tiny.plain(tiny.scheme("W4A16_ASYM", **GROUP))],
}


def main() -> None:
    """Quantise, read back, run, and write the largest |K|, |V| and |Q|."""
    args = _arguments()
    texts = json.loads(args.documents.read_text())
    began = time.perf_counter()
    _quantise(args, texts["quantise"][: args.samples])
    result = {"seconds": time.perf_counter() - began, "amax": _amax(args, texts["measure"])}
    args.output.with_suffix(".json").write_text(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=RECIPES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True, help="token ids")
    parser.add_argument("--samples", type=int, help="to quantise with; default: all")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def _quantise(args: argparse.Namespace, ids: list[list[int]]) -> None:
    # it pins memory, for a GPU that is not there
    IntermediatesCache.pin_memory = lambda *_: None
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=Dataset.from_dict(rows),
        recipe=RECIPES[args.case](),
        max_seq_length=max(map(len, ids)),
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(args.output, save_compressed=True)
    tokenizer.save_pretrained(args.output)


def _amax(args: argparse.Namespace, ids: list[list[int]]) -> dict[str, Any]:
    """Of the weights as compressed-tensors decodes them, in float32."""
    modules: dict[str, dict[str, Tensor]] = {}
    for file in args.output.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = tensor
    weights = {
        f"{module}.weight": parts["weight"].float()
        if parts.keys() == {"weight"}
        else tiny.dequantized(parts, args.output)
        for module, parts in modules.items()
    }
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.load_state_dict({"lm_head.weight": weights["model.embed_tokens.weight"]} | weights)
    return true_amax(model, torch.tensor(ids))


if __name__ == "__main__":
    main()
