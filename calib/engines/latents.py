"""What serves latents (MLA) at scale 1.0, which is right for a baked model."""

from collections.abc import Mapping
from typing import Any

from calib.caches.types import cache_type
from calib.engines.catalogue import Engine
from calib.engines.classes import TRANSFORMERS, architecture
from calib.engines.outcome import NotKnown, Refused


def flags_at_one(rules: Engine, config: Mapping[str, Any]) -> str:
    """The flags with which the engine keeps a model's latents in FP8 at scale 1.0.

    Raises:
        Refused: it has no such cache.
        NotKnown: or whether it has is not known, as it may cache K and V of heads.
    """
    if rules.latent_refused:
        raise Refused(rules.latent_refused)
    name, text = architecture(config), config.get("text_config")
    if name in rules.latent_one:
        return rules.flag
    model_type = (text if isinstance(text, dict) else config).get("model_type")
    if rules.is_of_classes:
        if rules.class_caches_latents(config) or _is_listed(rules, model_type):
            return rules.flag
        results = rules.classes.results.get(name or "", {}) if rules.classes else {}
        if any(kind.endswith(TRANSFORMERS) for kind in results):
            return f"{rules.transformers_flag} {rules.flag}"
    named = str(name or model_type)[:80]
    raise NotKnown(f"whether it caches latents (MLA) of {named}, as 1.0 needs, is not known")


def known_flags(rules: Engine, config: Mapping[str, Any]) -> str | None:
    """As `flags_at_one`; None where it raises."""
    try:
        return flags_at_one(rules, config)
    except (Refused, NotKnown):
        return None


def _is_listed(rules: Engine, model_type: object) -> bool:
    """Whether the engine is known to cache latents of that type, whose class was not run."""
    return any(
        model_type in serving.models
        for serving in cache_type("fp8").servings
        if serving.engine == rules.name and serving.models and "heads" not in serving.of
    )
