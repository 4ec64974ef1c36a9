"""What formats share: what an exporter is and makes, and names of modules in the checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from calib.choices import FP8Name, Strategy
from calib.engines.catalogue import Engine, find_engine
from calib.engines.classes import NAMES, OTHER, architecture
from calib.errors import UnsupportedExportError
from calib.files.config import quantization_configs
from calib.files.model_directory import ModelDirectory
from calib.scales.scales import KVScales, LayerScales

BAKE = "fp8kv bake after fp8kv calibrate --format fp8kv"  # where an engine loads nothing


@dataclass(frozen=True)
class Export:
    """Additions to the source's own files in an output directory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # the extra shard
    config: dict[str, Any] | None = None  # the new config.json; None leaves the source's
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)  # file name -> JSON
    notes: tuple[str, ...] = ()  # what the user must know about this very export
    doubts: tuple[str, ...] = ()  # whether the engine loads it
    flags: str = ""  # that serving needs besides


Build = Callable[[KVScales, ModelDirectory, int], Export]  # (scales, source, tp_size)


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
    nvfp4: bool = False  # the values of an NVFP4 cache, not FP8 scales
    over_written: float = 1.0  # FP8's scale over the value that is written
    per_head_flags: str = ""  # appended to `serve` for strategy attn_head
    note: str = ""  # what the engine does with the file, where that may surprise
    latent: str = ""  # why it holds no scales of latents (MLA), and the way out


def loaded_name(
    rules: Engine, scales: KVScales, checkpoint: ModelDirectory, kind: str, usual: str
) -> tuple[str, tuple[str, ...]]:
    """The name under which the engine loads scales of this model with a `kind` of config; doubts.

    Where the class was never run, it is the usual name. A doubt says so, and where the class was
    never run with attention modules called as in this checkpoint.

    Raises:
        UnsupportedExportError: the class loads them under no name.
    """
    fates = rules.fates(checkpoint.config, kind)
    known = rules.fates(checkpoint.config, kind, by_prefix(scales, checkpoint))
    unsure = f"whether {rules.engine} loads these scales is {known}"
    doubts = (unsure,) if isinstance(known, str) else ()
    if fates is None or isinstance(fates, str):
        return usual, doubts
    for name in (usual, *NAMES):
        if fates.get(name) == "loaded":
            return name, doubts
    fate = fates.get(usual, "never run")
    raise UnsupportedExportError(
        f"{rules.engine}'s class {architecture(checkpoint.config)} loads no KV scales under "
        f"{kind} ({fate}), so it would {_effect(fate)}. "
        f"Use {''.join(_other_engines(checkpoint, kind))}--format fp8kv for the bundled runtime"
    )


def latents_name(
    rules: Engine, modules: Iterable[str], checkpoint: ModelDirectory, kind: str, usual: str
) -> tuple[str, str]:
    """The name under which the engine loads scales of latents (MLA), and the flag that it needs.

    `modules` are attention modules, as the checkpoint names them.

    Raises:
        UnsupportedExportError: under none, or that is not known.
    """
    # whether the backend for transformers' code attends to what an indexer chooses is not known
    is_sparse = "index_topk" in checkpoint.text_config
    if not is_sparse and rules.class_caches_latents(checkpoint.config):
        for flag, suffix in (("", ""), (rules.other_flag, OTHER)):
            found = rules.fates(checkpoint.config, kind + suffix, [*modules])
            fates = found if isinstance(found, Mapping) else {}
            name = next((name for name in (usual, *NAMES) if fates.get(name) == "loaded"), None)
            if name is not None:
                return name, flag
    raise UnsupportedExportError(
        f"whether {rules.engine} loads {'and uses ' * is_sparse}scales of latents (MLA) of "
        f"{architecture(checkpoint.config)} is not known"
        f"{', as its attention is sparse' * is_sparse or ', or it caches K and V in their place'}. "
        f"Use {BAKE}"
    )


def _effect(fate: str) -> str:
    """What an engine does with scales that it does not load."""
    if fate.startswith(("crash", "refused")):
        return "not start"
    return "keep a 16-bit cache" if "16 bits" in fate else "compute with 1.0"


def _other_engines(checkpoint: ModelDirectory, kind: str) -> Iterator[str]:
    """The engines whose class of this model loads scales, by their formats."""
    quantized = quantization_configs(checkpoint.config)
    kind = kind.removesuffix(" attn_head") if quantized else "compressed-tensors"
    for name in ("vllm", "sglang"):
        rules = find_engine(name)
        fates = rules.fates(checkpoint.config, kind)
        if isinstance(fates, Mapping) and "loaded" in map(fates.get, NAMES):
            yield f"--format {name} for {rules.engine}, or "


def by_prefix(scales: KVScales, checkpoint: ModelDirectory) -> dict[str, LayerScales]:
    """The scales of all modules that engines ask about, by prefix of their names on disk."""
    layers = scales.expand_shared().items()
    return {checkpoint.attention_prefix(module): layer for module, layer in layers}
