"""ModelOpt: `<attn>.k_proj.k_scale` and `.v_proj.v_scale`, `hf_quant_config.json`.

`trtllm` is what ModelOpt writes for a KV-only calibration. vLLM and SGLang refuse its null
`quant_algo`, so `modelopt` says FP8 and then ignores every weight, which both accept.
"""

from functools import partial
from typing import Any

from torch import Tensor

from calib.errors import UnsupportedExportError
from calib.export.base import Export, by_prefix, loaded_name
from calib.export.compressed_tensors import FP8_SCHEME, find_quantization_config
from calib.model.checkpoint import Checkpoint
from calib.scalefiles.file_names import MODELOPT_FILE
from calib.scales.scales import KVScales
from calib.verify.rules import Rules

_PRODUCER = {"name": "fp8kv"}
_NAME = "{module}.{x}_proj.{x}_scale"
_READ_UNDER = ("self_attn", "mixer")


def _export(
    scales: KVScales, checkpoint: Checkpoint, tp_size: int, *, quant_algo: str | None, ignore: str,
    rules: Rules,
) -> Export:  # fmt: skip
    if find_quantization_config(checkpoint.config) is not None:
        raise UnsupportedExportError(
            f"'{checkpoint.path}' already has a quantization_config, which this format would "
            "replace; use --format vllm, which keeps it"
        )
    quantization: dict[str, Any] = {
        "quant_method": "modelopt",
        "kv_cache_scheme": dict(FP8_SCHEME),
        "ignore": [ignore],
        "producer": _PRODUCER,
    }
    if quant_algo is not None:
        quantization["quant_algo"] = quant_algo
    document = {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": quant_algo,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": [ignore],
        },
    }
    config = {**checkpoint.config, "quantization_config": quantization}
    name, doubts = loaded_name(rules, scales, checkpoint, "modelopt", _NAME)
    tensors = _tensors(scales, checkpoint, name)
    return Export(tensors, config, {MODELOPT_FILE: document}, doubts=doubts)


def _tensors(scales: KVScales, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for prefix, layer in by_prefix(scales, checkpoint).items():
        if name == _NAME and not prefix.endswith(_READ_UNDER):
            raise UnsupportedExportError(
                f"engines read k_proj.k_scale only under {' or '.join(_READ_UNDER)}; this model "
                f"has '{prefix}'. Use --format vllm"
            )
        tensors |= {name.format(module=prefix, x=x): getattr(layer, x) for x in "kv"}
    return tensors


modelopt = partial(_export, quant_algo="FP8", ignore="*")
trtllm = partial(_export, quant_algo=None, ignore="lm_head")
