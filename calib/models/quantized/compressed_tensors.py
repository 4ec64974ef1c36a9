"""compressed-tensors, which llm-compressor and AutoRound write: what each group of modules holds.

Source: `compressors/` and `quantization/` of compressed-tensors 0.17 and 0.20, which agree in what
is read here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from calib.models.quantized.coded_weight import (
    ADVICE,
    CODES,
    CodedWeight,
    ModuleTensors,
    WeightFormatError,
    WeightScheme,
    group_size_of,
    known,
    section,
    two_sizes,
)
from calib.models.quantized.packed import Packed
from calib.models.quantized.scaled import FP8, INT8, MXFP4, MXFP8, NVFP4, Block, Scaled

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
_BITS = range(2, 9)
# values of `actorder` with which each column names its group; others leave groups in their order
_ORDERED = ("group", "dynamic")
# formats of which there is one kind
_FIXED = {
    "nvfp4-pack-quantized": replace(NVFP4, code="weight_packed", second="weight_global_scale", divides=True),
    "mxfp4-pack-quantized": replace(MXFP4, code="weight_packed"),
    "mxfp8-quantized": MXFP8,
}


@dataclass(frozen=True)
class CompressedTensors:
    """Schemes by their targets, and the modules that are left alone."""

    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignore: tuple[str, ...]

    label = "compressed-tensors"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "CompressedTensors":
        """Read a `quantization_config` or a `compression_config`."""
        sparse = section(says, "sparsity_config").get("format", "dense")
        if says.get("transform_config") or sparse != "dense":
            raise WeightFormatError(f"transform_config or sparsity_config is set, {ADVICE}")
        if says.get("quantization_status", "compressed") != "compressed":
            raise WeightFormatError(f"quantization_status is not 'compressed', {ADVICE}")
        groups = section(says, "config_groups")
        schemes = tuple(
            (_strings(group, "targets"), _scheme(group, says.get("format")))
            for group in (section(groups, name) for name in groups)
            if group.get("weights") is not None
        )
        if not schemes:
            raise WeightFormatError(f"no group of config_groups has weights, {ADVICE}")
        return cls(schemes, _strings(says, "ignore"))

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """The weight of a module that holds codes; WeightFormatError if no group is about it."""
        entry = module.entries.get("weight_packed", module.entries.get("weight"))
        if entry is None or entry.dtype not in CODES:
            return
        if any(_is_named(module.name, pattern) for pattern in self.ignore):
            raise WeightFormatError(f"'{module.name}' holds codes, and its config.json ignores it")
        yield self._scheme(module.name).weight(module)

    def _scheme(self, name: str) -> WeightScheme:
        # exact names come before patterns, and both before classes, as in the library
        exact = {s for targets, s in self.schemes if name in targets}
        by_pattern = {s for targets, s in self.schemes if any(_is_named(name, t) for t in targets)}
        by_class = {s for targets, s in self.schemes if "Linear" in targets}
        found = exact or by_pattern or by_class
        if len(found) != 1:
            groups = "several groups are" if found else "no group is"
            raise WeightFormatError(f"'{name}' holds codes, and {groups} about it in config_groups")
        return found.pop()


def _scheme(group: dict[str, Any], form: Any) -> WeightScheme:
    """Read a group of `config_groups`; `form` is the format that the config has for all."""
    form = known("format", group.get("format") or form, tuple(_FORMATS))
    weights = section(group, "weights")
    kind, bits = weights.get("type", "int"), known("num_bits", weights.get("num_bits", 8), _BITS)
    if (kind, bits) not in _FORMATS[form]:
        raise WeightFormatError(f"format {form} of num_bits {bits}, type {kind!r:.20}, {ADVICE}")
    block = _block(weights)
    has_zeros = not known("symmetric", weights.get("symmetric", True), (True, False))
    if form in _FIXED:
        if block != _FIXED[form].block or has_zeros:
            raise WeightFormatError(f"{form} in blocks of {block}, {ADVICE}")
        return _FIXED[form]
    if form == "pack-quantized":
        if has_zeros and block[0] != 1:
            raise WeightFormatError(f"one zero point for several rows, {ADVICE}")
        return Packed(bits, block, has_zeros, weights.get("actorder") in (True, *_ORDERED))
    return Scaled(block, dtype=FP8 if kind == "float" else INT8, has_zero_points=has_zeros)


def _block(weights: dict[str, Any]) -> Block:
    """Rows and columns that share a scale."""
    size = group_size_of(weights)
    usual = "group" if size else "channel" if weights.get("group_size") else "tensor"
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = known("strategy", weights.get("strategy") or usual, strategies)
    if (size is None) == (strategy in ("group", "tensor_group")):
        raise WeightFormatError(f"strategy {strategy} with group_size {size}, {ADVICE}")
    if strategy == "block":
        return two_sizes("block_structure", weights.get("block_structure"))
    return (None if strategy == "tensor" else 1), size


def _is_named(name: str, target: str) -> bool:
    if not target.startswith("re:"):
        return name == target
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as error:
        raise WeightFormatError(f"'{target:.80}' is no regular expression: {error}") from None


def _strings(says: dict[str, Any], key: str) -> tuple[str, ...]:
    value = says.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise WeightFormatError(f"{key} {value!r:.80} is no list of names, {ADVICE}")
    return tuple(value)
