"""Marks of a model's weights: few figures that tell whether another checkpoint has the same K and V.

A calibration keeps them. Sampled rows of norms, embedding, weights for K and V and the outputs of
attention are multiplied with fixed inputs.
"""

import hashlib
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError
from torch import Tensor

from calib.errors import Fp8kvError, InputError, first_problem
from calib.files.config import head_count, text_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import is_of_cache, is_of_tower
from calib.files.tensors import Source, StoredTensor
from calib.models.config import read_config
from calib.models.quantized.weights import DequantizedTensor, all_weights

PROBES = 64  # fixed inputs that every sampled row is multiplied with
_ROWS, _FEW_ROWS = 8, 2  # sampled of weights for K and V and of attention's outputs; of further ones
_FURTHER = 4  # weights of a layer that read a norm, to see whether factors were moved there from it
_TOKENS = 256  # whose embeddings are marked: a vocabulary may grow

_FUSED = {"qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"}
_OUTPUTS = {"o_proj", "dense", "out_proj"}  # of attention, whose V reads no norm
_LATENT = "kv_a_proj_with_mqa"  # rows of the latent, then of k_pe
_CACHED = {"k_proj", "v_proj", _LATENT, *_FUSED}
_MLP = {"mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "experts"}
_BEFORE_ATTENTION = ("input_layernorm", "ln_1", "attention_norm", "ln_attn", "norm_1", "norm1")
_BEFORE_MLP = (
    *("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ffn_norm", "ln_mlp"),
    *("norm_2", "norm2"),
)
_EMBEDDING = re.compile(r"(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
_LAYER = re.compile(r"(?P<layer>[^.]+\.(?P<index>\d{1,6}))\.(?P<rest>.+)")

# settings that change neither K nor V, or that tensors show
_WITHOUT_EFFECT = re.compile(
    r"_.*|architectures|torch_dtype|dtype|transformers_version|auto_map|id2label|label2id"
    r"|quantization_config|vocab_size|\w*_token_ids?|\w*drop(?:out)?|\w*bias|use_cache|return_dict"
    r"|output_\w+|router_\w+|initializer_\w+|pretraining_tp|max_position_embeddings|tie_\w+"
)

# tensors whose first dimension is the weight's wherever it is as long
_BY_ROW = ("weight", "weight_packed", "weight_scale")
_ROW_STEP = 32  # of sampled rows; another would change all marks, and so their version

Weights = Mapping[str, Source]  # by their names below the language model


def _encode(values: Tensor) -> str:
    return b64encode(values.bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()).decode()


def _decode(values: object) -> Tensor:
    if isinstance(values, str):
        codes = np.frombuffer(b64decode(values, validate=True), "<i2").astype(np.int16)
        if not codes.size or codes.size % PROBES:
            raise ValueError("a mark is empty, or cut off")
        values = torch.from_numpy(codes).view(torch.bfloat16).float().view(-1, PROBES)
    if not isinstance(values, Tensor):
        raise ValueError("a mark is not text")
    if not values.isfinite().all():
        raise ValueError("a mark is not finite")
    return values


class Mark(BaseModel):
    """Products of a tensor with the fixed inputs: of a few rows of a matrix, or of a whole vector."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    shape: list[int] = Field(min_length=1, max_length=2)  # of the tensor
    bits: int = Field(ge=1, le=16)  # of a stored value, 16 for floats of any size
    # [sampled rows, PROBES] float32; a calibration keeps bfloat16 in base 64
    values: Annotated[Tensor, BeforeValidator(_decode), PlainSerializer(_encode)]


class Marks(BaseModel):
    """Marks of a language model's tensors, by their names below it: `layers.0.mlp.up_proj...`."""

    model_config = ConfigDict(strict=True)
    version: Literal[3]
    layers: int = Field(ge=1)
    settings: dict[str, Any]  # of the config, which decide how K and V are made
    tensors: dict[str, Mark]

    @classmethod
    def from_json(cls, document: Any, where: str) -> "Marks":
        """Check the object that a calibration keeps; `where` names it in an InputError."""
        try:
            marks = cls.model_validate(document)
        except ValidationError as error:
            raise InputError(f"the marks in {where} are damaged ({first_problem(error)[:200]})") from None
        if not any(map(is_cached, marks.tensors)):
            raise InputError(f"the marks in {where} are damaged (no weight is of K or V)")
        return marks


def marks_or_none(checkpoint: ModelDirectory, modules: Iterable[str]) -> dict[str, Any] | None:
    """Return marks for a calibration to keep; None if the model's K and V cannot be compared."""
    try:
        return take_marks(checkpoint, modules).model_dump()
    except Fp8kvError:
        return None


def take_marks(checkpoint: ModelDirectory, modules: Iterable[str]) -> Marks:
    """Take the marks of `checkpoint`, whose attention `modules` transformers calls so.

    Reads vectors, and a few rows of matrices. InputError where a module has no weight for K and V
    that can be read.
    """
    prefixes = [checkpoint.attention_prefix(module) for module in modules]
    above = re.fullmatch(r"(?P<above>(?:.+?\.)?)[^.]+\.\d{1,6}\..+", prefixes[0])
    if above is None:
        raise InputError(f"'{prefixes[0]}' is in no layer with a number")
    weights = _language_weights(checkpoint, above["above"])
    settings = settings_of(checkpoint.path, checkpoint.config)
    marks, layers = dict[str, Mark](), dict[str, list[str]]()
    for name, source in weights.items():
        match = _LAYER.fullmatch(name)
        if match and len(source.shape) == 2:
            layers.setdefault(match["layer"], []).append(name)
        if len(source.shape) == 1:
            vector = source.read().float()
            marks[name] = _mark(name, source, (vector @ fixed_inputs(len(vector))).view(1, -1))
        elif is_embedding(name):
            marks[name] = _mark_rows(name, source, sample_rows(min(source.shape[0], _TOKENS), _ROWS))
    for layer, matrices in layers.items():
        marks |= _mark_layer(layer, matrices, weights, settings)
    for prefix in prefixes:
        inner = f"{prefix.removeprefix(above['above'])}."
        if not any(name.startswith(inner) and is_cached(name) for name in marks):
            raise InputError(f"'{checkpoint.path}' has no weight for K and V of '{prefix}' to read")
    return Marks(version=3, layers=checkpoint.num_layers or len(layers), settings=settings, tensors=marks)


def _language_weights(checkpoint: ModelDirectory, above: str) -> Weights:
    """Return the weights of the language model that can be read as numbers, by names below `above`."""
    weights, count = {}, checkpoint.num_layers
    for full_name, source in all_weights(checkpoint, torch.float32).items():
        name = full_name.removeprefix(above)
        match = _LAYER.fullmatch(name)
        # further layers draft tokens, and tools drop them
        is_draft = match is not None and count is not None and int(match["index"]) >= count
        is_foreign = is_of_tower(full_name) or is_of_cache(full_name) or name.endswith("inv_freq")
        # bytes are codes, which transformers decodes
        is_readable = source.dtype.is_floating_point and source.dtype.itemsize > 1
        if full_name.startswith(above) and is_readable and not (is_draft or is_foreign):
            weights[name] = source
    return weights


def _mark_layer(
    layer: str, matrices: list[str], weights: Weights, settings: Mapping[str, Any]
) -> dict[str, Mark]:
    """Mark the matrices of a layer that read the hidden state, and attention's output."""
    norm = norm_before(f"{layer}.k_proj", weights)
    cached = [name for name in matrices if is_cached(name)]
    sizes = {weights[f"{norm}.weight"].shape[0]} if norm else {weights[name].shape[1] for name in cached}
    further = []
    for name in sorted(matrices):
        is_excluded = is_cached(name) or name.split(".")[-2] in {*_OUTPUTS, "down_proj"}
        if weights[name].shape[1] in sizes and _has_rows(weights[name]) and not is_excluded:
            further.append(name)
    marks = {}
    for name in (*cached, *further[:_FURTHER]):
        source = weights[name]
        if source.shape[1] not in sizes:
            raise InputError(f"'{name}' does not read the layer's norm")
        rows = _rows_to_sample(name, source.shape, settings)
        inputs = _norm_output(norm_before(name, weights), weights, source.shape[1])
        marks[name] = _mark_rows(name, source, rows, inputs)
    for name in matrices if cached else ():
        if is_output(name) and _has_rows(weights[name]):
            marks[name] = _mark_rows(name, weights[name], sample_rows(weights[name].shape[0], _ROWS))
    return marks


def _rows_to_sample(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> list[int]:
    """Choose rows of every head of K and V, or a few of a weight that makes neither."""
    module, rows = name.split(".")[-2], shape[0]
    if module in _FUSED:
        heads = head_count(settings, "q") or 0
        head_dim = settings.get("head_dim") or (shape[1] // heads if heads else 0)
        if head_dim and heads and rows % head_dim == 0 and rows // head_dim >= heads + 2:
            return sample_head_rows(rows, heads, head_dim)
    if module in _FUSED or module == _LATENT:
        return sample_rows(rows, 3 * _ROWS)
    kv_heads = settings.get("num_key_value_heads")
    kv_heads = kv_heads if type(kv_heads) is int and 0 < kv_heads <= rows else 1
    return sample_rows(rows, max(_ROWS, kv_heads) if is_cached(name) else _FEW_ROWS)


def sample_rows(rows: int, count: int) -> list[int]:
    """Choose at most `count` rows, in every part of a matrix and on changing channels.

    Those of a large matrix are near multiples of `_ROW_STEP`.
    """
    step = _ROW_STEP if rows >= 1024 else 1
    part = max(rows // count, 1)
    return sorted({min(i * rows // count // step * step + i % part, rows - 1) for i in range(count)})


def sample_head_rows(rows: int, heads: int, head_dim: int) -> list[int]:
    """Choose rows of Q, K and V in one matrix, at least 4 of K's and 4 of V's among them.

    Heads of K and V come after those of Q, of all or of the group that shares them.
    """
    kv = (rows // head_dim - heads) // 2
    group, some = rows // head_dim // kv, sample_rows(kv, 4)
    blocks = {b for j in some for b in ((j + 1) * group - 2, (j + 1) * group - 1)}
    blocks |= {b for j in some for b in (heads + j, heads + kv + j)}
    within = sample_rows(head_dim, -(-4 // len(some)))
    return sorted(block * head_dim + at for block in blocks for at in within)


@lru_cache(maxsize=8)
def fixed_inputs(size: int) -> Tensor:
    """Return [size, PROBES] float32: signs at random, the same for ever."""
    data = hashlib.shake_256(b"fp8kv marks").digest(size * PROBES // 8)
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).reshape(size, PROBES)
    return torch.from_numpy(bits).float() * 2 - 1


def _norm_output(norm: str | None, weights: Weights, columns: int) -> Tensor:
    """Return what `norm` gives, taken to be the fixed inputs times its weight plus its bias.

    A factor that a tool moves from the norm into the matrix behind it so changes nothing.
    """
    output = fixed_inputs(columns)
    for part in ("weight", "bias"):
        source = weights.get(f"{norm}.{part}")
        if source is None:
            continue
        if source.shape != (columns,):
            problem = f"'{norm}.{part}' is {[*source.shape]}, and a weight behind it has {columns} columns"
            raise InputError(f"{problem}; download the model again")
        vector = source.read().float()[:, None]
        output = output * vector if part == "weight" else output + vector
    return output


def _mark_rows(name: str, source: Source, rows: list[int], inputs: Tensor | None = None) -> Mark:
    """Mark a matrix [rows, n] by what its `rows` give for `inputs` [n, PROBES], or the fixed ones."""
    inputs = fixed_inputs(source.shape[1]) if inputs is None else inputs
    return _mark(name, source, _read_rows(source, rows) @ inputs)


def _mark(name: str, source: Source, values: Tensor) -> Mark:
    if not values.isfinite().all():
        raise InputError(f"'{name}' holds NaN or Inf; download the model again")
    bits = 16
    if isinstance(source, DequantizedTensor):
        largest = max(stored.nbytes for stored in source.stored.values())
        bits = max(1, min(16, 8 * largest // prod(source.shape)))
    return Mark(shape=[*source.shape], bits=bits, values=values)


def _has_rows(source: Source) -> bool:
    """Return whether rows can be read without the whole weight."""
    if not isinstance(source, DequantizedTensor):
        return True
    return any(name.endswith((".weight", ".weight_packed")) for name in source.coded.parts.values())


def _read_rows(source: Source, rows: list[int]) -> Tensor:
    """Read `rows` of a weight in float32; these alone where the layout allows it."""
    if isinstance(source, StoredTensor):
        return torch.cat([_stored_row(source, row) for row in rows]).float()
    assert isinstance(source, DequantizedTensor)
    parts = {}
    for part, stored in source.stored.items():
        is_by_row = source.coded.parts[part].rpartition(".")[2] in _BY_ROW
        if not is_by_row or stored.shape[:1] != source.shape[:1]:
            parts[part] = stored.read()
            continue
        # the other rows are never filled: pages that are not touched take no memory
        parts[part] = torch.empty(stored.shape, dtype=stored.dtype)
        for row in rows:
            parts[part][row : row + 1] = _stored_row(stored, row)
    return torch.cat([source.coded.rows(parts, row, row + 1) for row in rows])


def _stored_row(source: StoredTensor, row: int) -> Tensor:
    offset = source.offset + row * (source.nbytes // source.shape[0])
    return replace(source, shape=(1, *source.shape[1:]), offset=offset).read()


def unmarked_matrices(checkpoint: ModelDirectory, base: Marks, target: Marks) -> list[str]:
    """Return names of matrices in layers of `checkpoint` that are not marked on both sides."""
    marked = {name.rpartition(".")[0] for name in base.tensors.keys() & target.tensors.keys()}
    inside = set()
    for name, entry in checkpoint.entries.items():
        match = _LAYER.search(name)
        is_foreign = is_of_tower(name) or is_of_cache(name)
        if match and len(entry.shape) > 1 and int(match["index"]) < target.layers and not is_foreign:
            inside.add(f"{match['layer']}.{match['rest'].rpartition('.')[0]}")
    return sorted({module.rpartition(".")[2] for module in inside - marked})


def is_cached(name: str) -> bool:
    """Return whether K or V comes from the weight `name`."""
    return name.endswith(".weight") and name.split(".")[-2] in _CACHED


def is_output(name: str) -> bool:
    """Return whether the weight `name` is attention's output, which K and V of later layers see."""
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in _OUTPUTS and _MLP.isdisjoint(parts)


def is_embedding(name: str) -> bool:
    """Return whether the weight `name` is the embedding of tokens."""
    return _EMBEDDING.fullmatch(name) is not None


def norm_before(name: str, names: Collection[str]) -> str | None:
    """Return the norm among `names` that the matrix `name` reads, without `.weight`; None: not known.

    A layer without a norm before attention has none before its MLP either.
    """
    match = _LAYER.fullmatch(name)
    if match is None or is_output(name):
        return None
    layer, before_mlp = match["layer"], list[str]()
    if not _MLP.isdisjoint(match["rest"].split(".")):
        before_mlp = [f"{layer}.{norm}" for norm in _BEFORE_MLP if f"{layer}.{norm}.weight" in names]
    first = [f"{layer}.{norm}" for norm in _BEFORE_ATTENTION if f"{layer}.{norm}.weight" in names]
    return next(iter(before_mlp or first), None) if first else None


def settings_of(directory: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in `document`, a config.json, that change K and V."""
    try:
        text = read_config(directory, document, trust_remote_code=False).get_text_config(decoder=True)
        # transformers names what files of its older versions call otherwise
        settings = json.loads(text.to_json_string(use_diff=False))
    except (AttributeError, Fp8kvError, TypeError, ValueError):  # transformers does not build this config
        settings = dict(text_config(document))
    if isinstance(settings.get("rope_parameters"), dict):
        settings["rope_parameters"].pop("type", None)  # the older name of rope_type
    return {key: value for key, value in settings.items() if not _WITHOUT_EFFECT.fullmatch(key)}
