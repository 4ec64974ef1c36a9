"""Models and variants for which `--attention` can simulate an engine."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from calib.caches.types import Shape
from calib.capture.capabilities import check_queries, engine_class
from calib.choices import AttentionMode
from calib.engines.catalogue import Kernel, find_engine
from calib.errors import InputError
from calib.evaluate.variants import Setup, Variant
from calib.scales.scales import KVScales

_STRATEGIES = {"tensor": "tensor", "attn_head": "KV head", "channel": "channel"}


def check_model(mode: AttentionMode, model: PreTrainedModel, shapes: Sequence[Shape]) -> None:
    """Refuse a model that the engine's kernel does not take, with an InputError."""
    if mode == "exact":
        return
    kernel = _find_kernel(mode)
    if problem := _model_problem(kernel, model, shapes):
        raise InputError(f"--attention {mode}: {problem}; leave --attention out")
    # in 16 bits a query rounds alike whether or not it was multiplied by the softmax scale
    if kernel.queries == "fp8":
        check_queries(engine_class(model.config, type(model).__name__), f"--attention {mode}")


def _model_problem(kernel: Kernel, model: PreTrainedModel, shapes: Sequence[Shape]) -> str | None:
    """Say why the kernel cannot be simulated for the model."""
    if any(Shape(*shape).attention != "heads" for shape in shapes):
        return "this model caches latents (MLA), whose kernels are not simulated"
    sizes = {size for shape in shapes for size in (shape[1], shape[2])}
    wrong = sorted(size for size in sizes if size not in kernel.head_sizes)
    if wrong or any(shape[1] != shape[2] for shape in shapes):
        words = f"head size {wrong[0]}" if wrong else f"K and V of sizes {sorted(sizes)}"
        allowed = f"K and V of one head size, {kernel.head_sizes}"
        return f"{kernel.name} is simulated for {allowed}; this model has {words}"
    if not model.get_decoder()._can_set_attn_implementation():
        return f"{type(model).__name__} calls attention itself, which cannot be replaced"
    return None


def select_variants(
    setup: Setup, variants: Sequence[Variant], names: Sequence[str] | None
) -> tuple[list[Variant], list[str]]:
    """Return the variants that can be measured in the setup's mode, and warnings on all that cannot.

    FP8 caches that the kernel does not take are left out, and refused with an InputError where their scales
    were given or `names` has them. All but FP8 caches of K and V is measured with exact attention.
    """
    if setup.attention == "exact":
        return list(variants), []
    kernel, flag = _find_kernel(setup.attention), f"--attention {setup.attention}"
    caches = {v.name: v.scales for v in variants if v.in_mode and v.scales}
    problems = {name: why for name, scales in caches.items() if (why := _scales_problem(kernel, scales))}
    for variant in variants:
        if variant.name in problems and (variant.kind == "given" or variant.name in (names or ())):
            raise InputError(f"{flag}: '{variant.name}' has {problems[variant.name]}; leave it out")
    measured = [variant for variant in variants if variant.name not in problems]
    warnings = [f"{flag}: '{name}' has {why}: left out" for name, why in problems.items()]
    if exact := ", ".join(variant.name for variant in measured if not variant.in_mode):
        warnings.append(f"{flag}: no whole FP8 cache, so measured with exact attention: {exact}")
    return measured, warnings


def _find_kernel(mode: AttentionMode) -> Kernel:
    return find_engine("vllm").kernels[mode]


def _scales_problem(kernel: Kernel, scales: KVScales) -> str | None:
    """Say what the kernel does not take of such scales."""
    if scales.has_center:
        return f"a mean subtracted from K, which {kernel.name} does not add"
    if scales.strategy not in kernel.strategies:
        allowed = " or ".join(_STRATEGIES[strategy] for strategy in kernel.strategies)
        return f"one scale per {_STRATEGIES[scales.strategy]}, and {kernel.name} takes one per {allowed}"
    if scales.fp8_dtype not in kernel.fp8_types:
        return f"{scales.fp8_dtype} codes, and {kernel.name} takes {' or '.join(kernel.fp8_types)}"
    return None
