"""Marks as data, and as JSON in a calibration's file."""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from calib.errors import InputError

PROBES = 64  # fixed inputs that every sampled row is multiplied with


@dataclass(frozen=True)
class Mark:
    """What a tensor gives for the fixed inputs: of a matrix a few rows, of a vector itself."""

    shape: tuple[int, ...]  # of the tensor
    bits: int  # of a stored value, 16 for floats of any size
    values: Tensor  # [sampled rows, PROBES] float32, finite


@dataclass(frozen=True)
class Marks:
    """Marks of a language model's tensors, by their names below it: `layers.0.mlp.up_proj...`."""

    layers: int
    tensors: Mapping[str, Mark]
    settings: Mapping[str, Any]  # of the config, by which one set of weights gives another K and V

    def to_json(self) -> dict[str, Any]:
        """The object that a calibration keeps; values are bfloat16 in base 64."""
        tensors = {
            name: {"shape": [*mark.shape], "bits": mark.bits, "values": _encode(mark.values)}
            for name, mark in self.tensors.items()
        }
        settings = dict(self.settings)
        return {"version": 3, "layers": self.layers, "settings": settings, "tensors": tensors}

    @classmethod
    def from_json(cls, document: Any, where: str) -> "Marks":
        """Read `document`; `where` names it in an InputError."""
        try:
            found = _Marks.model_validate(document)
            tensors = {
                name: Mark(tuple(mark.shape), mark.bits, _decode(mark.values))
                for name, mark in found.tensors.items()
            }
        except (ValidationError, Base64Error, ValueError) as error:
            reason = _reason(error)[:200]
            raise InputError(f"the marks in {where} are damaged ({reason})") from None
        return cls(found.layers, tensors, found.settings)


class _Mark(BaseModel):
    model_config = ConfigDict(strict=True)
    shape: list[int] = Field(min_length=1, max_length=2)
    bits: int = Field(ge=1, le=16)
    values: str


class _Marks(BaseModel):
    model_config = ConfigDict(strict=True)
    version: Literal[3]
    layers: int = Field(ge=1)
    settings: dict[str, Any]
    tensors: dict[str, _Mark]


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors()[0]
    return f"{'.'.join(str(part)[:80] for part in first['loc'])}: {first['msg']}"


def _encode(values: Tensor) -> str:
    return b64encode(values.bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()).decode()


def _decode(text: str) -> Tensor:
    codes = np.frombuffer(b64decode(text, validate=True), "<i2").astype(np.int16)
    values = torch.from_numpy(codes).view(torch.bfloat16).float().view(-1, PROBES)
    if not (values.numel() and values.isfinite().all()):
        raise ValueError("a mark is empty, or not finite")
    return values
