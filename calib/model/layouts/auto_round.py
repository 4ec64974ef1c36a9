"""AutoRound's own format: GPTQ's or AWQ's tensors, as `packing_format` says.

Source: `export_to_autoround` of AutoRound 0.16. Its GPTQ and AWQ exports name these as methods.
"""

from typing import Any

from calib.model.layouts.awq import Awq
from calib.model.layouts.coded import ADVICE, LayoutError, setting
from calib.model.layouts.gptq import Gptq

# by their zero points, see `Gptq`
_GPTQ = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2"}
_AWQ = "auto_round:auto_awq"


def read_auto_round(says: dict[str, Any]) -> Gptq | Awq:
    """Read a `quantization_config`."""
    form = setting(says, "packing_format", (*_GPTQ, _AWQ), None)
    setting(says, "data_type", ("int",), "int")
    own = says.get("extra_config") or {}
    # 16 bits: a module that is left alone
    if not isinstance(own, dict) or any(_bits(module) != 16 for module in own.values()):
        raise LayoutError(f"'extra_config' gives modules bits of their own, {ADVICE}")
    if form == _AWQ:
        return Awq.read({**says, "version": "gemm"})
    return Gptq.read({**says, "checkpoint_format": _GPTQ[form]})


def _bits(module: Any) -> Any:
    return module.get("bits") if isinstance(module, dict) else None
