"""`quant_method: fp8`: FP8 with a scale per tile, as DeepSeek and Qwen publish, or per weight.

Source: `fp8_cast_bf16.py` of DeepSeek-V3 (a weight is its codes times `weight_scale_inv`), and
vLLM's `fp8.py` for the older form with a `weight_scale`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calib.model.layouts.coded import ADVICE, CodedWeight, LayoutError, Module, setting
from calib.model.layouts.scaled import scaled_weight

_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_inv")


@dataclass(frozen=True)
class Fp8Block:
    """FP8 `weight` [rows, columns] and a scale per tile of `block`, or one for all."""

    block: tuple[int | None, int | None]

    label = "FP8"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "Fp8Block":
        """Read a `quantization_config`."""
        setting(says, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        match says.get("weight_block_size"):
            case None:
                return cls((None, None))
            case [int(high), int(wide)] if high > 0 and wide > 0:
                return cls((high, wide))
            case other:
                raise LayoutError(f"weight_block_size {other!r:.80} is no two sizes, {ADVICE}")

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module whose `weight` is FP8."""
        weight = module.entries.get("weight")
        if weight is None or weight.dtype != "F8_E4M3":
            return
        old = self.block == (None, None) and "weight_scale" in module.entries
        scale = "weight_scale" if old else "weight_scale_inv"
        yield scaled_weight(
            module, self.block, scale=scale, scale_dtypes=_SCALE_DTYPES, also=_OF_ACTIVATIONS
        )
