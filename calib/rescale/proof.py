"""The proof that a rescaled model is the same: its outputs, and its K and V times their factors.

A norm that multiplies by 1 + weight may round its weight times a power of two. There the proof
multiplies what the norm gives instead, which is exact in every dtype: it shows that nothing but
that rounding is different, and `one_plus.py` bounds the rounding.
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
from calib.recipe import Recipe
from calib.rescale.one_plus import Norms
from calib.rescale.products import Factors, Rescaled

PROBE_TOKENS = 24


@dataclass(frozen=True)
class Observed:
    """What a model computes from a few tokens, in float32."""

    logits: Tensor  # [1, T, vocabulary]
    kv: Mapping[str, tuple[Tensor, Tensor]]  # attention module -> K, V [1, K, T, D]

    def amax(self, which: str) -> float:
        """The largest magnitude of K or V in all layers."""
        return max(pair["kv".index(which)].abs().amax().item() for pair in self.kv.values())


def load_exact(checkpoint: ModelDirectory, recipe: Recipe) -> PreTrainedModel:
    """Load a model in float32, where a power of two changes exponents and nothing else."""
    recipe = recipe.model_copy(update={"dtype": "float32"})
    config = load_config(checkpoint, recipe.trust_remote_code)
    model = load_model(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)
    for parameter in model.parameters():
        # matrix kernels may add in another order where memory is aligned otherwise, as in a file
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def observe(
    model: PreTrainedModel,
    changes: Iterable[Rescaled] = (),
    parameters: Mapping[str, Tensor] = MappingProxyType({}),
) -> Observed:
    """Run a few tokens, with `parameters` instead of the model's, and `changes`."""
    kv: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        kv[name] = (key.to("cpu", copy=True), value.to("cpu", copy=True))

    with observe_qkv(model, keep), multiplied(model, changes) as products:
        given = {"input_ids": probe_tokens(model), "use_cache": False}
        logits = functional_call(model, {**parameters, **products}, kwargs=given).logits
    return Observed(logits.cpu(), kv)


def kl_between(before: Observed, after: Observed) -> float:
    """Nats per token by which the outputs differ."""
    return divergence(*(each.logits.flatten(0, 1) for each in (before, after))).mean().item()


@contextmanager
def multiplied(model: PreTrainedModel, changes: Iterable[Rescaled]) -> Iterator[dict[str, Tensor]]:
    """Multiply what norms give that add one to their weight; yield the other parameters' products.

    Both are exact for powers of two.
    """
    changes = list(changes)
    norms = {each.name.rpartition(".")[0]: each.factor for each in changes if each.adds_one}
    with ExitStack() as stack:
        for name, factor in norms.items():
            norm = model.get_submodule(name)
            hook = norm.register_forward_hook(
                lambda _module, _inputs, x, factor=factor: x * factor.to(x.device, x.dtype)
            )
            stack.callback(hook.remove)
        yield {
            each.name: each.product(model.get_parameter(each.name))
            for each in changes
            if each.name.rpartition(".")[0] not in norms
        }


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """The tokens [1, PROBE_TOKENS] that are run, at random, the same for ever."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=generator)
    return tokens.to(input_device(model))


def prove(
    before: Observed,
    after: Observed,
    modules: Mapping[str, CachedAttention],
    factors: Factors,
    what: str,
) -> None:
    """Compare bit for bit; UnsupportedModelError, which begins with `what`, for any difference."""
    problems = []
    for name, pair in before.kv.items():
        repeat = modules[name].kv_repeat
        of_heads = (factors[name].k, factors[name].v)
        for which, heads, old, new in zip("KV", of_heads, pair, after.kv[name], strict=True):
            factor = heads.repeat_interleave(repeat, 0)[:, None]
            if not torch.equal(old * factor, new):
                problems.append(f"{which} of {name} is not the source's times its factor")
    if not torch.equal(before.logits, after.logits):
        problems.append("its logits are not the source's")
    if problems:
        more = f" ({len(problems) - 1} more problems)" if problems[1:] else ""
        raise UnsupportedModelError(
            f"{what}: {problems[0]}{more}, so something in it does not follow a factor in front "
            "of it. Nothing was written"
        )


def prove_written(model: PreTrainedModel, rounded: Norms, what: str) -> None:
    """Compare the weights of norms in a written model with the rounded ones that were meant."""
    for change, weight in rounded:
        if not torch.equal(model.get_parameter(change.name).cpu(), change.product(weight).float()):
            raise UnsupportedModelError(
                f"{what}: '{change.name}' was not written as it was rounded. Nothing was written"
            )
