"""compressed-tensors: what one group's weights are, and how to decode them."""

from dataclasses import dataclass
from typing import Any

from calib.model.layouts.coded import (
    ADVICE,
    CodedWeight,
    LayoutError,
    Module,
    group_size_of,
    groups_in,
    section,
    setting,
)
from calib.model.layouts.packed import packed_weight
from calib.model.layouts.scaled import (
    E8M0,
    FP8,
    INT8,
    MXFP4_GROUP,
    NVFP4_GROUP,
    fp4_weight,
    grouped_weight,
    scaled_weight,
)

# format -> type and bits of its codes
_FORMATS = {
    "float-quantized": [("float", 8)],
    "int-quantized": [("int", bits) for bits in range(2, 9)],
    "naive-quantized": [("float", 8), ("int", 8)],
    "pack-quantized": [("int", bits) for bits in range(2, 9)],
    "nvfp4-pack-quantized": [("float", 4)],
    "mxfp4-pack-quantized": [("float", 4)],
    "mxfp8-quantized": [("float", 8)],
}
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")


@dataclass(frozen=True)
class Scheme:
    """The settings of one group's weights."""

    form: str
    kind: str  # int or float
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool

    @classmethod
    def read(cls, group: dict[str, Any], form: Any) -> "Scheme":
        """Read a group of `config_groups`; `form` is the format that the config has for all."""
        form = setting({"format": group.get("format") or form}, "format", tuple(_FORMATS), None)
        weights = section(group, "weights")
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if (kind, bits) not in _FORMATS[form]:
            raise LayoutError(
                f"format {form} of num_bits {bits!r:.20}, type {kind!r:.20}, {ADVICE}"
            )
        group_size = group_size_of(weights)
        usual = "group" if group_size else "channel" if weights.get("group_size") else "tensor"
        strategy = setting(
            {"strategy": weights.get("strategy") or usual}, "strategy", _STRATEGIES, ""
        )
        if (group_size is None) == (strategy in ("group", "tensor_group")):
            raise LayoutError(f"strategy {strategy} with group_size {group_size}, {ADVICE}")
        symmetric = setting(weights, "symmetric", (True, False), True)
        block = _block(weights.get("block_structure")) if strategy == "block" else None
        return cls(form, kind, bits, strategy, group_size, block, symmetric)

    def weight(self, module: Module) -> CodedWeight:
        """The weight of a module of this group."""
        if self.form == "pack-quantized":
            return packed_weight(
                module,
                self.bits,
                self.scale_block,
                has_zero_points=not self.symmetric,
                also=_OF_ACTIVATIONS,
            )
        if self.form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            return self._fp4(module)
        if self.form == "mxfp8-quantized":
            self._check_group(MXFP4_GROUP)
            return grouped_weight(module, MXFP4_GROUP, scale_dtypes=E8M0, also=_OF_ACTIVATIONS)
        if self.group_size:
            groups_in(module, module.matrix("weight", (*FP8, *INT8))[1], self.group_size)
        return scaled_weight(
            module,
            self.scale_block,
            codes=FP8 if self.kind == "float" else INT8,
            zero_point=None if self.symmetric else "weight_zero_point",
            also=_OF_ACTIVATIONS,
        )

    @property
    def scale_block(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None: all."""
        if self.block:
            return self.block
        return (None if self.strategy == "tensor" else 1), self.group_size

    def _fp4(self, module: Module) -> CodedWeight:
        if self.form.startswith("mx"):
            self._check_group(MXFP4_GROUP)
            return fp4_weight(
                module, MXFP4_GROUP, codes="weight_packed", scale_dtypes=E8M0, also=_OF_ACTIVATIONS
            )
        self._check_group(NVFP4_GROUP)
        return fp4_weight(
            module, NVFP4_GROUP, codes="weight_packed", scale_dtypes=FP8,
            second="weight_global_scale", divides=True, also=_OF_ACTIVATIONS,
        )  # fmt: skip

    def _check_group(self, size: int) -> None:
        if self.group_size != size or not self.symmetric:
            raise LayoutError(f"{self.form} with group_size {self.group_size}, {ADVICE}")


def _block(structure: Any) -> tuple[int, int]:
    match structure.split("x") if isinstance(structure, str) else structure:
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return high, wide
        case [str(high), str(wide)] if high.isdecimal() and wide.isdecimal():
            return int(high), int(wide)
    raise LayoutError(f"block_structure {structure!r:.80} is no two sizes, {ADVICE}")
