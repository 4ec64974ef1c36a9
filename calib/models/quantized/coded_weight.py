"""One weight as a layout stores it: the tensors that make it up, and how to decode them."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from torch import Tensor

from calib.errors import InputError
from calib.files.safetensors_header import Entry

FLOATS = ("F32", "F16", "BF16")
CODES = ("F8_E4M3", "I8", "U8", "I32")
ADVICE = "which nothing here can read; give the model it was made from"
# values decoded at a time: few, so that int32 codes and float32 values take little memory
CHUNK = 1 << 20

Tensors = Mapping[str, Tensor]


class WeightFormatError(InputError):
    """What a layout cannot read, in words that do not name the checkpoint."""


@dataclass(frozen=True)
class ModuleTensors:
    """The stored tensors of one module, by the last part of their names."""

    name: str
    entries: Mapping[str, Entry]

    def need(self, part: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> str:
        """Name of the tensor `part`, which must have one of `dtypes` and of `shapes`, if given."""
        entry = self.entries.get(part)
        if entry is None:
            raise WeightFormatError(f"'{self.name}' has no '{part}'; download the model again")
        if entry.dtype not in dtypes:
            raise WeightFormatError(
                f"'{self.name}.{part}' is {entry.dtype}, where its config.json wants {' or '.join(dtypes)}"
            )
        if shapes and entry.shape not in shapes:
            raise WeightFormatError(
                f"'{self.name}.{part}' is {list(entry.shape)}, where its config.json and its codes "
                f"want {' or '.join(str(list(shape)) for shape in shapes)}"
            )
        return f"{self.name}.{part}"

    def matrix(self, part: str, dtypes: Collection[str]) -> tuple[int, int]:
        """Shape of the tensor `part`, which must have two dimensions."""
        self.need(part, dtypes)
        shape = self.entries[part].shape
        if len(shape) != 2 or 0 in shape:
            raise WeightFormatError(f"'{self.name}.{part}' is {list(shape)}, and no matrix, {ADVICE}")
        return shape[0], shape[1]

    def groups(self, columns: int, size: int | None) -> int:
        """How many groups of `size` a row of `columns` values has; None: the row is the group."""
        if size and columns % size:
            raise WeightFormatError(
                f"'{self.name}' has {columns} columns, which groups of {size} do not divide"
            )
        return columns // (size or columns)


@dataclass(frozen=True)
class CodedWeight:
    """One weight, and how to decode it from stored tensors."""

    name: str  # of the weight, as an unquantised checkpoint has it
    shape: tuple[int, ...]  # of the weight
    parts: dict[str, str]  # what `rows` calls a tensor -> its name in the checkpoint
    rows: Callable[[Tensors, int, int], Tensor]  # its rows [start, stop) in float32
    multiple: int = 1  # `rows` starts at multiples of this
    block: tuple[int | None, int | None] = (1, None)  # rows and columns that share a scale

    def decode(self, tensors: Tensors, weight: Tensor) -> Tensor:
        """Fill `weight` from the tensors of `parts`; WeightFormatError where it is not finite.

        A value is computed in float32 and rounded once.
        """
        for part, tensor in tensors.items():
            if "scale" in part and not tensor.float().isfinite().all():
                raise WeightFormatError(f"'{self.parts[part]}' holds NaN or Inf; download it again")
        step = max(self.multiple, CHUNK // prod(self.shape[1:]) // self.multiple * self.multiple)
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            piece = weight[start:stop].copy_(self._rows(tensors, start, stop))
            if not piece.isfinite().all():
                raise WeightFormatError(
                    f"'{self.name}' dequantises to NaN or Inf in {weight.dtype}; download the "
                    "model again, or use --dtype float32"
                )
        return weight

    def _rows(self, tensors: Tensors, start: int, stop: int) -> Tensor:
        try:
            return self.rows(tensors, start, stop)
        except WeightFormatError as error:
            raise WeightFormatError(f"'{self.name}': {error}") from None


class WeightScheme(Protocol):
    """How one module's tensors make up its weight."""

    def weight(self, module: ModuleTensors) -> CodedWeight:
        """The weight of `module`; WeightFormatError where names, types or shapes are others."""
        ...


class WeightFormat(Protocol):
    """One form of quantised weights, as a quantization config describes it."""

    @property
    def label(self) -> str:
        """Its name, for messages."""
        ...

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """The weights that `module` holds as codes: none, one, or the fused ones of experts.

        Looks at names, types and shapes alone; WeightFormatError where they do not fit the config.
        """
        ...


def known(key: str, value: Any, allowed: Collection[Any]) -> Any:
    """`value`, which a config gives as `key`; WeightFormatError unless it is one of `allowed`."""
    # 4 and 4.0 and True are equal to Python
    if not any(value == one and type(value) is type(one) for one in allowed):
        raise WeightFormatError(f"{key} {value!r:.80} is none of {[*allowed]}, {ADVICE}")
    return value


def section(says: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a config's `key`, empty where it is absent; WeightFormatError for another type."""
    value = says.get(key)
    if value is not None and not isinstance(value, dict):
        raise WeightFormatError(f"{key} {value!r:.80} is no JSON object")
    return value or {}


def group_size_of(says: Mapping[str, Any], default: int | None = None) -> int | None:
    """The group size of a config; None: a group is a whole row."""
    value = says.get("group_size", default)
    if value in (None, -1):
        return None
    if type(value) is not int or value < 1:
        raise WeightFormatError(f"group_size {value!r:.80} is no whole number of columns")
    return value


def two_sizes(key: str, value: Any) -> tuple[int, int]:
    """Rows and columns of a tile, which a config gives as `key`: `[128, 128]` or `128x128`."""
    sizes = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(_is_size, sizes)):
        raise WeightFormatError(f"{key} {value!r:.80} is no two sizes, {ADVICE}")
    return int(sizes[0]), int(sizes[1])


def _is_size(value: Any) -> bool:
    return re.fullmatch(r"[1-9][0-9]{0,8}", str(value)) is not None
