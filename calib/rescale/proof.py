"""Proof that a rescaled model is the same: its outputs, and its K and V times their factors.

A norm that multiplies by 1 + weight may round its weight times a power of two. There the proof multiplies the
outputs of the norm instead, which is exact in every dtype: it shows that nothing but that rounding is
different, and `is_held` in `weight_changes.py` bounds the rounding.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention, observe_qkv
from calib.divergence import divergence
from calib.errors import UnsupportedModelError
from calib.files.model_directory import ModelDirectory
from calib.models.config import load_config
from calib.models.load import input_device, load_model
from calib.rescale.weight_changes import Factors, WeightChange

PROBE_TOKENS = 24


@dataclass(frozen=True)
class Observation:
    """Logits, K and V that a model computes from a few tokens, in float32."""

    logits: Tensor  # [1, T, V]
    kv: Mapping[str, tuple[Tensor, Tensor]]  # attention module -> K, V [1, K, T, D]

    def amax(self, part: str) -> float:
        """Return the largest magnitude of k or v in all layers."""
        return max(pair["kv".index(part)].abs().amax().item() for pair in self.kv.values())

    @property
    def is_finite(self) -> bool:
        """Return whether nothing is NaN or infinite, but for -inf in logits, which rules a token out."""
        logits = self.logits.where(~self.logits.isneginf(), 0)
        return all(x.isfinite().all() for x in (logits, *(x for pair in self.kv.values() for x in pair)))


def load_exact(checkpoint: ModelDirectory, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a model in float32, where a power of two changes exponents and nothing else."""
    config = load_config(checkpoint, trust_remote_code)
    model = load_model(checkpoint, config, "float32", "cpu", trust_remote_code)
    for parameter in model.parameters():
        # matrix kernels may add in another order where memory is aligned otherwise, as in a file
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def observe(
    model: PreTrainedModel,
    changes: Iterable[WeightChange] = (),
    parameters: Mapping[str, Tensor] = MappingProxyType({}),
) -> Observation:
    """Run a few tokens, with `parameters` instead of the model's, of any shape alike, and `changes`."""
    kv: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        kv[name] = (key.to("cpu", copy=True), value.to("cpu", copy=True))

    with observe_qkv(model, keep), apply_changes(model, changes) as products:
        inputs = {"input_ids": probe_tokens(model), "use_cache": False}
        logits = functional_call(model, {**parameters, **products}, kwargs=inputs).logits
    return Observation(logits.cpu(), kv)


def kl_between(before: Observation, after: Observation) -> float:
    """Return the nats per token by which the outputs differ."""
    return divergence(*(x.logits.flatten(0, 1) for x in (before, after))).mean().item()


@contextmanager
def apply_changes(model: PreTrainedModel, changes: Iterable[WeightChange]) -> Iterator[dict[str, Tensor]]:
    """Multiply the outputs of norms that add one to their weight; yield the products of other parameters.

    Products have the names of their parameters, and any shape. Both are exact for powers of two.
    """
    changes = list(changes)
    norms = {change.name.rpartition(".")[0]: change.factor for change in changes if change.adds_one}
    with ExitStack() as stack:
        for name, factor in norms.items():
            hook = model.get_submodule(name).register_forward_hook(
                lambda _module, _inputs, x, factor=factor: x * factor.to(x.device, x.dtype)
            )
            stack.callback(hook.remove)
        yield {
            change.name: change.product(model.get_parameter(change.name))
            for change in changes
            if change.name.rpartition(".")[0] not in norms
        }


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """Return random tokens [1, PROBE_TOKENS] int64 to run, always the same ones."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, PROBE_TOKENS), generator=generator).to(input_device(model))


def prove(
    before: Observation,
    after: Observation,
    modules: Mapping[str, CachedAttention],
    factors: Factors,
    refusal: str,
) -> None:
    """Compare bit for bit; a difference is an UnsupportedModelError that begins with `refusal`."""
    if not before.is_finite:
        raise UnsupportedModelError(
            f"{refusal}: NaN or Inf in the model's own K, V or logits; check its weights. Nothing was written"
        )
    problems = []
    owners = {reader: owner for owner, module in modules.items() for reader in module.readers}
    for name, pair in before.kv.items():
        owner = owners.get(name, name)
        heads, repeat = (factors[owner].k, factors[owner].v), modules[owner].kv_repeat
        for part, factor, old, new in zip("KV", heads, pair, after.kv[name], strict=True):
            if not torch.equal(old * factor.repeat_interleave(repeat, 0)[:, None], new):
                problems.append(f"{part} of {name} is not the source's times its factor")
    if not torch.equal(before.logits, after.logits):
        problems.append("its logits are not the source's")
    if problems:
        count = f" ({len(problems) - 1} more problems)" if problems[1:] else ""
        raise UnsupportedModelError(
            f"{refusal}: {problems[0]}{count}: something in it does not follow a factor in front of it. "
            "Nothing was written"
        )
