"""Replace a model's attention function, and leave no trace.

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
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from fp8kv_runtime.errors import AttentionError

# replacement(original, module, query, key, value, *args, **kwargs) -> what original returns
# query [B, H, T, D]; key, value [B, K, N, D], or repeated by a model that does so; of latent attention the
# latent [B, 1, N, R] and k_pe [B, 1, N, P], the shared and rotated part of the keys
Replacement = Callable[..., Any]

# attention classes whose engines multiply scores by head_dim ** -0.5, whatever scaling theirs has
_PLAIN_IN_ENGINES = frozenset({"OPTAttention"})
_LOCK = threading.Lock()


@contextmanager
def swap_attention(model: PreTrainedModel, replacement: Replacement) -> Iterator[None]:
    """Route every attention call of `model`'s decoder through `replacement` inside the block.

    `replacement(original, module, query, key, value, ...)` gets the original attention function as
    its first argument. On exit, also after an exception, the model is exactly as before.

    Raises:
        AttentionError: another thread is in such a block, or the model's attention implementation
            is one that transformers does not know.
    """
    decoder = model.get_decoder()
    swap = _swap_interface if decoder._can_set_attn_implementation() else _swap_sdpa
    with hold(decoder), _know_layers(decoder), swap(decoder, replacement):
        yield


@contextmanager
def _know_layers(decoder: nn.Module) -> Iterator[None]:
    """Let attention of a block that several layers share, as Zamba's, have the `layer_idx` of its caller."""

    def note(module: Any, args: Any, kwargs: Any) -> None:
        module.layer_idx = kwargs.get("layer_idx", module.layer_idx)

    with ExitStack() as stack:
        for module in decoder.modules():
            if (index := getattr(module, "layer_idx", 0)) in (None, -1):
                stack.callback(setattr, module, "layer_idx", index)
                stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


@contextmanager
def swap_forward(decoder: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let `replacement(forward, *args, **kwargs)` run for the decoder's `forward` in the block.

    An AttentionError: it is replaced already, or another thread holds the decoder.
    """
    if hasattr(decoder.forward, "replaces_forward"):
        raise AttentionError("this model is inside an fp8_attention block: leave that one first")
    original, own = decoder.forward, vars(decoder).get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    vars(forward)["replaces_forward"] = True
    with hold(decoder):
        vars(decoder)["forward"] = forward
        try:
            yield
        finally:
            if own is None:
                del vars(decoder)["forward"]
            else:
                vars(decoder)["forward"] = own


class _Holder:
    """The thread that works on a decoder, in blocks that may nest; a decoder with one cannot be copied."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.num_blocks = 0

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AttentionError(  # the copy would run the original attention
            "this model's attention is replaced, by fp8_attention or a measurement: copy the "
            "model before that block, or after it"
        )


@contextmanager
def hold(decoder: nn.Module) -> Iterator[None]:
    """Keep other threads from replacing the attention of `decoder` in the block, with an AttentionError."""
    with _LOCK:
        holder = vars(decoder).setdefault("_fp8kv_holder", _Holder())
        if holder.thread != threading.get_ident():
            raise AttentionError(
                "another thread measures this model, or runs it with an FP8 cache: wait for it, or "
                "give each thread a model of its own"
            )
        holder.num_blocks += 1
    try:
        yield
    finally:
        with _LOCK:
            holder.num_blocks -= 1
            if holder.num_blocks == 0:
                del vars(decoder)["_fp8kv_holder"]


@contextmanager
def _swap_interface(decoder: nn.Module, replacement: Replacement) -> Iterator[None]:
    """Register the replacement under a name of its own, and put this name into the decoder's configs."""
    with ExitStack() as stack:
        for module in filter(is_latent, decoder.modules()):
            if "expand_kv" not in vars(module):  # or another block has put it off
                vars(module)["expand_kv"] = lambda latent, k_pe: (latent, k_pe)
                stack.callback(delattr, module, "expand_kv")
        configs = (getattr(module, "config", None) for module in decoder.modules())
        for config in {id(c): c for c in configs if isinstance(c, PreTrainedConfig)}.values():
            implementation = config._attn_implementation
            if implementation is None:
                continue
            if implementation != "eager" and implementation not in AttentionInterface():
                raise AttentionError(
                    f"transformers knows no attention implementation '{implementation}', which the "
                    "model's config names: register it, or call model.set_attn_implementation"
                )
            name = _Name.of(implementation, replacement)
            AttentionInterface.register(name, _attention_function(implementation, replacement))
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
    """A replacement's own name, which is also equal to the name of the original.

    This breaks on purpose the rule that equal objects have equal hashes. Models of transformers compare
    the name: DeepSeek-V3.2 masks what its indexer leaves out `if ... in ("eager", "sdpa")`, which the
    replacement needs as the original does. `AttentionInterface` is a dict of names, in which the hash
    must find the replacement and never the original: a dict compares hashes before it asks `__eq__`.
    Others look for "flash" in the name, which begins with the original's.
    """

    # plain strings, as torch.compile cannot look into this one
    text = original = ""

    @classmethod
    def of(cls, original: str, replacement: Replacement) -> "_Name":
        name = cls(f"{original}_fp8kv_{id(replacement):x}")
        name.text, name.original = str(name), original
        return name

    def __eq__(self, text: object) -> bool:
        return text == self.text or text == self.original

    def __ne__(self, text: object) -> bool:
        return text != self.text and text != self.original

    __hash__ = str.__hash__  # of the own name alone


def is_latent(module: nn.Module) -> bool:
    """Return whether an attention module caches a latent, which its `expand_kv` turns into K and V."""
    return callable(getattr(module, "expand_kv", None))


def _attention_function(implementation: str, replacement: Replacement) -> Replacement:
    registered = AttentionInterface._global_mapping.get(implementation)
    is_outermost = not isinstance(implementation, _Name)

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = registered
        if original is None:
            # "eager" is not registered: each modelling file passes its own as the default
            forward: Any = inspect.unwrap(type(module).forward)
            original = forward.__globals__["eager_attention_forward"]
        if is_outermost and "expand_kv" in vars(module):  # which `_swap_interface` has put off
            original = functools.partial(_expand_and_attend, original)
        return replacement(original, module, *args, **kwargs)

    return attend


def _expand_and_attend(
    original: Replacement, module: Any, query: Tensor, latent: Tensor, k_pe: Tensor, *args: Any, **kwargs: Any
) -> Any:
    key, value = type(module).expand_kv(module, latent, k_pe)
    return original(module, query, key, value, *args, **kwargs)


@contextmanager
def _swap_sdpa(decoder: nn.Module, replacement: Replacement) -> Iterator[None]:
    """Hand `scaled_dot_product_attention` calls of the decoder's attention modules to the replacement."""
    running: list[nn.Module] = []  # attention modules on the call stack
    with ExitStack() as stack:
        for module in decoder.modules():
            if hasattr(module, "layer_idx"):
                # a hook that returns a value would replace the module's inputs or outputs
                enter = module.register_forward_pre_hook(lambda module, _: running.append(module))
                leave = module.register_forward_hook(lambda *_: running.__delitem__(-1), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        stack.enter_context(_SDPAMode(running, replacement))
        yield


class _SDPAMode(TorchFunctionMode):
    """The mode of torch in which a running attention module reaches the replacement."""

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

        def original(_module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            attended: Tensor = func(*args, **kwargs)
            return attended

        return self._replacement(original, self._running[-1], *args, **kwargs)


@dataclass(frozen=True)
class EngineQuery:
    """The query that an engine's attention gets, and the softmax scale that goes with it.

    Of most classes it is that of transformers. OPT's multiplies its query before the attention function
    is called, with scaling 1.0; engines hand on the plain query, and multiply scores by head_dim ** -0.5.
    """

    query: Tensor  # [B, H, T, D]
    scaling: float | None  # None: head_dim ** -0.5
    original: Tensor  # [B, H, T, D], that of the model
    factor: float = 1.0  # by which `query` is larger

    @classmethod
    def of(cls, module: nn.Module, query: Tensor, scaling: float | None) -> "EngineQuery":
        """Make it of the `query` [B, H, T, D] that `module` attends with at `scaling`."""
        own = query.shape[-1] ** -0.5
        names = {kind.__name__ for kind in type(module).__mro__}
        if scaling in (None, own) or not names & _PLAIN_IN_ENGINES:
            return cls(query, scaling, query)
        factor = scaling / own
        return cls(query * factor, own, query, factor)

    def undo(self, rounded: Tensor) -> Tensor:
        """Return the model's query for `rounded` [B, H, T, D], which an engine made of `query`."""
        if rounded is self.query:
            return self.original
        return rounded if self.factor == 1 else rounded / self.factor
