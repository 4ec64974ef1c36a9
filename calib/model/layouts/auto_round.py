"""AutoRound's own format: GPTQ's or AWQ's tensors, as `packing_format` says.

Source: `export_to_autoround` of AutoRound 0.16. Its GPTQ and AWQ exports name these as methods.
"""

from typing import Any

from calib.model.layouts.awq import Awq
from calib.model.layouts.coded import ADVICE, LayoutError, section, setting
from calib.model.layouts.gptq import Gptq

# by their zero points, see `Gptq`
_GPTQ = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2"}
_AWQ = "auto_round:auto_awq"


def read_auto_round(says: dict[str, Any]) -> Gptq | Awq:
    """Read a `quantization_config`."""
    form = setting(says, "packing_format", (*_GPTQ, _AWQ), None)
    setting(says, "data_type", ("int",), "int")
    own = section(says, "extra_config")
    # 16 bits: a module that is left alone
    if any(section(own, module).get("bits") != 16 for module in own):
        raise LayoutError(f"'extra_config' gives modules bits of their own, {ADVICE}")
    if form == _AWQ:
        return Awq.read({**says, "version": "gemm"})
    return Gptq.read({**says, "checkpoint_format": _GPTQ[form]})
