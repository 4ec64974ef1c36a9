"""compressed-tensors, which llm-compressor and AutoRound write: a scheme for each group of modules.

Source: `compressors/` and `quantization/` of compressed-tensors 0.17 and 0.20. They differ in
`pack-quantized` alone: 0.17 leaves unused the bits of a word that hold no whole code, 0.20 goes on in
the next word; the shapes of a file tell which it is.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from calib.models.quantized.coded_weight import (
    MXFP4,
    MXFP8,
    NVFP4,
    Codes,
    ModuleTensors,
    Tensors,
    WeightFormat,
    WeightScheme,
    count_words,
    unpack_words,
)
from calib.models.quantized.config import ADVICE, FormatError, QuantizationConfig

_INTEGERS = [("int", bits) for bits in range(2, 9)]
# format -> type and bits of its codes
_FORMATS = {
    "float-quantized": [("float", 8)],
    "int-quantized": _INTEGERS,
    "naive-quantized": [("float", 8), ("int", 8)],
    "pack-quantized": _INTEGERS,
    "nvfp4-pack-quantized": [("float", 4)],
    "mxfp4-pack-quantized": [("float", 4)],
    "mxfp8-quantized": [("float", 8)],
}
# formats without further settings
_FIXED: dict[str, WeightScheme] = {
    "nvfp4-pack-quantized": replace(
        NVFP4, codes="weight_packed", second_scale="weight_global_scale", divides=True
    ),
    "mxfp4-pack-quantized": replace(MXFP4, codes="weight_packed"),
    "mxfp8-quantized": MXFP8,
}


@dataclass(frozen=True)
class PackedScheme(WeightScheme):
    """`weight_packed` [rows, words], `weight_zero_point` [words, groups], `weight_g_idx` [columns]."""

    codes: str = "weight_packed"
    dtype: str = "I32"
    g_idx: str | None = "weight_g_idx"
    shape: str | None = "weight_shape"
    bits: int = 4

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        bits, name = self.bits, f"{module.name}.weight_packed"
        columns = wide * 32 // bits
        if self.block[0] == 1 and self.block[1]:
            columns = module.matrix("weight_scale", self.scale_dtypes)[1] * self.block[1]
        elif 32 % bits:
            raise FormatError(f"codes of {bits} bits without a group_size, {ADVICE}")
        dense, spaced = (count_words(columns, bits, is_spaced=is_spaced) for is_spaced in (False, True))
        if dense == spaced and 32 % bits and columns > 32 // bits:
            raise FormatError(f"'{name}' may hold {columns} codes of {bits} bits in two ways, {ADVICE}")
        if wide not in (dense, spaced):
            codes = f"which do not hold {columns} codes of {bits} bits"
            raise FormatError(f"'{name}' has {wide} words in a row, {codes}")
        return high, columns, count_words(high, bits, is_spaced=wide != dense)

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        words, columns = tensors["codes"], int(tensors["shape"][1])
        is_spaced = words.shape[1] != count_words(columns, self.bits)
        codes = unpack_words(words[rows], self.bits, slice(0, columns), is_spaced=is_spaced)
        if "zeros" not in tensors:
            return codes - (1 << (self.bits - 1)), None
        return codes, unpack_words(tensors["zeros"], self.bits, rows, dim=0, is_spaced=is_spaced)

    def _groups(self, columns: int, g_idx: Tensor | None) -> Tensor | None:
        # -1 stands for an order that was never set
        return super()._groups(columns, None if g_idx is None or (g_idx == -1).any() else g_idx)


@dataclass(frozen=True)
class GroupedFormat(WeightFormat):
    """Schemes of groups of modules, which are named by targets: a name, a pattern or a class."""

    codes: tuple[str, ...] = ("weight_packed", "weight")
    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...] = ()
    ignore: tuple[str, ...] = ()

    def _scheme(self, name: str) -> WeightScheme:
        # names come before patterns, and both before classes, as in the library
        if any(_is_target(name, pattern) for pattern in self.ignore):
            raise FormatError(f"'{name}' holds codes, and its config.json ignores it")
        exact = {scheme for targets, scheme in self.groups if name in targets}
        by_pattern = {scheme for targets, scheme in self.groups if any(_is_target(name, t) for t in targets)}
        by_class = {scheme for targets, scheme in self.groups if "Linear" in targets}
        schemes = exact or by_pattern or by_class
        if len(schemes) != 1:
            groups = "several groups are" if schemes else "no group is"
            raise FormatError(f"'{name}' holds codes, and {groups} about it in config_groups")
        return schemes.pop()


def read_compressed_tensors(config: QuantizationConfig) -> WeightFormat:
    """Read a `quantization_config` or a `compression_config`; FormatError for what is not known."""
    if config.get("transform_config") or config.section("sparsity_config").get("format", "dense") != "dense":
        raise FormatError(f"transform_config or sparsity_config is set, {ADVICE}")
    config.choice("quantization_status", ("compressed",), "compressed")
    groups = tuple(
        (_read_names(group, "targets"), _read_scheme(group, config.get("format")))
        for group in config.sections("config_groups").values()
        if group.get("weights") is not None
    )
    if not groups:
        raise FormatError(f"no group of config_groups has weights, {ADVICE}")
    return GroupedFormat("compressed-tensors", None, groups=groups, ignore=_read_names(config, "ignore"))


def _read_scheme(group: QuantizationConfig, default_format: Any) -> WeightScheme:
    """Read a group of `config_groups`."""
    form, weights = group.choice("format", tuple(_FORMATS), default_format), group.section("weights")
    kind, bits = weights.get("type", "int"), weights.choice("num_bits", range(2, 9), 8)
    if (kind, bits) not in _FORMATS[form]:
        raise FormatError(f"format {form} of num_bits {bits}, type {kind!r:.20}, {ADVICE}")
    block = _read_block(weights)
    has_zeros = not weights.choice("symmetric", (True, False), True)
    if form in _FIXED:
        if block != _FIXED[form].block or has_zeros:
            raise FormatError(f"{form} in blocks of {block}, {ADVICE}")
        return _FIXED[form]
    if form == "pack-quantized":
        if has_zeros and block[0] != 1:
            raise FormatError(f"one zero point for several rows, {ADVICE}")
        # other values of `actorder` leave columns in their order
        requires_g_idx = weights.get("actorder") in (True, "group", "dynamic")
        return PackedScheme(block, has_zeros=has_zeros, requires_g_idx=requires_g_idx, bits=bits)
    return WeightScheme(block, dtype="F8_E4M3" if kind == "float" else "I8", has_zeros=has_zeros)


def _read_block(weights: QuantizationConfig) -> tuple[int | None, int | None]:
    """Return rows and columns that share a scale; None: all."""
    size = weights.group_size()
    default = "group" if size else "channel" if weights.get("group_size") else "tensor"
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block", "tensor_group"), default)
    if (size is None) == (strategy in ("group", "tensor_group")):
        raise FormatError(f"strategy {strategy} with group_size {size}, {ADVICE}")
    if strategy == "block":
        return weights.tile("block_structure")
    return (None if strategy == "tensor" else 1), size


def _is_target(name: str, target: str) -> bool:
    """Return whether a target is the name of a module or a pattern that it fits."""
    if not target.startswith("re:"):
        return name == target
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as error:
        raise FormatError(f"'{target:.80}' is not a regular expression: {error}") from None


def _read_names(config: QuantizationConfig, key: str) -> tuple[str, ...]:
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{key} {names!r:.80} is not a list of names, {ADVICE}")
    return tuple(names)
