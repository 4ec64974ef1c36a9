"""What formats share: what an exporter is and makes, and names of modules in the checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from calib.choices import FP8Name, Strategy
from calib.errors import UnsupportedExportError
from calib.model.checkpoint import Checkpoint
from calib.scales.scales import KVScales, LayerScales
from calib.verify.classes import NAMES, architecture
from calib.verify.rules import Rules

# layers, index and the attention module itself must agree
_TAIL = 3


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


def loaded_name(
    rules: Rules, scales: KVScales, checkpoint: Checkpoint, kind: str, usual: str
) -> tuple[str, tuple[str, ...]]:
    """The name under which the engine loads scales of this model with a `kind` of config; notes.

    Where the class was never run, it is the usual name. A note says so, and where the class was
    never run with attention modules called as in this checkpoint.

    Raises:
        UnsupportedExportError: the class loads them under no name.
    """
    fates = rules.fates(checkpoint.config, kind)
    known = rules.fates(checkpoint.config, kind, by_prefix(scales, checkpoint))
    unsure = f"whether {rules.engine} loads these scales is {known}"
    notes = (unsure,) if isinstance(known, str) else ()
    if fates is None or isinstance(fates, str):
        return usual, notes
    for name in (usual, *NAMES):
        if fates.get(name) == "loaded":
            return name, notes
    raise UnsupportedExportError(
        f"{rules.engine}'s class {architecture(checkpoint.config)} loads no KV scales under "
        f"{kind} ({fates.get(usual, 'never run')}), so it would compute with 1.0. Use another "
        f"format, see docs/engines.md, or --format fp8kv for the bundled runtime"
    )


def by_prefix(scales: KVScales, checkpoint: Checkpoint) -> dict[str, LayerScales]:
    """The scales of all modules that engines ask about, by prefix of their names on disk."""
    layers = scales.with_shared().items()
    return {checkpoint_prefix(module, checkpoint): layer for module, layer in layers}


def checkpoint_prefix(module: str, checkpoint: Checkpoint) -> str:
    """Find the prefix of an attention module's tensors in the checkpoint.

    The two differ where transformers renames on load: `model.language_model.layers.0.self_attn`
    for `language_model.model.layers.0.self_attn`. The prefix must end as the module does and share
    the most name parts with it, so that a vision tower's layer 0 is never taken for the text's.
    """
    prefixes = _prefixes(checkpoint)
    if module in prefixes:
        return module
    ranked = sorted(((_likeness(module, prefix), prefix) for prefix in prefixes), reverse=True)
    if not ranked or ranked[0][0][0] < _TAIL or ranked[0][0] == ranked[min(1, len(ranked) - 1)][0]:
        raise UnsupportedExportError(
            f"cannot tell which tensors of '{checkpoint.path}' belong to {module}; "
            "its names match no layer of the loaded model"
        )
    return ranked[0][1]


def _prefixes(checkpoint: Checkpoint) -> set[str]:
    # k_proj.weight and the like: the attention module is two levels above the tensor
    return {name.rsplit(".", 2)[0] for name in checkpoint.weight_map if name.count(".") >= _TAIL}


def _likeness(module: str, prefix: str) -> tuple[int, int]:
    parts, others = module.split("."), prefix.split(".")
    tail = 0
    while tail < min(len(parts), len(others)) and parts[-1 - tail] == others[-1 - tail]:
        tail += 1
    return tail, len(set(parts) & set(others))
