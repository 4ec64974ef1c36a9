"""The marks of a checkpoint: of norms, embedding, what K and V come from, attention's outputs."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from calib.errors import Fp8kvError, InputError
from calib.files.model_directory import ModelDirectory
from calib.files.names import is_of_cache, is_of_senses
from calib.files.tensors import Source
from calib.models.config import read_config
from calib.same_model.probing import (
    is_by_row,
    probe_rows,
    probe_vector,
    readable_weights,
    sampled,
    sampled_heads,
)
from calib.same_model.record import Mark, Marks

_FUSED = {"qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"}
_OUTPUTS = {"o_proj", "dense", "out_proj"}  # of attention, whose V reads no norm
_LATENT = "kv_a_proj_with_mqa"  # rows of the latent, then of k_pe
_CACHED = {"k_proj", "v_proj", _LATENT, *_FUSED}
_ROWS = 8
_TOKENS = 256  # whose embeddings are marked: a vocabulary may grow
_HEADS = ("num_attention_heads", "n_head", "n_heads")
# of other weights that read a norm, which say whether factors were moved there from the norm
_OTHERS, _OTHER_ROWS = 4, 2
_EMBEDDING = re.compile(r"(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
_LAYER = re.compile(r"(?P<layer>[^.]+\.(?P<index>\d{1,6}))\.(?P<rest>.+)")
_BEFORE_ATTENTION = ("input_layernorm", "ln_1", "attention_norm", "ln_attn", "norm_1", "norm1")
_BEFORE_MLP = (
    *("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ffn_norm", "ln_mlp"),
    *("norm_2", "norm2"),
)
_MLP = {"mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "experts"}

# settings that change neither K nor V, or that tensors show
_SILENT = re.compile(
    r"_.*|architectures|torch_dtype|dtype|transformers_version|auto_map|id2label|label2id"
    r"|quantization_config|vocab_size|\w*_token_ids?|\w*drop(?:out)?|\w*bias|use_cache|return_dict"
    r"|output_\w+|router_\w+|initializer_\w+|pretraining_tp|max_position_embeddings|tie_\w+"
)

Weights = Mapping[str, Source]  # by their names below the language model


def marks_or_none(checkpoint: ModelDirectory, modules: Iterable[str]) -> dict[str, Any] | None:
    """Marks to keep with a calibration; None if the model's K and V cannot be compared."""
    try:
        return take_marks(checkpoint, modules).to_json()
    except Fp8kvError:
        return None


def take_marks(checkpoint: ModelDirectory, modules: Iterable[str]) -> Marks:
    """The marks of `checkpoint`, whose attention `modules` transformers calls so.

    Reads vectors, and a few rows of matrices. InputError where a module has no weight for K and V
    that can be read.
    """
    prefixes = [checkpoint.attention_prefix(module) for module in modules]
    above = _above_layers(prefixes[0])
    weights = _below(above, readable_weights(checkpoint), checkpoint.num_layers)
    layers: dict[str, list[str]] = {}
    for name in weights:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(match["layer"], []).append(name)
    marks = {name: probe_vector(s) for name, s in weights.items() if len(s.shape) == 1}
    marks |= {
        name: probe_rows(source, sampled(min(source.shape[0], _TOKENS), _ROWS))
        for name, source in weights.items()
        if is_embedding(name)
    }
    settings = settings_of(checkpoint.path, checkpoint.config)
    for layer, names in layers.items():
        matrices = [name for name in names if len(weights[name].shape) == 2]
        marks |= _readers(layer, matrices, weights, settings)
    for prefix in prefixes:
        inner = f"{prefix.removeprefix(above)}."
        if not any(name.startswith(inner) and is_cached(name) for name in marks):
            raise InputError(f"'{checkpoint.path}' has no weight for K and V of '{prefix}' to read")
    return Marks(checkpoint.num_layers or len(layers), marks, settings)


def not_compared(checkpoint: ModelDirectory, base: Marks, found: Marks) -> list[str]:
    """What matrices in layers of `checkpoint` are called that `base` or `found` has no mark of."""
    marked = {name.rpartition(".")[0] for name in base.tensors.keys() & found.tensors.keys()}
    matrices = (name for name, entry in checkpoint.entries.items() if len(entry.shape) > 1)
    inner = {
        match["layer"] + "." + match["rest"].rpartition(".")[0]
        for name in matrices
        if (match := _LAYER.search(name)) and not (is_of_senses(name) or is_of_cache(name))
        if int(match["index"]) < found.layers
    }
    return sorted({module.rpartition(".")[2] for module in inner - marked})


def is_cached(name: str) -> bool:
    """Whether K or V comes from the weight called so."""
    return name.endswith(".weight") and name.split(".")[-2] in _CACHED


def is_output(name: str) -> bool:
    """Whether the weight called so is attention's output, which K and V of later layers see."""
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in _OUTPUTS and _MLP.isdisjoint(parts)


def is_embedding(name: str) -> bool:
    """Whether the weight called so is the embedding of tokens."""
    return _EMBEDDING.fullmatch(name) is not None


def norm_of(name: str, known: Mapping[str, object]) -> str | None:
    """The norm among `known` that the matrix `name` reads, without `.weight`; None: none known.

    A layer without a norm before attention has none before its MLP either.
    """
    match = _LAYER.fullmatch(name)
    if match is None or is_output(name):
        return None
    own, before = match["layer"], []
    if not _MLP.isdisjoint(match["rest"].split(".")):
        before = [f"{own}.{norm}" for norm in _BEFORE_MLP if f"{own}.{norm}.weight" in known]
    first = [f"{own}.{norm}" for norm in _BEFORE_ATTENTION if f"{own}.{norm}.weight" in known]
    return next(iter(before or first), None) if first else None


def settings_of(directory: Path, written: dict[str, Any]) -> dict[str, Any]:
    """What the language model's config, `written` in `directory`, says of how K and V are made."""
    try:
        config = read_config(directory, written, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
        # transformers names what files of its older versions call otherwise
        says = json.loads(text.to_json_string(use_diff=False))
    except (Fp8kvError, TypeError, ValueError):
        nested = written.get("text_config")
        says = dict(nested if isinstance(nested, dict) else written)
    if isinstance(says.get("rope_parameters"), dict):
        says["rope_parameters"].pop("type", None)  # the older name of rope_type
    return {key: value for key, value in says.items() if not _SILENT.fullmatch(key)}


def _above_layers(prefix: str) -> str:
    """`model.` of `model.layers.0.self_attn`."""
    match = re.fullmatch(r"(?P<above>(?:.+?\.)?)[^.]+\.\d{1,6}\..+", prefix)
    if match is None:
        raise InputError(f"'{prefix}' is in no layer with a number")
    return match["above"]


def _below(above: str, weights: Weights, layers: int | None) -> dict[str, Source]:
    found = {}
    for name, source in weights.items():
        inner = name.removeprefix(above)
        match = _LAYER.fullmatch(inner)
        # further layers draft tokens, and tools drop them
        is_more = match is not None and layers is not None and int(match["index"]) >= layers
        strange = is_of_senses(name) or is_of_cache(name) or name.endswith("inv_freq")
        if name.startswith(above) and not (is_more or strange):
            found[inner] = source
    return found


def _readers(layer: str, names: list[str], weights: Weights, settings: Mapping[str, Any]) -> dict[str, Mark]:
    """Marks of the matrices in a layer that read the hidden state, K's and V's among them."""
    norm = norm_of(f"{layer}.k_proj", weights)
    cached = [name for name in names if is_cached(name)]
    outputs = [name for name in names if is_output(name) and is_by_row(weights[name])]
    sizes = {weights[f"{norm}.weight"].shape[0]} if norm else {weights[n].shape[1] for n in cached}
    found = {}
    for name in (*cached, *islice(_others(names, weights, sizes), _OTHERS)):
        if weights[name].shape[1] not in sizes:
            raise InputError(f"'{name}' does not read the layer's norm")
        factor, bias = _norm(norm_of(name, weights), weights)
        places = _places(name, weights[name].shape, settings)
        found[name] = probe_rows(weights[name], places, factor, bias)
    for name in outputs if cached else ():
        found[name] = probe_rows(weights[name], sampled(weights[name].shape[0], _ROWS))
    return found


def _places(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> list[int]:
    if name.split(".")[-2] in _FUSED:
        heads = next((settings[key] for key in _HEADS if type(settings.get(key)) is int), 0)
        head_dim = settings.get("head_dim") or (shape[1] // heads if heads else 0)
        if head_dim and heads and shape[0] % head_dim == 0 and shape[0] // head_dim >= heads + 2:
            return sampled_heads(shape[0], heads, head_dim)
        return sampled(shape[0], 3 * _ROWS)
    if name.split(".")[-2] == _LATENT:
        return sampled(shape[0], 3 * _ROWS)
    heads = settings.get("num_key_value_heads")
    heads = heads if type(heads) is int and 0 < heads <= shape[0] else 1
    return sampled(shape[0], max(_ROWS, heads) if is_cached(name) else _OTHER_ROWS)


def _others(names: list[str], weights: Weights, sizes: set[int]) -> Iterator[str]:
    for name in sorted(names):
        reads_none = name.split(".")[-2] in {*_OUTPUTS, "down_proj"}
        fits = weights[name].shape[1] in sizes and is_by_row(weights[name])
        if fits and not (is_cached(name) or reads_none):
            yield name


def _norm(name: str | None, weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    read = (weights.get(f"{name}.{part}") for part in ("weight", "bias"))
    factor, bias = (None if source is None else source.read().float() for source in read)
    return factor, bias
