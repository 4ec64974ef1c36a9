"""Which model the files of a directory are of, as far as they say, and whether two are the same."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.files.names import CALIBRATION_FILE, CONFIG_FILE, JSON_FILE, PACK_FILE
from calib.files.strict_json import read_object

# of the language model, where configs of one type differ between models
_SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head"),
)

Identity = Mapping[str, Any]  # a config.json, or the part of it that is known


def identity(directory: Path) -> Identity:
    """What a directory says of its model: its config.json, or what its scales' own files repeat."""
    is_pack = (directory / PACK_FILE).exists()  # whose manifest names no config.json
    if (directory / CONFIG_FILE).is_file() and not is_pack:
        return read_object(directory / CONFIG_FILE)
    if (directory / CALIBRATION_FILE).is_file():
        said = read_object(directory / CALIBRATION_FILE).get("config")
        return said if isinstance(said, dict) else {}
    if (directory / JSON_FILE).is_file():
        return {"model_type": read_object(directory / JSON_FILE).get("model_type")}
    return {}


def summary(config: Identity) -> dict[str, Any]:
    """The part of a config that tells models apart, to be kept with a calibration."""
    kept = {"architectures", "model_type", *_SIZES}
    found = {key: value for key, value in config.items() if key in kept}
    text = config.get("text_config")
    return found | ({"text_config": summary(text)} if isinstance(text, dict) else {})


def check_same_model(given: Path, said: Identity, model: Path, config: Identity) -> None:
    """Refuse `given` if it and `model` are known to be of different models."""
    for theirs, own in differences(said, config):
        raise InputError(f"'{given}' is of another model: its config says {theirs}, that of '{model}' {own}")


def differences(one: Identity, other: Identity) -> Iterator[tuple[str, str]]:
    """What two configs say that one model cannot have both of."""
    types, others = _types(one), _types(other)
    nested = len(types) == len(others) == 2
    # an image model's language model is served alone, too
    same = types[-1:] == others[-1:] if nested else {*types} & {*others}
    if types and others and not same:
        yield f"model_type {types[-1]}", f"{others[-1]}"
    named, others_named = one.get("architectures"), other.get("architectures")
    if not (types and others) and named and others_named and named != others_named:
        yield f"architectures {str(named)[:80]}", str(others_named)[:80]
    text, others_text = _language(one), _language(other)
    for key in _SIZES:
        size, wanted = text.get(key), others_text.get(key)
        if type(size) is type(wanted) is int and size != wanted:
            yield f"{key} {size}", str(wanted)


def _language(config: Identity) -> Identity:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _types(config: Identity) -> list[str]:
    """The model's type and, where it has more parts, its language model's."""
    said = [config.get("model_type")]
    if isinstance(config.get("text_config"), dict):
        said.append(config["text_config"].get("model_type"))
    return [str(each)[:80] for each in said if isinstance(each, str)]
