"""Configs of models whose config class is their publisher's own, and so not in transformers."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# of a config, the dictionaries that are configs
PARTS = ("text_config", "llm_config", "vision_config", "audio_config")


def register(model_type: str) -> None:
    """Read a config whose class is its publisher's own as a plain one with the same fields."""
    if model_type not in CONFIG_MAPPING:
        fields = {"model_type": model_type, "__init__": set_fields}
        AutoConfig.register(model_type, type("PlainConfig", (PretrainedConfig,), fields))


def set_fields(self: PretrainedConfig, **fields: Any) -> None:
    """Set any fields; a part of the model has a config of its own."""
    PretrainedConfig.__init__(self, **{name: readable(name, value) for name, value in fields.items()})


def readable(name: str, value: Any) -> Any:
    """Make a part's dictionary a config, and give dictionaries in a list attributes."""
    if isinstance(value, list):
        return [Fields(one) if isinstance(one, dict) else one for one in value]
    if isinstance(value, dict) and name in PARTS:
        has_class = value.get("model_type") in CONFIG_MAPPING
        return AutoConfig.for_model(**value) if has_class else PretrainedConfig(**value)
    return value


class Fields(dict[str, Any]):
    """A dictionary whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Fields(value) if isinstance(value, dict) else value
