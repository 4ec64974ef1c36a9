"""Give every hand-made directory to SGLang's own loader code; compare what its layers hold.

check_sglang.py   exit 0 if `fp8kv verify` is right about every one

A server needs a GPU. What decides about KV scales does not: the quantization config, the attention
layer with its KV method, the mapping of names, the weight loader. They run here on a skeleton of
attention layers, in the order of SGLang's Llama. What other model classes do is in their table, see
sglang_classes.py.
"""

import json
import sys
import tempfile
from pathlib import Path

import no_pictures  # noqa: F401 (before SGLang)
import torch
from check_verify import GOLDEN, Held, difference
from safetensors import safe_open
from scale_cases import CASES, HEAD_DIM, HEADS, KV_HEADS, LAYERS, write_case
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import get_quantization_config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader.weight_utils import (
    default_weight_loader,
    maybe_remap_kv_scale_name,
)
from torch import nn

from calib.engines.catalogue import Engine, find_engine
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory


class Skeleton(nn.Module):
    """The attention layers of a model, under its names."""

    def __init__(self, quantization) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = nn.Module()
            name = f"model.layers.{i}.self_attn.attn"
            layer.self_attn.attn = RadixAttention(
                HEADS, HEAD_DIM, 1.0, KV_HEADS, i, quant_config=quantization, prefix=name
            )


def held_by_sglang(directory: Path) -> Held | str:
    """The scales of each attention layer as SGLang's code leaves them, or why it refused."""
    try:
        model = Skeleton(quantization_of(directory))
        params = dict(model.named_parameters())
        for name, tensor in scales_of(directory):
            target = maybe_remap_kv_scale_name(name, params)
            if target in params:
                default_weight_loader(params[target], tensor)
        return held_by(model)
    except Exception as error:  # noqa: BLE001 (whatever SGLang raises)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def held_by(model: nn.Module) -> Held:
    """The scales of each attention layer, made ready to serve."""
    for layer in model.model.layers:
        attention = layer.self_attn.attn
        if attention.quant_method is not None:
            attention.quant_method.process_weights_after_loading(attention)
    return {
        f"model.layers.{i}.self_attn {letter}": [scale_of(layer.self_attn.attn, letter)]
        for i, layer in enumerate(model.model.layers)
        for letter in "kvq"
    }


def scale_of(attention, letter: str) -> float:
    """What the layer computes with: 1.0 where it holds nothing."""
    scale = getattr(attention, f"{letter}_scale", None)
    return 1.0 if scale is None else float(scale)


def quantization_of(directory: Path):
    """The config object that SGLang makes of config.json."""
    config = json.loads((directory / "config.json").read_text())
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return None
    if found["quant_method"] == "modelopt":
        # as its ModelConfig does; what that makes of FP8 is what its table of methods says, too
        parsed = ModelConfig._parse_modelopt_quant_config(None, {"quantization": found})
        if parsed and parsed["quant_algo"] == "MIXED_PRECISION":
            found |= parsed
    found["packed_modules_mapping"] = {}  # as its loader of models does
    return get_quantization_config(found["quant_method"]).from_config(found)


def scales_of(directory: Path):
    """Names and tensors of scales, in the files that the index names, or all without one."""
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if index.exists():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in listed]
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                if "scale" in name and "weight" not in name and "input" not in name:
                    yield name, tensors.get_tensor(name)


def check(name: str, path: Path, held: Held | str, rules: Engine) -> bool:
    """Compare with the prediction, and print a line."""
    found = simulate(open_model_directory(path, weights=False), rules)
    known = all(outcome.status != "unknown" for outcome in found.outcomes)
    wrong = difference(found, held) if known else "predicted not known"
    seen = held if isinstance(held, str) else "loaded"
    print(f"{'WRONG' if wrong else 'OK'} {name}: {wrong or seen}", flush=True)
    return wrong is None


# SGLang starts with no fp8_pb_wo, and its rules do not know it
# and of a config without a word on the cache the loader of files reads on, which is not run here
_UNKNOWN = {"modelopt, tiles", "mixed precision, no cache"}


def main() -> None:
    rules = find_engine("sglang")
    right = []
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        # whether files are there is checked by what is not run here
        cases = [case for case in CASES if not case.also_indexed and case.name not in _UNKNOWN]
        made = {case.name: write_case(case, Path(scratch, str(i))) for i, case in enumerate(cases)}
        for name, path in (made | GOLDEN).items():
            right.append(check(name, path, held_by_sglang(path), rules))
    if not all(right):
        sys.exit(f"FAILED: {right.count(False)} of {len(right)} directories")
    print(f"OK: SGLang does what `fp8kv verify` predicts with {len(right)} directories")


if __name__ == "__main__":
    main()
