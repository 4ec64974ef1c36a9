"""Scale tensors and `kv_cache_scales.json`, read as any tool may have written them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calib.errors import InputError, first_problem
from calib.files.names import ScaleName, parse_scale_name
from calib.files.safetensors_header import Entry, read_values
from calib.files.strict_json import read_object

_Index = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]


@dataclass(frozen=True)
class ScaleTensor:
    """A scale tensor of a safetensors file."""

    name: str
    parsed: ScaleName
    file: str
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]
    values: tuple[float, ...]


def read_scale_tensors(path: Path, header: Mapping[str, Entry]) -> list[ScaleTensor]:
    """Read the KV-cache scales of the safetensors file `path`, and no other tensor."""
    return [
        ScaleTensor(name, parsed, path.name, entry.dtype, entry.shape, tuple(read_values(path, entry)))
        for name, entry in header.items()
        if (parsed := parse_scale_name(name))
    ]


class _KVCache(BaseModel):
    model_config = ConfigDict(strict=True)
    scaling_factor: dict[_Index, dict[_Index, float]]  # rank -> layer -> scale
    dtype: Any = None


class ScalesJson(BaseModel):
    """`kv_cache_scales.json`, by `quantization/schema.py` of vLLM 0.4 to 0.6."""

    kv_cache: _KVCache
    model_type: Any = None

    @property
    def dtype(self) -> str | None:
        """The FP8 type of the scales, where the file names one."""
        return self.kv_cache.dtype if isinstance(self.kv_cache.dtype, str) else None

    @cached_property
    def ranks(self) -> dict[int, dict[int, float]]:
        """The scale of each layer, for both K and V, by rank."""
        factors = self.kv_cache.scaling_factor.items()
        return {int(rank): {int(i): x for i, x in layers.items()} for rank, layers in factors}

    @cached_property
    def layer_scales(self) -> dict[int, float]:
        """The scale of each layer for all ranks, which hold different heads: the largest."""
        largest: dict[int, float] = {}
        for layers in self.ranks.values():
            largest |= {index: max(scale, largest.get(index, scale)) for index, scale in layers.items()}
        return largest


def read_scales_json(path: Path) -> ScalesJson:
    """Read the file; InputError unless it holds numbers by rank and layer."""
    try:
        return ScalesJson.model_validate(read_object(path))
    except ValidationError as error:
        raise InputError(f"'{path}': {first_problem(error)}; scales lie by rank and layer") from None
