"""Latents (MLA): what becomes of their scales in an engine, and what serves them at scale 1.0."""

from collections.abc import Mapping
from typing import Any

from calib.engines.catalogue import Engine
from calib.engines.model_classes import TRANSFORMERS, Fates, architecture, split_name
from calib.engines.outcome import NotKnown, Refused, Simulation, SimulationEnd
from calib.engines.quantization_config import method_name
from calib.files.model_directory import ModelDirectory


def transformers_fates(directory: ModelDirectory, engine: Engine, fates: Fates) -> Fates | None:
    """Return the fates in the engine's backend for transformers' code, where it alone loads all scales."""
    backend_fates = engine.fates(directory.config, method_name(directory) + TRANSFORMERS)
    if not engine.class_caches_latents(directory.config) or isinstance(backend_fates, str | None):
        return None
    names = {split_name(tensor, directory.modules)[1] for tensor in directory.tensors}
    own, backend = ({table.get(name) for name in names} for table in (fates, backend_fates))
    return backend_fates if backend == {"loaded"} != own else None


def latents_problem(simulation: Simulation, config: Mapping[str, Any]) -> str | None:
    """Say what is wrong with loaded scales of latents; 1.0 does no harm."""
    engine = simulation.engine
    is_harmless = all(value == 1.0 for scale in simulation.outcomes for value in scale.values)
    if is_harmless or not (engine.latent_spoils and engine.class_caches_latents(config)):
        return None
    return f"{engine.latent}; fp8kv strip removes them, fp8kv bake makes 1.0 right"


def flags_at_one(engine: Engine, config: Mapping[str, Any]) -> str:
    """Return the flags with which the engine keeps a model's latents in FP8 at scale 1.0.

    Raises:
        Refused: it has no such cache.
        NotKnown: or whether it has is not known, as it may cache K and V of heads.
    """
    if engine.latent_refused:
        raise Refused(engine.latent_refused)
    name, text = architecture(config), config.get("text_config")
    if name in engine.latent_one:
        return engine.flag
    model_type = (text if isinstance(text, dict) else config).get("model_type")
    if engine.classes and engine.is_run_version:
        if engine.class_caches_latents(config) or _is_served_as_latents(engine, model_type):
            return engine.flag
        if any(kind.endswith(TRANSFORMERS) for kind in engine.classes.results.get(name or "", {})):
            return f"{engine.transformers_flag} {engine.flag}"
    subject = str(name or model_type)[:80]
    raise NotKnown(f"whether it caches latents (MLA) of {subject}, as 1.0 needs, is not known")


def find_flags_at_one(engine: Engine, config: Mapping[str, Any]) -> str | None:
    """Return `flags_at_one`, or None where it raises."""
    try:
        return flags_at_one(engine, config)
    except SimulationEnd:
        return None


def _is_served_as_latents(engine: Engine, model_type: object) -> bool:
    """Return whether the engine is known to cache latents of that type, whose class was not run."""
    ways = (way for way in engine.caches.types.get("fp8", ()) if way.models and "heads" not in way.attention)
    return any(model_type in (way.models or ()) for way in ways)
