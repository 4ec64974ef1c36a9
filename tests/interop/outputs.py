"""What our output directories say, read without our package: the engines' environment lacks it."""

import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

SCALES_FILE, STATS_FILE = "model-fp8kv-scales.safetensors", "fp8kv_stats.safetensors"

_SCALE = re.compile(r"(?P<attention>.+\.self_attn)\.(?:[kv]_proj\.)?(?P<which>[qkv])_scale")


@dataclass(frozen=True)
class Output:
    """An output directory's config and scales."""

    config: dict
    scales: dict[str, dict[str, Tensor]]  # attention module -> q, k, v -> float32, as in the file

    @property
    def quantization(self) -> dict:
        """The quantization_config; empty where the format has none."""
        return self.config.get("quantization_config", {})

    @property
    def scales_per_layer(self) -> int:
        """How many K scales a layer has."""
        strategy = self.quantization.get("kv_cache_scheme", {}).get("strategy", "tensor")
        return self.config["num_key_value_heads"] if strategy == "attn_head" else 1


def read_output(directory: Path) -> Output:
    """Read an output directory."""
    scales: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in load_file(directory / SCALES_FILE).items():
        if match := _SCALE.fullmatch(name):
            scales[match["attention"]][match["which"]] = tensor
    return Output(json.loads((directory / "config.json").read_text()), dict(scales))


def report(directory: Path, problems: list[str], success: str) -> None:
    """Print one line and leave with status 1 if there are problems."""
    if problems:
        shown = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        sys.exit(f"FAILED {directory}: {shown}{more}")
    print(f"OK {directory}: {success}", flush=True)
