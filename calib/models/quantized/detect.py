"""Quantised weights, found by config, type and name; refused unless we or transformers decode them.

transformers loads codes as if they were weights where it does not know the `quant_method`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from calib.errors import InputError
from calib.files.config import quantization_configs
from calib.files.model_directory import ModelDirectory
from calib.files.names import MODELOPT_FILE, is_of_cache, is_of_tower
from calib.files.safetensors_header import read_values
from calib.models.quantized import WEIGHT_FORMATS
from calib.models.quantized.coded_weight import WeightFormat
from calib.models.quantized.config import ADVICE, QuantizationConfig, name_subject

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# places that transformers reads, too
_SHARED_PLACES = ("quantization_config", "text_config.quantization_config")
_IN_LAYER = re.compile(r"(?:[^.\d][^.]*\.)*\d{1,6}\.")
# the end of a name: of ModelOpt, compressed-tensors, GPTQ, AWQ, bitsandbytes, HQQ, AQLM, MXFP4 ...
_SCALE_OR_CODE = re.compile(
    r"\.(?:(?!layer_|logit_)(?:\w+_)?scales?(?:_inv|_\d)?|(?:\w+_)?zero_points?|\w+_blocks"
    r"|qweight|qzeros|g_idx|weight_(?:packed|shape|format)|SCB|W_q|codes|codebooks"
    r"|(?:nested_)?(?:absmax|quant_map)|quant_state\..+|_data|_scale)$"
)


def is_for_cache_only(config: dict[str, Any]) -> bool:
    """Return whether a quantization config is about the KV cache alone, or about nothing at all."""
    nested = config.get("quantization")
    config = {**config, **(nested if isinstance(nested, dict) else {})}
    method, groups = config.get("quant_method"), config.get("config_groups") or {}
    if method == "modelopt" and ["*"] in (config.get("ignore"), config.get("exclude_modules")):
        return True
    if any(config.get(key) for key in ("quant_algo", "quantized_layers", "transform_config")):
        return False
    is_attention = isinstance(groups, dict) and all(map(targets_attention, groups.values()))
    return method in ("modelopt", "compressed-tensors") and is_attention


def targets_attention(group: Any) -> bool:
    """Return whether a group of compressed-tensors, such as llm-compressor's, is about Q, K and V."""
    targets = group.get("targets") if isinstance(group, dict) else None
    return isinstance(targets, list) and targets != [] and all(str(t).endswith("Attention") for t in targets)


def read_formats(directory: ModelDirectory) -> set[WeightFormat | None]:
    """Return the format of codes that the configs name, none or one; None: transformers decodes them.

    InputError for formats that nothing reads, and for configs that contradict each other.
    """
    configs = dict(quantization_configs(directory.config))
    if (compression := configs.get("compression_config")) is not None:
        configs["compression_config"] = {"quant_method": "compressed-tensors", **compression}
    if directory.modelopt is not None:
        configs[MODELOPT_FILE] = {"quant_method": "modelopt", **directory.modelopt}
    configs = {place: config for place, config in configs.items() if not is_for_cache_only(config)}
    formats = {_read_format(directory, place, config) for place, config in configs.items()}
    if len(formats) > 1:
        raise InputError(
            f"the weights of '{directory.path}' are quantised in one way by {next(iter(configs))} "
            "and in another by a second config; take away whichever is not the model's"
        )
    return formats


def _read_format(directory: ModelDirectory, place: str, config: dict[str, Any]) -> WeightFormat | None:
    """Read a quantization config; None: transformers decodes such weights."""
    method = config.get("quant_method")
    tool = f"by '{method}'" if method else "without a quant_method"
    subject = f"the weights of '{directory.path}' are quantised {tool} ({place})"
    read = WEIGHT_FORMATS.get(method) if isinstance(method, str) else None
    if read and (place != "compression_config" or method == "compressed-tensors"):
        with name_subject(subject):
            return read(QuantizationConfig(config))
    if place in _SHARED_PLACES:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        has_flag = config.get("load_in_8bit") or config.get("load_in_4bit")
        if method in ((None, "bitsandbytes") if has_flag else tuple(AUTO_QUANTIZATION_CONFIG_MAPPING)):
            return None
    raise InputError(f"{subject}, {ADVICE}")


def unused_codes(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are of scales or codes: beside a matrix of `model`, and not in it."""
    state = model.state_dict()
    matrices = [name for name, weight in state.items() if weight.dim() > 1]
    owners = {*(name.removesuffix("weight") for name in matrices), *(f"{name}." for name in matrices)}
    ends = {name: _SCALE_OR_CODE.search(name) for name in names if name not in state}
    return [name for name, end in ends.items() if end and name[: end.start() + 1] in owners]


def check_unused_tensors(directory: ModelDirectory, names: Iterable[str], weights: Collection[str]) -> None:
    """Refuse tensors that the loader did not use although they change a weight that it loaded.

    Those are named like a scale or a code, or belong to a matrix, as a bias does, or are weights
    in a layer that it loaded. `weights` are the names of all that it could use.
    """
    unused = {name for name in names if not _is_zero_bias(directory, name)}
    loaded = {*weights} - unused
    layers = {match[0] for match in map(_IN_LAYER.match, loaded) if match}
    for name in sorted(name for name in unused if not (is_of_cache(name) or directory.is_of_draft(name))):
        if _SCALE_OR_CODE.search(name):
            raise InputError(
                f"'{directory.path}' holds quantised weights: the loader has no use for '{name}', {ADVICE}"
            )
        parts, layer = name.split("."), _IN_LAYER.match(name)
        owners = {".".join([*parts[:count], "weight"]) for count in range(1, len(parts))} - {name}
        is_weight_of_layer = name.endswith(".weight") and layer is not None and layer[0] in layers
        if owners & loaded or (is_weight_of_layer and not is_of_tower(name)):
            raise InputError(
                f"'{directory.path}' holds '{name}', which its config.json does not use: K and V "
                "would not be the model's; mend the config (num_nextn_predict_layers, where layers after "
                "the last draft tokens), or merge adapters into the weights"
            )


def _is_zero_bias(directory: ModelDirectory, name: str) -> bool:
    # AutoGPTQ gave every layer a bias, whether the model has one or not
    is_beside_codes = f"{name.removesuffix('.bias')}.qweight" in directory.entries
    if not name.endswith(".bias") or not is_beside_codes or name not in directory.entries:
        return False
    return not any(read_values(directory.path / directory.weight_map[name], directory.entries[name]))


def drop_quantization_config(config: PreTrainedConfig, *, is_coded: bool) -> None:
    """Drop quantization configs that are about the cache only, and those whose weights are decoded here."""
    for part in (config, config.get_text_config(decoder=True)):
        quantization = getattr(part, "quantization_config", None)
        if is_coded or (isinstance(quantization, dict) and is_for_cache_only(quantization)):
            part.__dict__.pop("quantization_config", None)


def is_quantized(config: PreTrainedConfig) -> bool:
    """Return whether transformers will decode weights."""
    parts = (config, config.get_text_config(decoder=True))
    return any(getattr(part, "quantization_config", None) is not None for part in parts)
