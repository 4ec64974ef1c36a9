"""Layers that a checkpoint leaves in 16 bits beside an FP8 cache.

config.json may list them by vLLM's name of the argument, `kv_cache_dtype_skip_layers`; vLLM itself takes them
from its command line alone. ModelOpt lists the layers in FP8: `kv_cache_quantized_layers`, schema 1 (ModelOpt
#2272, vLLM #56116).
"""

from typing import Any

from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.names import layer_of

SKIP_KEY = "kv_cache_dtype_skip_layers"
MAP_KEY, _SCHEMA_KEY = "kv_cache_quantized_layers", "kv_cache_schema_version"
_MOST_LAYERS = 10_000
MODELOPT_KEYS = ("kv_cache_quant_algo", MAP_KEY, _SCHEMA_KEY)  # what its config says of the cache


def skipped_layers(directory: ModelDirectory) -> tuple[int, ...]:
    """Return the layers that stay in 16 bits; InputError where lists differ, or are not of the model."""
    lists = {}
    if (listed := directory.config.get(SKIP_KEY)) is not None:
        lists[SKIP_KEY] = check_layers(listed, directory.num_layers, f"{SKIP_KEY} of config.json")
    if (formats := directory.algorithms.get(MAP_KEY)) is not None:
        schema = directory.algorithms.get(_SCHEMA_KEY)
        if schema != 1 or not isinstance(formats, dict):
            raise InputError(
                f"{MAP_KEY} is {formats!r:.60}, {_SCHEMA_KEY} {schema!r:.20}; what is known is a map of "
                'modules to {"quant_algo": "FP8"} with version 1: take it out, or name layers in '
                f"{SKIP_KEY} of config.json"
            )
        count = directory.num_layers
        own = [entry for entry in formats.items() if not _is_of_draft(entry[0], count)]
        in_fp8 = {*check_layers([*map(_fp8_layer, own)], count, MAP_KEY)}
        layers = {layer_of(module) for module in directory.modules} or {*range(min(count or 0, _MOST_LAYERS))}
        lists[MAP_KEY] = tuple(sorted(layer for layer in layers if layer is not None and layer not in in_fp8))
    if len({*lists.values()}) > 1:
        raise InputError(f"{' and '.join(lists)} leave different layers in 16 bits; take one of them out")
    return next(iter(lists.values()), ())


def _is_of_draft(name: str, count: int | None) -> bool:
    """Return whether a module is for multi-token prediction, whose cache is not the decoder's."""
    layer = layer_of(name)
    return "mtp" in name.lower() or (layer is not None and count is not None and layer >= count)


def check_layers(layers: Any, count: int | None, source: str) -> tuple[int, ...]:
    """Return `layers` sorted; an InputError unless they are indices of a model of `count` layers."""
    if count is None:
        raise InputError(f"{source}: config.json does not say how many layers there are")
    is_list = isinstance(layers, list | tuple) and all(type(index) is int for index in layers)
    if not is_list or not all(0 <= index < count for index in layers):
        raise InputError(f"{source} is {layers!r:.80}; it is a list of layer indices, 0 to {count - 1}")
    return tuple(sorted({*layers}))


def _fp8_layer(entry: tuple[str, object]) -> int:
    name, settings = entry
    algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
    layer = layer_of(name)
    if algorithm != "FP8" or layer is None:
        raise InputError(
            f"{MAP_KEY} has '{name:.80}' in {algorithm!r:.40}; only layers in FP8, by their number, are known"
        )
    return layer
