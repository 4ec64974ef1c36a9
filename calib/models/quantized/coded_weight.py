"""A weight as stored codes: its tensors, checked by name, type and shape, and decoded row by row."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor

from calib.files.safetensors_header import Entry
from calib.models.quantized.config import ADVICE, FormatError, name_subject

FLOATS = ("F32", "F16", "BF16")
E8M0 = ("U8", "F8_E8M0")
_CODES = ("F8_E4M3", "I8", "U8", "I32")
# values decoded at a time: few, so that int32 codes and float32 values take little memory
CHUNK = 1 << 20
# the magnitudes of FP4 E2M1; codes from 8 on are negative
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

BlockShape = tuple[int | None, int | None]  # rows and columns; None: all
Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]  # of any shape, as they are stored, by role
Codes = tuple[Tensor, Tensor | None]  # [rows, columns], and zero points [rows, groups] if packed like codes


@dataclass(frozen=True)
class ModuleTensors:
    """The stored tensors of one module, by the last part of their names."""

    name: str
    entries: Mapping[str, Entry]

    def require(self, part: str, dtypes: Collection[str], *shapes: Shape) -> str:
        """Return the name of tensor `part`; FormatError unless of one of `dtypes` and, if any, `shapes`."""
        entry, name = self.entries.get(part), f"{self.name}.{part}"
        if entry is None:
            raise FormatError(f"'{self.name}' has no '{part}'; download the model again")
        if entry.dtype not in dtypes:
            allowed = " or ".join(dtypes)
            raise FormatError(f"'{name}' is {entry.dtype}, where its config.json wants {allowed}")
        if shapes and entry.shape not in shapes:
            allowed = " or ".join(str([*shape]) for shape in shapes)
            raise FormatError(f"'{name}' is {[*entry.shape]}, where its config.json and codes want {allowed}")
        return name

    def matrix(self, part: str, dtypes: Collection[str]) -> tuple[int, int]:
        """Return the shape of the tensor `part`; FormatError unless it is a matrix."""
        name, shape = self.require(part, dtypes), self.entries[part].shape
        if len(shape) != 2 or 0 in shape:
            raise FormatError(f"'{name}' is {[*shape]}, which is not a matrix, {ADVICE}")
        return shape[0], shape[1]


@dataclass(frozen=True)
class CodedWeight:
    """A weight that is stored as codes."""

    name: str  # as an unquantised model has it
    shape: Shape
    parts: dict[str, str]  # role of a tensor (codes, scale, second_scale, zeros, g_idx, shape) -> its name
    scheme: "WeightScheme"

    def decode(self, tensors: Tensors, weight: Tensor) -> Tensor:
        """Fill `weight`, of this `shape`, from the tensors of `parts`; FormatError if it is not finite.

        It is [rows, columns], or [experts, in, out] if experts are fused. A value is computed in float32 and
        rounded once.
        """
        for part, tensor in tensors.items():
            if "scale" in part and not tensor.float().isfinite().all():
                raise FormatError(f"'{self.parts[part]}' holds NaN or Inf; download it again")
        step = max(1, CHUNK // prod(self.shape[1:]))
        for start in range(0, len(weight), step):
            piece = weight[start : start + step]
            piece.copy_(self.rows(tensors, start, start + len(piece)))
            if not piece.isfinite().all():
                advice = "download the model again, or use --dtype float32"
                raise FormatError(f"'{self.name}' dequantises to NaN or Inf in {weight.dtype}; {advice}")
        return weight

    def rows(self, tensors: Tensors, start: int, stop: int) -> Tensor:
        """Decode the rows from `start` up to `stop`: [stop - start, ...] float32."""
        with name_subject(f"'{self.name}'"):
            return self.scheme.decode(self.shape, tensors, slice(start, stop))


@dataclass(frozen=True)
class WeightScheme:
    """The tensors that make up a weight, whose values are `(code - zero point) * scale`.

    Here each value has a code of its own; subclasses unpack codes of fewer bits.
    """

    block: BlockShape = (None, None)  # the values that share a scale
    codes: str = "weight"
    dtype: str = "F8_E4M3"  # of codes and zero points
    scales: tuple[str, ...] = ("weight_scale",)  # names, of which a module has one
    scale_dtypes: Collection[str] = FLOATS
    second_scale: str | None = None  # of the whole weight
    divides: bool = False  # the second scale divides the scales of blocks, or else multiplies them
    zeros: str = "weight_zero_point"
    has_zeros: bool | None = False  # None: the files decide
    g_idx: str | None = None  # the group of each column
    requires_g_idx: bool = False  # False: the files decide
    shape: str | None = None  # rows and columns
    is_transposed: bool = False  # tensors are [in, out]

    def weight(self, module: ModuleTensors) -> CodedWeight:
        """Return the weight of `module`; FormatError where names, types or shapes do not fit."""
        rows, columns, zero_words = self._measure(module, *module.matrix(self.codes, (self.dtype,)))
        block_rows, block_columns = self.block
        if block_rows == 1 and block_columns and columns % block_columns:
            raise FormatError(
                f"'{module.name}' has {columns} columns, which groups of {block_columns} do not divide"
            )
        down, across = self._grid((rows, columns))
        vector: list[Shape] = [(down,)] if across == 1 else []
        scalar: list[Shape] = [()] if down * across == 1 else []
        # the last is ModelOpt's shape of scales of tiles
        shapes, zero_shape = [(down, across), *vector, *scalar, (down, 1, across, 1)], (zero_words, across)
        if self.is_transposed:
            shapes, zero_shape = [(across, down)], (across, zero_words)
        parts = {"codes": f"{module.name}.{self.codes}"}
        if self.has_zeros or (self.has_zeros is None and self.zeros in module.entries):
            zero_shapes = [zero_shape] if zero_words else shapes
            parts["zeros"] = module.require(self.zeros, (self.dtype,), *zero_shapes)
        scale = next((name for name in self.scales if name in module.entries), self.scales[-1])
        parts["scale"] = module.require(scale, self.scale_dtypes, *shapes)
        if self.second_scale:
            parts["second_scale"] = module.require(self.second_scale, FLOATS, (), (1,), (1, 1))
        if self.g_idx and (self.requires_g_idx or self.g_idx in module.entries):
            parts["g_idx"] = module.require(self.g_idx, ("I32", "I64"), (columns,))
        if self.shape:
            parts["shape"] = module.require(self.shape, ("I64", "I32"), (2,))
        return CodedWeight(f"{module.name}.weight", (rows, columns), parts, self)

    def decode(self, shape: Shape, tensors: Tensors, rows: slice) -> Tensor:
        """Decode `rows` of a weight of `shape`: [rows, columns] float32; FormatError if codes do not fit."""
        if "shape" in tensors and tensors["shape"].tolist() != [*shape]:
            raise FormatError(f"a {self.shape} is not {[*shape]}, as its codes are")
        codes, zeros = self._unpack(tensors, rows)
        scales = self._per_block(shape, tensors["scale"], rows)
        if "second_scale" in tensors:
            second = tensors["second_scale"].float().reshape(())
            scales = scales / second if self.divides else scales * second
        # integers of AutoRound have negative scales
        if self.dtype in ("F8_E4M3", "U8") and (scales < 0).any():
            raise FormatError("a scale of its floats is negative")
        if zeros is None and "zeros" in tensors:
            zeros = self._per_block(shape, tensors["zeros"], rows)
        groups = self._groups(shape[1], tensors.get("g_idx"))
        if groups is not None:
            scales = self._spread(scales, groups)
            zeros = None if zeros is None else self._spread(zeros, groups)
        codes = codes.reshape(len(codes), scales.shape[1], -1)
        codes = codes if zeros is None else codes - zeros.unsqueeze(2)
        return (codes * scales.unsqueeze(2)).flatten(1)

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        """Return rows and columns of a weight with codes [high, wide], and words of all rows' zero points."""
        return high, wide, 0

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        return tensors["codes"][rows].float(), None

    def _grid(self, shape: Shape) -> tuple[int, int]:
        """Return the numbers of blocks down and across."""
        (rows, columns), (block_rows, block_columns) = shape, self.block
        return -(-rows // (block_rows or rows)), -(-columns // (block_columns or columns))

    def _per_block(self, shape: Shape, values: Tensor, rows: slice) -> Tensor:
        """Take the scales or zero points of `rows`: [rows, blocks], or [1, blocks] for all rows."""
        down, across = self._grid(shape)
        values = values.t() if self.is_transposed else values.reshape(down, across)
        block_rows = self.block[0] or shape[0]
        values = scales_to_float(values[rows.start // block_rows : -(-rows.stop // block_rows)])
        if block_rows == 1 or down == 1:
            return values
        return values.repeat_interleave(block_rows, 0)[rows.start % block_rows :][: rows.stop - rows.start]

    def _spread(self, values: Tensor, groups: Tensor) -> Tensor:
        """Give each column its group's value: [rows, columns] of [rows, groups], in the order of memory."""
        return values.t()[groups].t() if self.is_transposed else values.index_select(1, groups)

    def _groups(self, columns: int, g_idx: Tensor | None) -> Tensor | None:
        """Return the group of each column, [columns]; None: groups of one size follow each other."""
        block_columns = self.block[1] or columns
        in_turn = torch.arange(columns) // block_columns
        groups = in_turn if g_idx is None else g_idx.long()
        if columns % block_columns == 0 and torch.equal(groups, in_turn):
            return None
        if groups.min() < 0 or groups.max() > in_turn[-1]:
            raise FormatError(f"its g_idx names a group beyond the {in_turn[-1] + 1} there are")
        return groups


@dataclass(frozen=True)
class Fp4Scheme(WeightScheme):
    """Two codes in a byte, the first in its lower half."""

    dtype: str = "U8"

    def _measure(self, module: ModuleTensors, high: int, wide: int) -> tuple[int, int, int]:
        return high, 2 * wide, 0

    def _unpack(self, tensors: Tensors, rows: slice) -> Codes:
        return unpack_fp4(tensors["codes"][rows]), None


# schemes that formats share
MXFP8 = WeightScheme((1, 32), scale_dtypes=E8M0)
MXFP4 = Fp4Scheme((1, 32), scale_dtypes=E8M0)
NVFP4 = Fp4Scheme((1, 16), scale_dtypes=("F8_E4M3",), second_scale="weight_scale_2")


@dataclass(frozen=True)
class WeightFormat:
    """The quantised weights of a model, as its config describes them."""

    label: str
    scheme: WeightScheme | None  # of modules that no pattern names
    patterns: tuple[tuple[str, WeightScheme], ...] = ()  # the first that fits a module's name
    codes: tuple[str, ...] = ("weight",)  # names of tensors, of which a quantised module has one

    def weights(self, module: ModuleTensors) -> Iterable[CodedWeight]:
        """Yield the weights that `module` holds as codes, by names, types and shapes alone."""
        entry = next((module.entries[name] for name in self.codes if name in module.entries), None)
        if entry is not None and entry.dtype in _CODES:
            yield self._scheme(module.name).weight(module)

    def _scheme(self, name: str) -> WeightScheme:
        named = (scheme for pattern, scheme in self.patterns if fnmatchcase(name, pattern))
        scheme = next(named, self.scheme)
        if scheme is None:
            raise FormatError(f"'{name}' holds codes, and its config does not name it")
        return scheme


def unpack_words(
    words: Tensor,
    bits: int,
    codes: slice,
    *,
    dim: int = 1,
    is_spaced: bool = False,
    shifts: Tensor | None = None,
) -> Tensor:
    """Unpack `codes` along `dim` of int32 `words` [rows, columns]: int32 [codes, columns] or [rows, codes].

    Code i, unsigned, begins at bit `i * bits`, counted from the lowest bit of the first word. A spaced word
    holds whole codes only and leaves its upper bits unused. `shifts` [codes per word] are the first bits of
    the codes in a word, if these have another order.
    """
    mask = (1 << bits) - 1
    if is_spaced or 32 % bits == 0:
        per_word = 32 // bits
        first = codes.start // per_word
        words = words.narrow(dim, first, -(-codes.stop // per_word) - first)
        shifts = torch.arange(per_word, dtype=torch.int32) * bits if shifts is None else shifts
        values = (words.unsqueeze(dim + 1) >> (shifts if dim else shifts[:, None])) & mask
        start = codes.start - first * per_word
        return values.flatten(dim, dim + 1).narrow(dim, start, codes.stop - codes.start)
    begin = torch.arange(codes.start, codes.stop) * bits
    word, shift = begin // 32, begin % 32 if dim else (begin % 32)[:, None]
    wide = words.long() & 0xFFFFFFFF
    upper = wide.index_select(dim, (word + 1).clamp(max=words.shape[dim] - 1)) << (32 - shift)
    return (((wide.index_select(dim, word) >> shift) | upper) & mask).int()


def count_words(count: int, bits: int, *, is_spaced: bool = False) -> int:
    """Return the number of int32 words that hold `count` codes."""
    return -(-count // (32 // bits)) if is_spaced else -(-count * bits // 32)


def scales_to_float(scales: Tensor) -> Tensor:
    """Return scales of any shape as float32; uint8 holds powers of two (E8M0), of which 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack FP4 E2M1, the first of two in the lower half of a byte: uint8 [..., n] to float32 [..., 2n]."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()]
