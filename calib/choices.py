"""The closed lists a user picks from, in a file of its own: it imports nothing heavy, so `--help` is fast."""

from dataclasses import dataclass
from typing import Literal, get_args


@dataclass(frozen=True)
class ObserverEntry:
    """Facts of an observer: a text that says which amax it derives, and whether it reads a histogram."""

    amax: str
    needs_histogram: bool = True  # which cost time and memory


# `calib/scales/observers.py` makes them; `--help` and recipes take their names and words from here
ObserverName = Literal["absmax", "percentile", "mse"]
OBSERVERS: dict[ObserverName, ObserverEntry] = {
    "absmax": ObserverEntry(
        "the largest magnitude seen, so nothing saturates on the calibration data", needs_histogram=False
    ),
    "percentile": ObserverEntry(
        "the magnitude that `observer.percentile` % of values (by default 99.99 %) stay below, so it clips"
    ),
    "mse": ObserverEntry("the clipping threshold with the least squared error after FP8 rounding"),
}

Strategy = Literal["tensor", "attn_head", "channel"]
Targets = Literal["kv", "qkv"]
FormatName = Literal[
    "vllm", "aphrodite", "sglang", "tgi", "json", "modelopt", "trtllm", "vllm-nvfp4",
    "sglang-nvfp4", "fp8kv",
]  # fmt: skip
FP8Name = Literal["e4m3fn", "e4m3fnuz", "e5m2"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Purpose = Literal["fp8", "int8"]  # of baked factors
Reduce = Literal["none", "max"]
Offload = Literal["auto", "none", "layerwise"]
Backend = Literal["auto", "triton", "torch"]
AttentionMode = Literal[
    "exact", "fa3", "fa3_two_level", "fa3_one_level", "vllm_triton", "vllm_triton_fp8"
]  # fmt: skip
SuiteName = Literal["quick", "full"]
Weights = Literal["link", "copy", "none"]
ProgressForm = Literal["auto", "json", "none"]
VariantName = Literal[
    "bf16", "eager", "none", "e5m2", "tensor", "rest", "mse", "attn_head", "channel", "k only",
    "v only", "qkv", "channel+k_center", "k only+k_center", "random",
]  # fmt: skip

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
VARIANTS: tuple[VariantName, ...] = get_args(VariantName)

REFERENCE = "reference"  # the model's own cache, which all variants are compared with
CONTROLS = ("bf16", "eager")  # variants that are measured whatever is chosen
KL_BUDGET = 0.005  # nats per token, of a recommendation
METRICS = ("kl", "kl_p99", "kl_p999", "ppl_change", "top1", "same_tokens", "passkey")
