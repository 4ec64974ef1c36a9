"""Weights that are codes, not numbers: found by config, type and name, refused unless decoded.

Those of `layouts` are decoded here, others by transformers, which loads codes as if they were
weights where it does not know the `quant_method`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory, quantization_configs
from calib.files.names import MODELOPT_FILE, is_of_cache, is_of_senses
from calib.files.safetensors_header import read_values
from calib.files.strict_json import read_object
from calib.models.quantized import WEIGHT_FORMATS
from calib.models.quantized.coded_weight import ADVICE, WeightFormat
from calib.models.quantized.weights import coded_weights, consumed_names, naming

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# the places that transformers reads, too
_READ = ("quantization_config", "text_config.quantization_config")
# integers are weights' codes under these names only: masks and positions are integers as well
_WEIGHT = re.compile(r"(?:weight|_proj)$")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_IN_LAYER = re.compile(r"(?:[^.\d][^.]*\.)*\d{1,6}\.")
# the end of a name: of ModelOpt, compressed-tensors, GPTQ, AWQ, bitsandbytes, HQQ, AQLM, MXFP4 ...
_SCALE_OR_CODE = re.compile(
    r"\.(?:(?!layer_|logit_)(?:\w+_)?scales?(?:_inv|_\d)?|(?:\w+_)?zero_points?|\w+_blocks"
    r"|qweight|qzeros|g_idx|weight_(?:packed|shape|format)|SCB|W_q|codes|codebooks"
    r"|(?:nested_)?(?:absmax|quant_map)|quant_state\..+|_data|_scale)$"
)


def is_for_cache_only(quantization: dict[str, Any]) -> bool:
    """Whether a quantization config is about the KV cache alone, or about nothing at all."""
    nested = quantization.get("quantization")
    says = {**quantization, **(nested if isinstance(nested, dict) else {})}
    method = says.get("quant_method")
    if method == "modelopt" and ["*"] in (says.get("ignore"), says.get("exclude_modules")):
        return True
    groups = says.get("config_groups") or {}
    of_weights = not isinstance(groups, dict) or not all(map(targets_attention, groups.values()))
    more = any(says.get(key) for key in ("quant_algo", "quantized_layers", "transform_config"))
    return method in ("modelopt", "compressed-tensors") and not (of_weights or more)


def targets_attention(group: Any) -> bool:
    """Whether a group of compressed-tensors, such as llm-compressor's, is about Q, K and V."""
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list):
        return False
    return bool(targets) and all(str(target).endswith("Attention") for target in targets)


def find_weight_format(checkpoint: ModelDirectory) -> WeightFormat | None:
    """How the weights are stored as codes; None: they are numbers, or transformers decodes them.

    Refuses what neither reads, and files that do not hold what their config says.
    """
    found, decoded = {}, False
    for place, says in _configs(checkpoint):
        if is_for_cache_only(says):
            continue
        if layout := _layout(checkpoint, place, says):
            found[place] = layout
        elif place in _READ and _is_known(says):
            decoded = True
        else:
            raise InputError(f"{_quantised(checkpoint, place, says)}, {ADVICE}")
    layouts = [*found.values()]
    if any(other != layouts[0] for other in layouts) or (layouts and decoded):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised in one way by {next(iter(found))} "
            "and in another by a second config; take away whichever is not the model's"
        )
    layout = next(iter(layouts), None)
    coded = coded_weights(checkpoint, layout)
    if not decoded:
        _check_numbers(checkpoint, consumed_names(coded))
    return layout


def quantization_notes(checkpoint: ModelDirectory) -> list[str]:
    """One line on how quantised weights were read; none where they are numbers."""
    layout = find_weight_format(checkpoint)
    if layout is None:
        return []
    return [
        f"the weights are quantised ({layout.label}): they were dequantised, and activations were "
        "not quantised"
    ]


def unused_codes(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of `names` that a scale or a code of a matrix of `model` has, and `model` has not."""
    held = model.state_dict()
    matrices = [name for name, weight in held.items() if weight.dim() > 1]
    beside = {*(name.removesuffix("weight") for name in matrices), *(f"{n}." for n in matrices)}
    return [
        name
        for name in names
        if name not in held and (match := _SCALE_OR_CODE.search(name)) and name[: match.start() + 1] in beside
    ]


def check_unused_tensors(checkpoint: ModelDirectory, names: Iterable[str], weights: Collection[str]) -> None:
    """Refuse tensors that the loader left over although they change a weight that it loaded.

    Those are named like a scale or a code, or belong to a matrix, as a bias does, or are weights
    in a layer that it loaded. `weights` are the names of all that it was given.
    """
    left = {name for name in names if not _is_zero_bias(checkpoint, name)}
    loaded = {match[0] for name in {*weights} - left if (match := _IN_LAYER.match(name))}
    for name in sorted(name for name in left if not is_of_cache(name)):
        if _SCALE_OR_CODE.search(name):
            raise InputError(
                f"'{checkpoint.path}' holds quantised weights: the loader has no use for '{name}', {ADVICE}"
            )
        parts = name.split(".")
        owners = {".".join([*parts[:n], "weight"]) for n in range(1, len(parts))} - {name}
        layer = _IN_LAYER.match(name)
        is_missed = name.endswith(".weight") and layer is not None and layer[0] in loaded
        if owners & ({*weights} - left) or (is_missed and not is_of_senses(name)):
            raise InputError(
                f"'{checkpoint.path}' holds '{name}', which its config.json does not use: K and V "
                "would not be the model's; mend the config, or merge adapters into the weights"
            )


def _is_zero_bias(checkpoint: ModelDirectory, name: str) -> bool:
    # AutoGPTQ gave every layer a bias, whether the model has one or not
    coded = f"{name.removesuffix('.bias')}.qweight" in checkpoint.entries
    if not name.endswith(".bias") or not coded or name not in checkpoint.entries:
        return False
    path, entry = checkpoint.path / checkpoint.weight_map[name], checkpoint.entries[name]
    return not any(read_values(path, entry))


def drop_quantization_config(config: PreTrainedConfig, layout: WeightFormat | None) -> None:
    """Drop quantization configs that quantise no weights, and those whose `layout` is read here."""
    for part in (config, config.get_text_config(decoder=True)):
        says = getattr(part, "quantization_config", None)
        if layout or (isinstance(says, dict) and is_for_cache_only(says)):
            part.__dict__.pop("quantization_config", None)


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether transformers will decode weights."""
    parts = (config, config.get_text_config(decoder=True))
    return any(getattr(part, "quantization_config", None) is not None for part in parts)


def _configs(checkpoint: ModelDirectory) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, says in quantization_configs(checkpoint.config):
        implied = {"quant_method": "compressed-tensors"} if place == "compression_config" else {}
        yield place, {**implied, **says}
    file = checkpoint.path / MODELOPT_FILE
    if file.exists():
        yield MODELOPT_FILE, {"quant_method": "modelopt", **read_object(file)}


def _layout(checkpoint: ModelDirectory, place: str, says: dict[str, Any]) -> WeightFormat | None:
    method = says.get("quant_method")
    if not isinstance(method, str) or method not in WEIGHT_FORMATS:
        return None
    if place == "compression_config" and method != "compressed-tensors":
        return None
    with naming(_quantised(checkpoint, place, says)):
        return WEIGHT_FORMATS[method](says)


def _quantised(checkpoint: ModelDirectory, place: str, says: dict[str, Any]) -> str:
    method = says.get("quant_method")
    how = f"quantised by '{method}'" if method else "quantised, without a quant_method"
    return f"the weights of '{checkpoint.path}' are {how} ({place})"


def _is_known(says: dict[str, Any]) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if says.get("load_in_8bit") or says.get("load_in_4bit"):
        return says.get("quant_method") in (None, "bitsandbytes")
    return str(says.get("quant_method")) in AUTO_QUANTIZATION_CONFIG_MAPPING


def _check_numbers(checkpoint: ModelDirectory, spent: Collection[str]) -> None:
    for name in sorted(checkpoint.entries.keys() - spent):
        entry = checkpoint.entries[name]
        integer = entry.dtype == "BOOL" or entry.dtype.startswith(("I", "U"))
        harmless = is_of_cache(name) or (integer and not _WEIGHT.search(name))
        if entry.dtype not in _FLOATS and not harmless:
            raise InputError(
                f"'{checkpoint.path / checkpoint.weight_map[name]}' holds '{name}' as "
                f"{entry.dtype}, and no config says how to decode it, {ADVICE}"
            )
