"""How many scales a layer can have, by the numbers of heads that config.json names."""

from collections.abc import Iterator, Mapping
from typing import Any

_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
# of other layers of the same model, as in Gemma 4 and MiMo-V2-Flash
_OTHER_QUERY_HEADS = ("swa_num_attention_heads",)
_OTHER_KV_HEADS = ("num_global_key_value_heads", "swa_num_key_value_heads")
# what DeciLM (Nemotron-NAS) names instead, layer by layer
_ELSEWHERE = ("block_configs", "num_key_value_heads_per_layer")
# model types that have a K and V head for each query head where config.json names no number
ONE_PER_QUERY_HEAD = (
    *("biogpt", "bloom", "codegen", "gpt2", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj"),
    *("hrm_text", "llama", "mpt", "opt", "persimmon", "xglm"),
)


def head_count(config: Mapping[str, Any], letter: str) -> int | None:
    """The number of heads of K and V, or of Q, in most layers of a text config, if it says so."""
    heads = _first(config, _QUERY_HEADS)
    if letter == "q":
        return heads
    inner = config.get("attn_config")
    grouped = inner.get("kv_n_heads") if isinstance(inner, dict) else None
    # Falcon with another decoder names one head for all queries by this alone
    single = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else None
    named = single or _first(config, _KV_HEADS) or _number(grouped)
    return named or (heads if _has_one_per_query_head(config) else None)


def can_be_split(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether each of `ranks` gets as many heads as the others, as engines ask for."""
    larger, smaller = max(kv_heads, ranks), min(kv_heads, ranks)
    return not (heads % ranks or larger % smaller)


def _has_one_per_query_head(config: Mapping[str, Any]) -> bool:
    """Whether K and V have as many heads as Q where no number is named: defaults differ."""
    if any(key in config for key in _ELSEWHERE):
        return False
    values = [config[key] for key in _KV_HEADS if key in config]
    if values:
        return all(value is None for value in values)
    single = config.get("multi_query")
    return single is False or config.get("model_type") in ONE_PER_QUERY_HEAD


def of_layer(config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """A text config as it holds for one layer, where layers differ in their heads."""
    own = dict(config)
    sliding = _is_sliding(config, layer)
    if sliding is not None:
        others = {key: own.pop(key, None) for key in (*_OTHER_QUERY_HEADS, *_OTHER_KV_HEADS)}
        queries, kv = None, None
        if sliding:
            queries, kv = others["swa_num_attention_heads"], others["swa_num_key_value_heads"]
            if config.get("model_type") == "mimo_v2_flash":  # where nothing else is said
                kv = kv or 2 * (_first(config, _KV_HEADS) or 0)
        elif config.get("attention_k_eq_v"):
            kv = others["num_global_key_value_heads"]
        own |= {"num_attention_heads": queries} if queries else {}
        own |= {"num_key_value_heads": kv} if kv else {}
    for key in (*_QUERY_HEADS, *_KV_HEADS):
        if isinstance(by_layer := own.get(key), list) and layer < len(by_layer):
            own[key] = by_layer[layer]
    layers = own.pop("per_layer_config", None)
    for index, settings in layers.items() if isinstance(layers, dict) else ():
        if index.isdecimal() and int(index) == layer and isinstance(settings, dict):
            own |= settings
    return own


def _is_sliding(config: Mapping[str, Any], layer: int) -> bool | None:
    """Whether a layer has a window of its own; None where the config does not say."""
    for key, sliding in (("layer_types", "sliding_attention"), ("hybrid_layer_pattern", 1)):
        kinds = config.get(key)
        if isinstance(kinds, list) and layer < len(kinds):
            return bool(kinds[layer] == sliding)
    return None


def caches_latents(config: Mapping[str, Any]) -> bool:
    """Whether a text config is of a model that caches latents (MLA): one scale per layer."""
    # vLLM's class of MiniCPM3 caches K and V of heads
    return bool(config.get("kv_lora_rank")) and config.get("model_type") != "minicpm3"


def head_counts(config: Mapping[str, Any], letter: str) -> set[int]:
    """All numbers of heads of K and V, or of Q, that layers of a text config have."""
    if letter != "q" and caches_latents(config):
        return {1}
    return {count for count in _all_counts(config, letter) if count is not None}


def _all_counts(config: Mapping[str, Any], letter: str) -> Iterator[int | None]:
    yield head_count(config, letter)
    for key in _OTHER_QUERY_HEADS if letter == "q" else _OTHER_KV_HEADS:
        yield _number(config.get(key))
    for key in _QUERY_HEADS if letter == "q" else _KV_HEADS:
        by_layer = config.get(key)
        if isinstance(by_layer, list):
            yield from map(_number, by_layer)
    layers = config.get("per_layer_config")
    for layer in layers.values() if isinstance(layers, dict) else ():
        yield head_count(layer, letter) if isinstance(layer, dict) else None


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((count for key in keys if (count := _number(config.get(key)))), None)


def _number(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
