"""Names of scale tensors: those under which an engine's class of a model loads scales."""

from collections.abc import Iterable, Iterator, Mapping

from calib.engines.catalogue import Engine, find_engine
from calib.engines.model_classes import NAMES, TRANSFORMERS, architecture
from calib.files.config import quantization_configs
from calib.files.model_directory import ModelDirectory
from calib.formats.base import BAKE, FormatRefusal, ScaledModel, WayOut

PLAIN_NAME, _, MODELOPT_NAME = NAMES


def name_for_class(model: ScaledModel, kind: str, usual: str = PLAIN_NAME) -> tuple[str, tuple[str, ...]]:
    """Return the name under which the engine loads scales with a `kind` of quantization config; doubts.

    The usual name is for a class that was never run. A doubt says so, and where the class was never run
    with attention modules called as in this checkpoint. FormatRefusal where it loads them under no name.
    """
    engine, config = model.engine, model.checkpoint.config
    fates, fates_of_modules = engine.fates(config, kind), engine.fates(config, kind, model.layers)
    doubt = f"whether {engine.engine} loads these scales is {fates_of_modules}"
    doubts = (doubt,) if isinstance(fates_of_modules, str) else ()
    if fates is None or isinstance(fates, str):
        return usual, doubts
    for name in (usual, *NAMES):
        if fates.get(name) == "loaded":
            return name, doubts
    fate = fates.get(usual, "never run")
    effect = "keep a 16-bit cache" if "16 bits" in fate else "compute with 1.0"
    if fate.startswith(("crash", "refused")):
        effect = "not start"
    raise FormatRefusal(
        f"{engine.engine}'s class {architecture(config)} loads no KV scales under {kind} ({fate}), "
        f"so it would {effect}",
        *_formats_that_load(model.checkpoint, kind),
        WayOut("format", ("fp8kv",), " for the bundled runtime"),
    )


def _formats_that_load(checkpoint: ModelDirectory, kind: str) -> Iterator[WayOut]:
    """Yield the formats of engines whose class of this model loads scales."""
    is_quantized = bool(quantization_configs(checkpoint.config))
    kind = kind.removesuffix(" attn_head") if is_quantized else "compressed-tensors"
    for engine in map(find_engine, ("vllm", "sglang")):
        fates = engine.fates(checkpoint.config, kind)
        if isinstance(fates, Mapping) and "loaded" in map(fates.get, NAMES):
            yield WayOut("format", (engine.name,), f" for {engine.engine}")


def name_for_latents(engine: Engine, modules: Iterable[str], checkpoint: ModelDirectory) -> tuple[str, str]:
    """Return the name under which the engine loads scales of latents (MLA), and the flag that it needs.

    `modules` are attention modules, as the checkpoint names them. FormatRefusal where no name, or none that
    is known, is loaded.
    """
    # whether the backend for transformers' code attends to what an indexer chooses is not known
    is_sparse = "index_topk" in checkpoint.text_config
    if not is_sparse and engine.class_caches_latents(checkpoint.config):
        for flag, backend in (("", ""), (engine.transformers_flag, TRANSFORMERS)):
            fates = engine.fates(checkpoint.config, f"modelopt{backend}", [*modules])
            for name in (MODELOPT_NAME, *NAMES):
                if isinstance(fates, Mapping) and fates.get(name) == "loaded":
                    return name, flag
    verb, reason = "loads", "or it caches K and V in their place"
    if is_sparse:
        verb, reason = "loads and uses", "as its attention is sparse"
    raise FormatRefusal(
        f"whether {engine.engine} {verb} scales of latents (MLA) of {architecture(checkpoint.config)} "
        f"is not known, {reason}",
        BAKE,
    )
