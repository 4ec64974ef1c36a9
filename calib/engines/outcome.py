"""Outcomes of scales that an engine loads, on some GPUs, and the values that layers compute with."""

import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from calib.engines.catalogue import Engine, Method
from calib.files.cache_type import asks_for_heads
from calib.files.config import head_count, layer_config
from calib.files.model_directory import ModelDirectory
from calib.files.scale_files import ScaleTensor
from calib.files.stored_scales import Values

Tensors = Mapping[str, ScaleTensor | None]  # k, v, q


class Outcome(str, Enum):
    """The fate of a scale."""

    LOADED = "loaded"  # the layer computes with it
    DEFAULT = "default"  # the layer computes with 1.0, and nothing for it is in the files
    DROPPED = "dropped"  # the layer computes with 1.0 all the same
    NO_PLACE = "no place"  # the layer has no parameter for it
    PARTLY = "partly"  # layers differ
    CRASH = "crash"  # loading ends with an error that nobody foresaw
    REFUSED = "refused"  # loading ends with an error that says why
    UNKNOWN = "unknown"  # nobody ran or read this


class SimulationEnd(Exception):
    """The outcome of a whole directory, which ends a simulation; says why."""

    outcome: Outcome


class Refused(SimulationEnd):
    """The engine does not load the directory; says also what to do."""

    outcome = Outcome.REFUSED


class NotKnown(SimulationEnd):
    """Nobody ran the engine with such a directory."""

    outcome = Outcome.UNKNOWN


@dataclass(frozen=True)
class Place:
    """Tensor-parallel ranks, and the FP8 type of their GPUs."""

    ranks: int = 1  # that the heads are split over: tensor parallelism
    fnuz: bool = False  # their FP8 type ends at 240, as that of MI300 (gfx942) does

    def __str__(self) -> str:
        kind = "MI300" if self.fnuz else "GPU"
        return f"one {kind}" if self.ranks == 1 else f"{self.ranks} {kind}s, tensor parallel"

    def head_slice(self, rank: int, kv_heads: int) -> slice:
        """Return which of all KV heads `rank` holds; several ranks hold one where heads are fewer."""
        count = max(1, kv_heads // self.ranks)
        start = rank * kv_heads // self.ranks
        return slice(start, start + count)


@dataclass(frozen=True)
class LayerScale:
    """The scale of K, V or Q that one attention layer computes with; by default none is in the files."""

    module: str
    letter: str
    status: Outcome = Outcome.DEFAULT  # loaded, default or unknown
    values: Values = (1.0,)  # none where they are not known
    reason: str = "nothing for it in the files: 1.0"


@dataclass
class Simulation:
    """The outcome for every scale; none where the engine refuses the directory."""

    engine: Engine
    outcomes: list[LayerScale] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (tensor, why)
    refused: str | None = None
    fates: set[Outcome] = field(default_factory=set)  # where the model's class settles them
    problem: str | None = None  # what is wrong although they load
    flag: str | None = None  # what the user must add for an FP8 cache
    asks_for_heads: bool = False  # the config says that there is a scale per head
    draft: str = ""  # the fate of scales of a layer that drafts tokens (MTP), in words

    @property
    def fate(self) -> str:
        """The fate of all scales: dropped, no place, crash; `partly` where they have several."""
        if Outcome.CRASH in self.fates:
            return Outcome.CRASH.value
        if len(self.fates) > 1:
            return "partly"
        return min(self.fates).value if self.fates else ""

    @property
    def gap(self) -> str:
        """The layers that files without a scale for them leave at 1.0, in words; "" if none or all."""
        own, letters = [scale for scale in self.outcomes if scale.letter != "q"], dict[str, list[str]]()
        for scale in own:
            if scale.status == Outcome.DEFAULT:
                letters.setdefault(scale.module, []).append(scale.letter.upper())
        if sum(map(len, letters.values())) in (0, len(own)):
            return ""
        names = [f"{' and '.join(xs)} of {module}" for module, xs in letters.items()]
        shown = ", ".join([*names[:3], "..."] if len(names) > 3 else names)
        return f"the files have no scale for {shown}: 1.0 there"

    @property
    def per_head_note(self) -> str:
        """The engine's needs for a scale per head, in words, where the config asks for it; else ""."""
        is_loaded = any(scale.status == Outcome.LOADED for scale in self.outcomes)
        return self.engine.per_head_note if self.asks_for_heads and is_loaded else ""

    @property
    def is_known(self) -> bool:
        """Return whether the engine loads the directory, and it is known which scales it computes with."""
        return not self.refused and all(scale.status != Outcome.UNKNOWN for scale in self.outcomes)

    @property
    def is_good(self) -> bool:
        """Return whether the engine uses every K and V scale with the value in the file."""
        arrived = [scale.status == Outcome.LOADED for scale in self.outcomes if scale.letter != "q"]
        return not (self.refused or self.problem) and bool(arrived) and all(arrived)


def layer_scales(
    directory: ModelDirectory,
    module: str,
    loaded: Mapping[tuple[str, str], ScaleTensor],
    method: Method | None,
    place: Place,
) -> list[LayerScale]:
    """Return the scales of K, V and Q that the attention layer `module` computes with under `method`."""
    tensors = {letter: loaded.get((module, letter)) for letter in "kvq"}
    if method is None or method.kind == "none":
        return [LayerScale(module, letter) for letter in "kv"]
    if method.kind == "pair":
        return _pair(module, tensors, loaded.get((module, "kv")))
    if method.kind == "scalar":
        if not method.reads_q:
            tensors["q"] = None
        return _scalars(module, tensors, method, 2.0 if place.fnuz and method.doubles_fnuz else 1.0)
    scales = []  # as vLLM's `CompressedTensorsKVCacheMethod` loads: ones, overwritten without a check
    for letter, tensor in tensors.items():
        scale = LayerScale(module, letter)
        if tensor is not None:
            is_per_head = asks_for_heads(directory)
            values = _head_values(directory, letter, tensor, place) if is_per_head else _one(tensor)
            scale = LayerScale(module, letter, Outcome.LOADED, tuple(map(_float32, values)), "")
        scales.append(scale)
    return scales


def _scalars(module: str, tensors: Tensors, method: Method, factor: float) -> list[LayerScale]:
    """Load as vLLM's and SGLang's `BaseKVCacheMethod`: a scale that is absent is -1.

    `factor` is 2 where FP8 ends at 240, as files hold scales for 448.
    """
    rounded = _bfloat16 if method.through_bf16 else _float32
    k, v, q = (rounded(_one(tensor)[0]) if tensor else -1.0 for tensor in map(tensors.get, "kvq"))
    query = _loaded(module, "q", q * factor) if q > 0 else LayerScale(module, "q")
    if k > 0 and v > 0:
        return [_loaded(module, "k", k * factor), _loaded(module, "v", v * factor), query]
    is_absent = max(k, v) <= 0 if method.zero_is_absent else max(k, v) < 0
    if is_absent and not math.isnan(k + v):
        return [LayerScale(module, "k"), LayerScale(module, "v"), query]
    if not k > 0:
        if tensors["k"] is None:
            raise Refused(f"{module} has a V scale and no K scale; repair it")
        raise Refused(f"{module} has a K scale of {k:g} beside a V scale of {v:g}; repair it")
    both = factor * (k if math.isnan(v) else max(k, v))
    why = (
        f"a V scale of {v:g} is replaced by K's" if tensors["v"] else "the layer has no V scale: V takes K's"
    )
    return [_loaded(module, "k", both), _loaded(module, "v", both, why), query]


def _pair(module: str, tensors: Tensors, shared: ScaleTensor | None) -> list[LayerScale]:
    """Load as TGI's `get_kv_scales`: both K and V, else the scale that they share, else 1.0."""
    k, v = tensors["k"], tensors["v"]
    if k and v:
        return [_loaded(module, x, _one(tensor)[0]) for x, tensor in (("k", k), ("v", v))]
    if shared:
        return [_loaded(module, x, _bfloat16(_one(shared)[0])) for x in "kv"]
    return [LayerScale(module, x) for x in "kv"]


def _loaded(module: str, letter: str, value: float, reason: str = "") -> LayerScale:
    return LayerScale(module, letter, Outcome.LOADED, (value,), reason)


def _one(tensor: ScaleTensor) -> Values:
    if len(tensor.values) != 1:
        raise Refused(
            f"'{tensor.name}' has {len(tensor.values)} values where one per layer is read; export "
            "the scales with --reduce max, or for an engine that reads one per head"
        )
    return tensor.values


def _head_values(directory: ModelDirectory, letter: str, tensor: ScaleTensor, place: Place) -> Values:
    """Return every rank's values, one rank after the other."""
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
    count = max(1, kv_heads // place.ranks)
    parts = [values[place.head_slice(rank, kv_heads)] for rank in range(place.ranks)]
    wrong = next((rank for rank, part in enumerate(parts) if len(part) not in (1, count)), None)
    if wrong is not None:
        rank = f"of rank {wrong} of {place.ranks}: " if place.ranks > 1 else ""
        raise Refused(f"{rank}'{tensor.name}' has {len(values)} values; the layer has {kv_heads} KV heads")
    return tuple(value for part in parts for value in part * (count // len(part)))


def heads_of(directory: ModelDirectory, layer: int) -> tuple[int, int]:
    """Return query heads and KV heads of a layer by config.json, or raise `NotKnown` or `Refused`."""
    config = layer_config(directory.text_config, layer)
    heads, kv_heads = head_count(config, "q"), head_count(config, "k")
    if heads is None or kv_heads is None:
        kind = "KV" if heads else "attention"
        raise NotKnown(f"config.json does not say how many {kind} heads there are")
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
