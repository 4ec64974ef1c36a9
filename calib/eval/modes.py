"""Which models and variants `--attention` can simulate an engine for."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from calib.caches.types import Shape
from calib.capture.capabilities import check_queries, engine_class
from calib.choices import AttentionMode, FP8Name, Strategy
from calib.errors import InputError
from calib.eval.variants import Setup, Variant
from calib.scales.scales import KVScales


class _Kernel(NamedTuple):
    """What an engine's kernel takes, by the sources named in fp8kv_runtime/engine_attention.py."""

    name: str
    strategies: tuple[Strategy, ...]
    takes: str  # the same in words
    fp8_dtypes: tuple[FP8Name, ...]
    takes_head: Callable[[int], bool]
    heads: str  # the same in words


_TRITON = _Kernel(
    "vLLM's Triton kernel",
    ("tensor",),
    "one per tensor",  # `supports_per_head_quant_scales` of its backend is false
    ("e4m3fn", "e4m3fnuz"),
    lambda size: size >= 32,
    "32 or more",
)
_KERNELS = {
    "fa3": _Kernel(
        "FlashAttention 3",
        ("tensor", "attn_head"),
        "one per tensor or KV head",
        ("e4m3fn",),
        lambda size: size % 16 == 0 and size <= 256,
        "a multiple of 16, at most 256",
    ),
    "vllm_triton": _TRITON,
    "vllm_triton_fp8": _TRITON,
}


def check_model(mode: AttentionMode, model: PreTrainedModel, shapes: Sequence[Shape]) -> None:
    """Refuse a model that the engine's kernel does not take, with an InputError."""
    if mode == "exact":
        return
    kernel, refused = _KERNELS[mode], f"--attention {mode}: "
    if any(Shape(*shape).attention != "heads" for shape in shapes):
        raise InputError(
            f"{refused}this model caches latents (MLA), whose kernels are others and are not "
            "simulated; leave --attention out"
        )
    sizes = {size for shape in shapes for size in (shape[1], shape[2])}
    wrong = sorted(size for size in sizes if not kernel.takes_head(size))
    if wrong or any(shape[1] != shape[2] for shape in shapes):
        given = f"head size {wrong[0]}" if wrong else f"K and V of sizes {sorted(sizes)}"
        raise InputError(
            f"{refused}{kernel.name} is simulated for K and V of one head size, {kernel.heads}; "
            f"this model has {given}; leave --attention out"
        )
    if not model.get_decoder()._can_set_attn_implementation():
        raise InputError(
            f"{refused}{type(model).__name__} calls attention itself, which cannot be replaced; "
            "leave --attention out"
        )
    # in 16 bits a query rounds alike whether or not it was multiplied by the softmax scale
    if mode != "vllm_triton":
        check_queries(engine_class(model.config, type(model).__name__), f"--attention {mode}")


def in_mode(
    setup: Setup, variants: Sequence[Variant], asked: Sequence[str] | None
) -> tuple[list[Variant], list[str]]:
    """The variants that can be measured in the setup's mode, and warnings about the others.

    FP8 caches that the kernel does not take are left out, and refused with an InputError where they
    were given or `asked` for. What is no FP8 cache of K and V is measured with exact attention.
    """
    mode = setup.attention
    if mode == "exact":
        return list(variants), []
    reasons = {v.name: _unfit(mode, v.scales) for v in variants if v.in_mode and v.scales}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    named = [v.name for v in variants if v.kind == "given" or v.name in (asked or ())]
    if wrong := [name for name in named if name in left_out]:
        raise InputError(f"--attention {mode}: '{wrong[0]}' has {left_out[wrong[0]]}; leave it out")
    kept = [variant for variant in variants if variant.name not in left_out]
    exact = ", ".join(v.name for v in kept if not v.in_mode)
    lines = [f"'{name}' has {why}: left out" for name, why in left_out.items()]
    if exact:
        lines.append(f"no whole FP8 cache, so measured with exact attention: {exact}")
    return kept, [f"--attention {mode}: {line}" for line in lines]


def _unfit(mode: AttentionMode, scales: KVScales) -> str | None:
    """Why the kernel does not take such scales."""
    kernel = _KERNELS[mode]
    if scales.has_center:
        return f"a mean subtracted from K, which {kernel.name} does not add"
    if scales.strategy not in kernel.strategies:
        names = {"attn_head": "one scale per KV head", "channel": "one scale per channel"}
        return f"{names[scales.strategy]}, and {kernel.name} takes {kernel.takes}"
    if scales.fp8_dtype not in kernel.fp8_dtypes:
        return f"{scales.fp8_dtype} codes, and {kernel.name} takes {' or '.join(kernel.fp8_dtypes)}"
    return None
