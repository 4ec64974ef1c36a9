"""The measurement: every variant beside the reference, on the same tokens, in one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.eval.continuation import Passkey, continue_greedily, retrieves, same_tokens
from calib.eval.divergence import Divergence, compare
from calib.eval.layers import LayerError, layer_errors
from calib.eval.values import LayerValues
from calib.eval.variants import Variant
from fp8kv_runtime.hf import Backend

REFERENCE = "reference"


@dataclass(frozen=True)
class Material:
    """What is read: held-out documents, prompts to continue, passkeys to find."""

    documents: Sequence[Tensor]  # [T] each
    prompts: Sequence[Tensor]  # [T] each, all of one length
    new_tokens: int
    passkeys: Sequence[Passkey]
    layer_documents: int  # how many of the documents the per-layer errors are taken from


@dataclass
class Measured:
    """What was measured of one variant."""

    variant: Variant | None  # None: the reference itself
    documents: list[Divergence] = field(default_factory=list)
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
        reference = _logits(model, token_ids)
        found[REFERENCE].documents.append(compare(reference, reference, token_ids))
        for variant in variants:
            with variant.applied(model, backend):
                logits = _logits(model, token_ids)
            found[variant.name].documents.append(compare(reference, logits, token_ids))
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
    measured.found_passkeys = [retrieves(model, tokenizer, key) for key in material.passkeys]


def _logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=token_ids[None].to(model.device), use_cache=False).logits
    return logits[0]
