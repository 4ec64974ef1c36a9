"""Whether config.json is of a model that engines start, and of the one that the weights are of."""

from typing import Any

from calib.engines.catalogue import Engine
from calib.engines.outcome import NotKnown, Refused
from calib.files.config import LAYER_KEYS
from calib.files.model_directory import ModelDirectory

_COUNTS = (*LAYER_KEYS, "num_attention_heads", "num_key_value_heads")


def check_model(directory: ModelDirectory, rules: Engine) -> None:
    """Raise what becomes of a directory whose config is no model's, or not that of its weights."""
    if not directory.has_config:
        return
    if wrong := _no_model(directory):
        raise Refused(wrong) if rules.ran else NotKnown(f"not known: {wrong}")
    count = directory.num_layers
    layers = {layer for layer in directory.layers if not directory.predicts_extra_tokens(layer)}
    if not layers or count is None:
        return
    said = f"config.json says {count} layers"
    if len(layers) < count:
        raise NotKnown(f"not known: {said}, and there are weights of {len(layers)}")
    if max(layers) >= count:
        wrong = f"{said}, and there are weights of layer {max(layers)}"
        raise Refused(wrong) if rules.unknown == "refused" else NotKnown(f"not known: {wrong}")


def _no_model(directory: ModelDirectory) -> str | None:
    """Which field of the config no engine starts with."""
    model_type = directory.config.get("model_type")
    if not (isinstance(model_type, str) and model_type):
        return "config.json has no model_type"
    config = directory.text_config
    wrong = (key for key in _COUNTS if key in config and _is_no_count(config[key], key))
    key = next(wrong, None)
    return key and f"config.json says {key} {str(config[key])[:40]}"


def _is_no_count(value: Any, key: str) -> bool:
    if value is None:
        return key == "num_hidden_layers"  # others have another name, or follow from it
    if isinstance(value, list):
        return key in LAYER_KEYS  # others may differ from layer to layer
    return type(value) is not int or value < 1
