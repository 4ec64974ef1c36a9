"""`kv_cache_scales.json` as it lies there: one scale of K and V per rank and layer.

Format: vLLM 0.4 to 0.6, `quantization/schema.py`.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calib.errors import InputError
from calib.scalefiles.json import read_object

_Index = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]


class _Cache(BaseModel):
    model_config = ConfigDict(strict=True)
    scaling_factor: dict[_Index, dict[_Index, float]]  # rank -> layer -> scale
    dtype: Any = None


class ScalesJson(BaseModel):
    """The file."""

    kv_cache: _Cache
    model_type: Any = None

    @property
    def dtype(self) -> str | None:
        """What FP8 type it is for, where it says so."""
        return self.kv_cache.dtype if isinstance(self.kv_cache.dtype, str) else None

    @cached_property
    def ranks(self) -> dict[int, dict[int, float]]:
        """The scale of each layer, by rank."""
        factors = self.kv_cache.scaling_factor.items()
        return {int(rank): {int(i): x for i, x in layers.items()} for rank, layers in factors}


def read_scales_json(path: Path) -> ScalesJson:
    """Read the file; an InputError if it holds no numbers by rank and layer."""
    try:
        return ScalesJson.model_validate(read_object(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        raise InputError(
            f"'{path}': {place}: {first['msg']}; scales lie by rank and layer"
        ) from None
