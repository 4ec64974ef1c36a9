"""Every format engines load, in one table; to add one: an entry here and a golden file."""

from calib.choices import FormatName, FP8Name, Reduce, Strategy
from calib.errors import UnsupportedExportError
from calib.export.base import Export, Format
from calib.export.compressed_tensors import compressed_tensors, sglang
from calib.export.modelopt import modelopt, trtllm
from calib.export.scales_json import scales_json
from calib.export.tgi import tgi
from calib.model.checkpoint import Checkpoint
from calib.scales.scales import KVScales
from calib.verify.rules import all_rules

__all__ = ["FORMATS", "Export", "Format", "check_format", "export"]


def check_format(
    name: FormatName, *, strategy: Strategy, fp8_dtype: FP8Name, with_q: bool, reduce: Reduce,
    center_keys: bool = False,
) -> None:  # fmt: skip
    """Refuse what the format cannot express, before anything is measured.

    Raises:
        UnsupportedExportError: the format cannot express the strategy, FP8 type, query scales or
            centred keys; the message names the way out.
    """
    target = FORMATS[name]
    if fp8_dtype not in target.fp8_dtypes:
        raise UnsupportedExportError(
            f"--format {name} holds {' or '.join(target.fp8_dtypes)} scales; these are for "
            f"{fp8_dtype}. Use --fp8-dtype {target.fp8_dtypes[0]}, or "
            f"--format {_formats_with('fp8_dtypes', fp8_dtype)}"
        )
    if with_q and not target.reads_q:
        raise UnsupportedExportError(
            f"--format {name} holds no query scales. Use --targets kv, or --format vllm"
        )
    if center_keys and not target.reads_center:
        raise UnsupportedExportError(
            f"--format {name}: {target.engine} subtracts nothing from K. "
            "Use --format fp8kv, or leave --center-keys away"
        )
    if strategy not in target.strategies and reduce != "max":
        raise UnsupportedExportError(
            f"--format {name}: {target.engine} reads "
            f"{' or '.join(target.strategies)} scales; this calibration has strategy '{strategy}'. "
            f"Use --strategy {target.strategies[0]}, add --reduce max, or "
            f"--format {_formats_with('strategies', strategy)}"
        )


def export(
    scales: KVScales,
    checkpoint: Checkpoint,
    name: FormatName,
    *,
    reduce: Reduce = "none",
    tp_size: int = 1,
) -> Export:
    """Express `scales` in the format called `name`, for the model in `checkpoint`.

    Raises:
        UnsupportedExportError: the format, or the engine behind it, cannot hold them.
    """
    check_format(
        name,
        strategy=scales.strategy,
        fp8_dtype=scales.fp8_dtype,
        with_q=scales.has_q,
        reduce=reduce,
        center_keys=scales.has_center,
    )
    target = FORMATS[name]
    held = scales if scales.strategy in target.strategies else scales.reduce_max()
    return target.build(held, checkpoint, tp_size)


def _formats_with(field: str, wanted: str) -> str:
    return " or ".join(name for name, target in FORMATS.items() if wanted in getattr(target, field))


def _nothing(scales: KVScales, checkpoint: Checkpoint, tp_size: int) -> Export:
    # the statistics and the recipe, which every output holds, are all our own runtime needs
    return Export()


_VLLM_NOTE = (
    "on AMD MI300 (fnuz) vLLM does not convert compressed-tensors KV scales, so use --format "
    "modelopt there; per-head scales need FlashAttention 3 (Hopper) or 4 (Blackwell, sm_100)"
)

_SGLANG = all_rules()["sglang"]
_SGLANG_NOTE = (
    f"needs SGLang {_SGLANG.since} or newer, and is known to be loaded by its "
    f"{' and '.join(_SGLANG.architectures)} alone: other classes may drop the scales without a "
    "word, or not start (see `fp8kv verify`); for older ones use --format modelopt"
)

FORMATS: dict[FormatName, Format] = {
    "vllm": Format(
        engine="vLLM",
        build=compressed_tensors,
        serve="vllm serve {path} --kv-cache-dtype fp8",
        strategies=("tensor", "attn_head"),
        reads_q=True,
        per_head_flags=" --attention-backend FLASH_ATTN",
        note=_VLLM_NOTE,
    ),
    "aphrodite": Format(
        engine="Aphrodite",
        build=compressed_tensors,
        serve="aphrodite run {path} --kv-cache-dtype fp8",
        strategies=("tensor", "attn_head"),
        reads_q=True,
    ),
    "sglang": Format(
        engine="SGLang",
        build=sglang,
        serve="python -m sglang.launch_server --model-path {path} --kv-cache-dtype fp8_e4m3",
        note=_SGLANG_NOTE,
    ),
    "tgi": Format(
        engine="TGI",
        build=tgi,
        serve="text-generation-launcher --model-id {path} --kv-cache-dtype fp8_e4m3fn",
        fp8_dtypes=("e4m3fn", "e4m3fnuz"),
        note="TGI uses the scales with paged attention or flashinfer only, and says so in its log",
    ),
    "json": Format(
        engine="vLLM <= 0.6 on ROCm, Aphrodite <= 0.6",
        build=scales_json,
        serve="<engine> --model MODEL --kv-cache-dtype fp8 "
        "--quantization-param-path {path}/kv_cache_scales.json",
        with_weights=False,
        note="vLLM 0.4.3 to 0.6.6, Aphrodite <= 0.6.5 and SGLang accept this file but misapply it; "
        "vLLM >= 0.7 has dropped it: prefer --format vllm or sglang",
    ),
    "modelopt": Format(
        engine=f"vLLM on MI300, SGLang before {_SGLANG.since}",
        build=modelopt,
        serve="vllm serve {path} --kv-cache-dtype fp8",
        note="vLLM passes these scales through bfloat16 (0.02 becomes 0.02001953)",
    ),
    "trtllm": Format(
        engine="TensorRT-LLM",
        build=trtllm,
        serve="trtllm-serve {path} --kv_cache_dtype fp8",
        note="TensorRT-LLM's PyTorch backend ignores FP8 KV scales and uses 1.0; vLLM and SGLang "
        "refuse this file: use --format modelopt for them",
    ),
    "fp8kv": Format(
        engine="the bundled runtime",
        build=_nothing,
        serve="",
        strategies=("tensor", "attn_head", "channel"),
        fp8_dtypes=("e4m3fn", "e4m3fnuz", "e5m2"),
        reads_q=True,
        reads_center=True,
        with_weights=False,
    ),
}
