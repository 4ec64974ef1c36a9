"""Exporters: functions from scales to the tensors, config and documents of a format."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from calib.choices import FP8Name, Strategy
from calib.model.checkpoint import Checkpoint
from calib.scales.scales import KVScales


@dataclass(frozen=True)
class Export:
    """Additions to the source's own files in an output directory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # the extra shard
    config: dict[str, Any] | None = None  # the new config.json; None leaves the source's
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)  # file name -> JSON
    notes: tuple[str, ...] = ()  # what the user must know about this very export


Build = Callable[[KVScales, Checkpoint, int], Export]  # (scales, source, tp_size)


@dataclass(frozen=True)
class Format:
    """One value of `--format`."""

    engine: str
    build: Build
    serve: str  # the launch command; {path} stands for the output directory
    strategies: tuple[Strategy, ...] = ("tensor",)
    fp8_dtypes: tuple[FP8Name, ...] = ("e4m3fn",)
    reads_q: bool = False
    reads_center: bool = False  # of K
    with_weights: bool = True
    per_head_flags: str = ""  # appended to `serve` for strategy attn_head
    note: str = ""  # what the engine does with the file, where that may surprise
