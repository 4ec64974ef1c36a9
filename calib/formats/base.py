"""A value of `--format`, and what an export in that format adds to a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from calib.choices import FP8Name, Strategy
from calib.engines.catalogue import Engine
from calib.files.model_directory import ModelDirectory
from calib.formats.refusals import WayOut
from calib.scales.scales import KVScales, LayerScales


@dataclass(frozen=True)
class ScaledModel:
    """Scales, the checkpoint that they are of, and the engine that they are for."""

    scales: KVScales
    checkpoint: ModelDirectory
    engine: Engine
    tp_size: int = 1

    @cached_property
    def layers(self) -> dict[str, LayerScales]:
        """The scales of all modules that engines ask about, by prefix of their names on disk."""
        layers = self.scales.expand_shared().items()
        return {self.checkpoint.attention_prefix(module): layer for module, layer in layers}


@dataclass(frozen=True)
class Export:
    """Additions to the source's own files in an output directory."""

    # of the extra shard: float32 [1] or [heads, 1, 1], by name
    tensors: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # the new config.json; None leaves the source's
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)  # file name -> JSON
    notes: tuple[str, ...] = ()  # what the user must know about this very export
    doubts: tuple[str, ...] = ()  # whether the engine loads it
    flags: str = ""  # that serving needs besides


@dataclass(frozen=True)
class Format:
    """A value of `--format`: how it is built, and what it can hold."""

    engine: str  # in words
    build: Callable[[ScaledModel], Export] | None  # None: all is in the statistics and the recipe
    rules: Engine | None
    serve: str  # the launch command; {path} stands for the output directory
    strategies: tuple[Strategy, ...] = ("tensor",)
    fp8_dtypes: tuple[FP8Name, ...] = ("e4m3fn",)
    reads_q: bool = False
    reads_center: bool = False  # of K
    with_weights: bool = True
    nvfp4: bool = False  # the values of an NVFP4 cache, not FP8 scales
    over_written: float = 1.0  # FP8's scale over the value that is written
    per_head_flags: str = ""  # appended to `serve` for strategy attn_head
    skip_flag: str = ""  # keeps the layers that follow it in 16 bits
    note: str = ""  # what the engine does with the file, where that may surprise
    per_head_note: str = ""  # and with a scale per head
    latent: str = ""  # why it holds no scales of latents (MLA)
    latent_ways: tuple[WayOut | str, ...] = ()  # what serves these instead

    def note_on(self, strategy: Strategy) -> str:
        """Return what may surprise of scales of `strategy` in this format; "" if nothing does."""
        notes = (self.note, self.per_head_note * (strategy == "attn_head"))
        return "; ".join(filter(None, notes))
