"""From the tensors that reach an attention layer to the scales it computes with, by kind."""

import math
import struct
from array import array
from collections.abc import Mapping
from itertools import product

from calib.engines.catalogue import Method
from calib.engines.outcome import NotKnown, Outcome, Place, Refused, Simulation, Values, default
from calib.files.config import head_count, layer_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import JSON_FILE
from calib.files.scale_files import ScalesJson, ScaleTensor

Tensors = Mapping[str, ScaleTensor | None]  # k, v, q


def one_or_per_head(
    directory: ModelDirectory, module: str, tensors: Tensors, place: Place | None
) -> list[Outcome]:
    """Load as vLLM's `CompressedTensorsKVCacheMethod`: ones, overwritten without a check.

    `place` is None where there is one scale per layer, not one per head.
    """
    outcomes = []
    for letter, tensor in tensors.items():
        if tensor is None:
            outcomes.append(default(module, letter))
            continue
        values = _for_heads(directory, letter, tensor, place) if place else _one(tensor)
        outcomes.append(Outcome(module, letter, "loaded", tuple(map(_float32, values))))
    return outcomes


def scalar(module: str, tensors: Tensors, method: Method, factor: float) -> list[Outcome]:
    """Load as vLLM's and SGLang's `BaseKVCacheMethod`: a scale that is absent is -1.

    `factor` is 2 where FP8 ends at 240, as files hold scales for 448.
    """
    rounded = _bfloat16 if method.through_bf16 else _float32
    read = {x: rounded(_one(tensor)[0]) if tensor else -1.0 for x, tensor in tensors.items()}
    k, v, q = read["k"], read["v"], read["q"]
    query = Outcome(module, "q", "loaded", (q * factor,)) if q > 0 else default(module, "q")
    if k > 0 and v > 0:
        return [*(Outcome(module, x, "loaded", (read[x] * factor,)) for x in "kv"), query]
    absent = max(k, v) <= 0 if method.zero_is_absent else max(k, v) < 0
    if absent and not math.isnan(k + v):
        return [default(module, "k"), default(module, "v"), query]
    if not k > 0:
        if tensors["k"] is None:
            raise Refused(f"{module} has a V scale and no K scale; repair it")
        raise Refused(f"{module} has a K scale of {k:g} beside a V scale of {v:g}; repair it")
    both = (factor * (k if math.isnan(v) else max(k, v)),)
    why = "there is no V scale: V takes K's"
    if tensors["v"]:
        why = f"a V scale of {v:g} is replaced by K's"
    return [Outcome(module, "k", "loaded", both), Outcome(module, "v", "loaded", both, why), query]


def pair(module: str, tensors: Tensors, shared: ScaleTensor | None) -> list[Outcome]:
    """Load as TGI's `get_kv_scales`: both K and V, else the scale that they share, else 1.0."""
    k, v = tensors["k"], tensors["v"]
    if k and v:
        return [Outcome(module, x, "loaded", _one(t)) for x, t in (("k", k), ("v", v))]
    if shared:
        value = (_bfloat16(_one(shared)[0]),)
        return [Outcome(module, x, "loaded", value) for x in "kv"]
    return [default(module, x) for x in "kv"]


def simulate_json(directory: ModelDirectory, place: Place, found: Simulation) -> None:
    """Load `kv_cache_scales.json` as vLLM 0.4: after one mistake every scale is 1.0."""
    found.flag = found.engine.flag
    config, json = directory.config, directory.json
    layers = directory.num_layers or 0
    count = layers if layers < 100_000 else 0
    count = count or len(next(iter(json.ranks.values()), {}) if json else {})
    tensors = directory.tensors + directory.unlisted
    found.ignored += [(tensor.name, f"only {JSON_FILE} is read") for tensor in tensors]
    wrong = json and _mistake(json, config, count, place.ranks)
    found.ignored += [(JSON_FILE, wrong)] if isinstance(wrong, str) else []
    for index, letter in product(range(count), "kv"):
        outcome = default(f"layer {index}", letter)
        if json and not wrong:
            values = tuple(json.ranks[rank][index] for rank in range(place.ranks))
            outcome = Outcome(outcome.module, letter, "loaded", values)
        found.outcomes.append(outcome)


def _mistake(json: ScalesJson, config: dict[str, object], layers: int, ranks: int) -> str | None:
    """Why the loader throws the file away: it then logs, and serves on with 1.0."""
    wanted = config.get("model_type")
    says = json.model_type
    if "model_type" not in json.model_fields_set:
        return "it has no model_type, so all of it is thrown away"
    if wanted is not None and says != wanted:
        return f"its model_type is {str(says)[:80]!r}, the model's {wanted!r}: thrown away"
    if json.dtype != "float8_e4m3fn":
        return f"its dtype is {json.dtype!r}; only 'float8_e4m3fn' is read"
    if set(json.ranks) != {*range(ranks)}:
        return f"it is for {len(json.ranks)} ranks, not for {ranks}: thrown away"
    missing = {layer for rank in json.ranks.values() for layer in set(range(layers)) ^ set(rank)}
    if missing:
        return f"layer {min(missing)} is missing or too many; every layer must be listed"
    return None


def _one(tensor: ScaleTensor) -> Values:
    if len(tensor.values) != 1:
        raise Refused(
            f"'{tensor.name}' has {len(tensor.values)} values where one per layer is read; export "
            "the scales with --reduce max, or for an engine that reads one per head"
        )
    return tensor.values


def _for_heads(directory: ModelDirectory, letter: str, tensor: ScaleTensor, place: Place) -> Values:
    """Every rank's values, one rank after the other."""
    if "config_groups" not in (directory.quantization or {}):
        raise Refused("strategy attn_head needs the key config_groups in the config, empty or not")
    heads, kv_heads = heads_of(directory, tensor.parsed.layer)
    values = tensor.values
    if letter == "q":
        # query heads share a scale with their KV head: the largest
        group = heads // kv_heads
        if len(values) % group:
            raise Refused(f"'{tensor.name}' has {len(values)} values; the model has {heads} heads")
        values = tuple(_max(values[i : i + group]) for i in range(0, len(values), group))
    held = max(1, kv_heads // place.ranks)
    parts = [values[place.of_rank(rank, kv_heads)] for rank in range(place.ranks)]
    wrong = next((rank for rank, part in enumerate(parts) if len(part) not in (1, held)), None)
    if wrong is not None:
        of = f"of rank {wrong} of {place.ranks}: " if place.ranks > 1 else ""
        raise Refused(f"{of}'{tensor.name}' has {len(values)} values; the layer has {kv_heads} KV heads")
    return tuple(value for part in parts for value in part * (held // len(part)))


def heads_of(directory: ModelDirectory, layer: int) -> tuple[int, int]:
    """Query heads and KV heads of a layer, as config.json says; `NotKnown` where it does not."""
    config = layer_config(directory.text_config, layer)
    heads, kv_heads = head_count(config, "q"), head_count(config, "k")
    if heads is None or kv_heads is None:
        missing = "KV" if heads else "attention"
        raise NotKnown(f"config.json does not say how many {missing} heads there are")
    if kv_heads > heads:
        raise Refused(f"config.json names {kv_heads} KV heads, and only {heads} query heads")
    return heads, kv_heads


def _max(values: Values) -> float:
    # as torch.amax: NaN stays
    return math.nan if any(map(math.isnan, values)) else max(values)


def _float32(value: float) -> float:
    return array("f", [value])[0]


def _bfloat16(value: float) -> float:
    bits = int.from_bytes(struct.pack("<f", _float32(value)), "little")
    if not math.isnan(value):
        bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest, ties to even
    rounded: float = struct.unpack("<f", (bits >> 16 << 16).to_bytes(5, "little")[:4])[0]
    return rounded
