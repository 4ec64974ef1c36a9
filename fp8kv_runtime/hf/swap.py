"""Stand in for a model's attention function, and leave no trace.

transformers hands K, V and Q to one attention function after RoPE and QK-norm: what an engine
caches. Models that call `scaled_dot_product_attention` themselves are met there instead. Multi-head
latent attention (MLA) caches a latent, from which `expand_kv` makes K and V for that function: it
is put off, so that a replacement meets the latent.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from fp8kv_runtime.errors import AttentionError

# replacement(original, module, query, key, value, *args, **kwargs) -> what original returns
# query [B, H, T, D]; key, value [B, K, T, D], of latent attention the latent [B, 1, T, R] and k_pe
# [B, 1, T, P], the shared and rotated part of the keys
Replacement = Callable[..., Any]

# of each decoder, the threads that stand in for its attention: nested blocks are of one
_THREADS: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
_LOCK = threading.Lock()


@contextmanager
def swap_attention(model: PreTrainedModel, replacement: Replacement) -> Iterator[None]:
    """Route every attention call of `model`'s decoder through `replacement` inside the block.

    `replacement(original, module, query, key, value, ...)` gets the function it stands for as its
    first argument. On exit, also after an exception, the model is exactly as before.

    Raises:
        AttentionError: another thread is in such a block, or the model's attention implementation
            is one that transformers does not know.
    """
    decoder = model.get_decoder()
    swap = _swap_interface if decoder._can_set_attn_implementation() else _swap_sdpa
    with alone(decoder), _uncopied(decoder), swap(decoder, replacement):
        yield


class _Uncopied:
    """An attribute by which a model cannot be copied: the copy would run the original."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AttentionError(
            "this model's attention is stood in for, by fp8_attention or a measurement: copy the "
            "model before that block, or after it"
        )


@contextmanager
def _uncopied(decoder: nn.Module) -> Iterator[None]:
    attributes = vars(decoder)
    is_outer = "_fp8kv_uncopied" not in attributes
    attributes.setdefault("_fp8kv_uncopied", _Uncopied())
    try:
        yield
    finally:
        if is_outer:
            del attributes["_fp8kv_uncopied"]


@contextmanager
def alone(decoder: nn.Module) -> Iterator[None]:
    """Keep other threads from standing in for the attention of `decoder` while the block runs.

    Raises:
        AttentionError: another thread does.
    """
    own = threading.get_ident()
    with _LOCK:
        threads = _THREADS.setdefault(decoder, [])
        if threads and threads[0] != own:
            raise AttentionError(
                "another thread measures this model, or runs it with an FP8 cache: wait for it, or "
                "give each thread a model of its own"
            )
        threads.append(own)
    try:
        yield
    finally:
        threads.remove(own)


@contextmanager
def swap_forward(decoder: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let `replacement(forward, *args, **kwargs)` run for the decoder's `forward` in the block.

    Raises:
        AttentionError: another replacement stands in for it.
    """
    if hasattr(decoder.forward, "stands_in"):
        raise AttentionError("this model is inside an fp8_attention block: leave that one first")
    original, own = decoder.forward, vars(decoder).get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    vars(forward)["stands_in"] = True
    vars(decoder)["forward"] = forward
    try:
        with _uncopied(decoder):
            yield
    finally:
        if own is None:
            del vars(decoder)["forward"]
        else:
            vars(decoder)["forward"] = own


@contextmanager
def _swap_interface(decoder: nn.Module, replacement: Replacement) -> Iterator[None]:
    with ExitStack() as stack:
        for module in filter(is_latent, decoder.modules()):
            if "expand_kv" not in vars(module):  # or another stand-in put it off
                vars(module)["expand_kv"] = _as_cached
                stack.callback(delattr, module, "expand_kv")
        for config in _attention_configs(decoder):
            implementation = config._attn_implementation
            if implementation != "eager" and implementation not in AttentionInterface():
                raise AttentionError(
                    f"transformers knows no attention implementation '{implementation}', which the "
                    "model's config names: register it, or call model.set_attn_implementation"
                )
            name = _Name.of(implementation, replacement)
            AttentionInterface.register(name, _stand_in(implementation, replacement))
            stack.callback(AttentionInterface._global_mapping.pop, name, None)
            # without a mask function of the same name transformers drops the padding mask
            mask = AttentionMaskInterface._global_mapping.get(implementation)
            if mask is not None:
                AttentionMaskInterface.register(name, mask)
                stack.callback(AttentionMaskInterface._global_mapping.pop, name, None)
            config._attn_implementation_internal = name
            stack.callback(setattr, config, "_attn_implementation_internal", implementation)
        yield


class _Name(str):
    """A name of its own for a stand-in, which models take for that of the original.

    They ask whether it is "eager" or "sdpa", or has "flash" in it, for instance to know whether
    they must mask what their indexer leaves out.
    """

    # plain strings, as torch.compile cannot look into this one
    text = original = ""

    @classmethod
    def of(cls, original: str, replacement: Replacement) -> "_Name":
        name = cls(f"{original}_fp8kv_{id(replacement):x}")
        name.text, name.original = str(name), original
        return name

    def __eq__(self, other: object) -> bool:
        return other == self.text or other == self.original

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # tables find the stand-in
        return hash(self.text)


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module caches a latent, which its `expand_kv` turns into K and V."""
    return callable(getattr(module, "expand_kv", None))


def _as_cached(latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    return latent, k_pe


def _expanding(original: Replacement) -> Replacement:
    """`original` for a module that is given its latent and k_pe."""

    def attend(
        module: nn.Module, query: Tensor, latent: Tensor, k_pe: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        of_class: Any = type(module)
        key, value = of_class.expand_kv(module, latent, k_pe)
        return original(module, query, key, value, *args, **kwargs)

    return attend


def _stand_in(implementation: str, replacement: Replacement) -> Replacement:
    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = AttentionInterface._global_mapping.get(implementation) or _eager(module)
        if is_latent(module) and not isinstance(implementation, _Name):
            original = _expanding(original)
        return replacement(original, module, *args, **kwargs)

    return attend


def _eager(module: nn.Module) -> Callable[..., Any]:
    # "eager" is not registered: each modelling file passes its own as the default
    forward = inspect.unwrap(type(module).forward)
    eager: Callable[..., Any] = forward.__globals__["eager_attention_forward"]
    return eager


def _attention_configs(decoder: nn.Module) -> list[Any]:
    configs = [getattr(module, "config", None) for module in decoder.modules()]
    distinct = {id(c): c for c in configs if isinstance(c, PreTrainedConfig)}
    return [c for c in distinct.values() if c._attn_implementation is not None]


@contextmanager
def _swap_sdpa(decoder: nn.Module, replacement: Replacement) -> Iterator[None]:
    running: list[nn.Module] = []  # attention modules on the call stack
    layers = [module for module in decoder.modules() if hasattr(module, "layer_idx")]
    with ExitStack() as stack:
        for module in layers:
            # a hook that returns a value would replace the module's inputs or outputs
            enter = module.register_forward_pre_hook(lambda module, _: running.append(module))
            leave = module.register_forward_hook(lambda *_: running.__delitem__(-1), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(_SDPAMode(running, replacement))
        yield


class _SDPAMode(TorchFunctionMode):
    """Hands `scaled_dot_product_attention` calls of a running attention module to `replacement`."""

    def __init__(self, running: list[nn.Module], replacement: Replacement) -> None:
        super().__init__()
        self._running = running
        self._replacement = replacement

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or not self._running:
            return func(*args, **kwargs)

        def original(_module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            attended: torch.Tensor = func(*args, **kwargs)
            return attended

        return self._replacement(original, self._running[-1], *args, **kwargs)
