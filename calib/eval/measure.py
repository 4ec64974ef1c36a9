"""The measurement: every variant beside the reference, on the same tokens, in one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.eval.continuation import continue_greedily, retrieve, same_tokens
from calib.eval.divergence import Divergence
from calib.eval.layers import LayerError, layer_errors
from calib.eval.material import Material
from calib.eval.reading import read
from calib.eval.values import LayerValues
from calib.eval.variants import REFERENCE, Variant
from fp8kv_runtime.hf import Backend


@dataclass
class Measured:
    """What was measured of one variant."""

    variant: Variant | None  # None: the reference itself
    documents: list[Divergence] = field(default_factory=list)
    long_documents: list[Divergence] = field(default_factory=list)
    same_tokens: list[int] = field(default_factory=list)
    found_passkeys: list[bool] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    layers: dict[int, LayerError] = field(default_factory=dict)
    values: dict[int, LayerValues] = field(default_factory=dict)  # of the reference


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    variants: Sequence[Variant],
    material: Material,
    backend: Backend,
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, Measured]:
    """Measure all variants; the reference is the first entry."""
    found = {REFERENCE: Measured(None), **{v.name: Measured(v) for v in variants}}
    for number, token_ids in enumerate(material.documents):
        progress(f"document {number + 1} of {len(material.documents)}")
        for name, divergence in read(model, token_ids, variants, backend).items():
            found[name].documents.append(divergence)
    for token_ids in material.long_documents:
        progress(f"{len(token_ids):,} tokens at once")
        served = [variant for variant in variants if variant.served]
        for name, divergence in read(model, token_ids, served, backend).items():
            found[name].long_documents.append(divergence)
    progress("per-layer errors")
    errors, found[REFERENCE].values = layer_errors(
        model, material.documents[: material.layer_documents], variants
    )
    for name, layers in errors.items():
        found[name].layers = layers
    _continue(model, tokenizer, found, material, backend, progress)
    return found


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    found: dict[str, Measured],
    material: Material,
    backend: Backend,
    progress: Callable[[str], None],
) -> None:
    """Greedy text and passkeys, for what can generate: the reference and whole FP8 caches."""
    reference = found[REFERENCE]
    for name, measured in found.items():
        variant = measured.variant
        if variant is not None and not variant.generates:
            continue
        progress(f"text: {name}")
        if variant is None:
            _write(model, tokenizer, measured, material)
        else:
            with variant.applied(model, backend):
                _write(model, tokenizer, measured, material)
        pairs = zip(reference.texts, measured.texts, strict=True)
        measured.same_tokens = [same_tokens(a, b) for a, b in pairs]


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    measured: Measured,
    material: Material,
) -> None:
    if material.prompts:
        measured.texts = continue_greedily(model, material.prompts, material.new_tokens)
    measured.found_passkeys = retrieve(model, tokenizer, material.passkeys)
