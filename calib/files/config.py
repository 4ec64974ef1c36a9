"""Facts of a config.json: its language model, quantization, number of heads, and kind of cache."""

from collections.abc import Iterable, Mapping
from typing import Any

Config = Mapping[str, Any]

# what configs call the number of layers
LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
# the same for some layers of a model, as in Gemma 4 and MiMo-V2-Flash
_SOME_QUERY_HEADS = ("swa_num_attention_heads",)
_SOME_KV_HEADS = ("num_global_key_value_heads", "swa_num_key_value_heads")
# DeciLM (Nemotron-NAS) names its heads layer by layer under these
_DECILM_KEYS = ("block_configs", "num_key_value_heads_per_layer")
# model types that have a K and V head for each query head where config.json names no number
ONE_PER_QUERY_HEAD = (
    *("biogpt", "bloom", "codegen", "gpt2", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj"),
    *("hrm_text", "llama", "mpt", "opt", "persimmon", "xglm"),
)


def text_config(config: Config) -> Config:
    """Return the language model's part of a config: all of it, unless the model is multimodal."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def quantization_configs(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the quantization configs of a config.json, each with the key that it is under."""
    places = [("quantization_config", config.get("quantization_config"))]
    if text_config(config) is not config:
        places.append(("text_config.quantization_config", config["text_config"].get("quantization_config")))
    places.append(("compression_config", config.get("compression_config")))
    return [(place, value) for place, value in places if value is not None]


def find_quantization_config(config: Config) -> dict[str, Any] | None:
    """Return the quantization_config of a config.json, from where engines look for it."""
    configs = (part.get("quantization_config") for part in (config, text_config(config)))
    return next((value for value in configs if isinstance(value, dict)), None)


def caches_latents(config: Config) -> bool:
    """Return whether a text config is of a model that caches latents (MLA): one scale per layer."""
    return bool(config.get("kv_lora_rank"))


def head_count(config: Config, letter: str) -> int | None:
    """Return the number of heads of K and V, or of Q, in most layers; None if it is not known."""
    query_heads = _first_count(config, _QUERY_HEADS)
    if letter == "q":
        return query_heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # Falcon before its second decoder
    mpt = config.get("attn_config")
    grouped = mpt.get("kv_n_heads") if isinstance(mpt, dict) else None
    count = _first_count(config, _KV_HEADS) or _positive(grouped)
    return count or (query_heads if _has_kv_head_per_query_head(config) else None)


def head_counts(config: Config, letter: str) -> set[int]:
    """Return all numbers of heads of K and V, or of Q, that layers of a text config have."""
    # of MiniCPM3 vLLM's own class caches K and V of heads, where all else caches latents
    if letter != "q" and caches_latents(config) and config.get("model_type") != "minicpm3":
        return {1}
    keys, some = (_QUERY_HEADS, _SOME_QUERY_HEADS) if letter == "q" else (_KV_HEADS, _SOME_KV_HEADS)
    counts = [head_count(config, letter), *(config.get(key) for key in some)]
    for value in (config.get(key) for key in keys):
        counts += value if isinstance(value, list) else []
    counts += [head_count(settings, letter) for settings in _settings_by_layer(config).values()]
    return {count for count in map(_positive, counts) if count}


def layer_config(config: Config, layer: int) -> dict[str, Any]:
    """Return a text config as it holds for one layer, where layers differ in their heads."""
    own = dict(config)
    if (is_sliding := _is_sliding(config, layer)) is not None:
        query_heads, kv_heads = None, None
        if is_sliding:
            query_heads, kv_heads = (own.get(f"swa_num_{x}_heads") for x in ("attention", "key_value"))
            if config.get("model_type") == "mimo_v2_flash":
                kv_heads = kv_heads or 2 * (_first_count(config, _KV_HEADS) or 0)
        elif config.get("attention_k_eq_v"):
            kv_heads = own.get("num_global_key_value_heads")
        own |= {"num_attention_heads": query_heads} if query_heads else {}
        own |= {"num_key_value_heads": kv_heads} if kv_heads else {}
        own |= dict.fromkeys((*_SOME_QUERY_HEADS, *_SOME_KV_HEADS))
    for key in (*_QUERY_HEADS, *_KV_HEADS):
        if isinstance(counts := own.get(key), list) and layer < len(counts):
            own[key] = counts[layer]
    own.pop("per_layer_config", None)
    return own | _settings_by_layer(config).get(str(layer), {})


def can_be_split(heads: int, kv_heads: int, ranks: int) -> bool:
    """Return whether all `ranks` get the same number of heads, as engines ask for."""
    return not (heads % ranks or max(kv_heads, ranks) % min(kv_heads, ranks))


def _has_kv_head_per_query_head(config: Config) -> bool:
    """Return whether K and V have as many heads as Q where no number is named: defaults differ."""
    if any(key in config for key in _DECILM_KEYS):
        return False
    values = [config[key] for key in _KV_HEADS if key in config]
    if values:
        return all(value is None for value in values)
    return config.get("multi_query") is False or config.get("model_type") in ONE_PER_QUERY_HEAD


def _is_sliding(config: Config, layer: int) -> bool | None:
    """Return whether a layer has a sliding window; None where the config does not say."""
    for key, sliding in (("layer_types", "sliding_attention"), ("hybrid_layer_pattern", 1)):
        kinds = config.get(key)
        if isinstance(kinds, list) and layer < len(kinds):
            return bool(kinds[layer] == sliding)
    return None


def _settings_by_layer(config: Config) -> dict[str, dict[str, Any]]:
    """Return what `per_layer_config` says of single layers, by their number."""
    layers = config.get("per_layer_config")
    layers = layers if isinstance(layers, dict) else {}
    return {str(index): settings for index, settings in layers.items() if isinstance(settings, dict)}


def _first_count(config: Config, keys: Iterable[str]) -> int | None:
    return next((count for key in keys if (count := _positive(config.get(key)))), None)


def _positive(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
