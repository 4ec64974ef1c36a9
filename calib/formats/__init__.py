"""Every format that engines load, in one table: `FORMATS`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from calib.choices import FormatName, FP8Name, Reduce, Strategy
from calib.engines.catalogue import Engine, find_engine
from calib.files.cache_type import FP8_DIVISOR
from calib.files.config import find_quantization_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import JSON_FILE, layer_of
from calib.files.skipped_layers import skipped_layers
from calib.formats.base import BAKE, Export, Format, FormatRefusal, ScaledModel, WayOut
from calib.formats.compressed_tensors import compressed_tensors, sglang
from calib.formats.modelopt import modelopt, nvfp4, trtllm
from calib.formats.scales_json import scales_json, tgi
from calib.models.quantized.weights import split_weights
from calib.recipe import Recipe
from calib.scales.scales import KVScales

__all__ = ["DRAFT_LEFT_OUT", "FORMATS", "Export", "Format", "check_latent", "check_recipe", "export"]

DRAFT_LEFT_OUT = "scales of the layer that drafts tokens (MTP) are left out; calibrate again to have them"


def check_recipe(name: FormatName, recipe: Recipe) -> None:
    """Refuse what the format cannot express of the scales that `recipe` asks for."""
    has_q, reduce = recipe.targets == "qkv", recipe.export.reduce
    _check(name, recipe.strategy, recipe.fp8_dtype, has_q, recipe.center_keys, reduce)


def _check(
    name: FormatName, strategy: Strategy, fp8_dtype: FP8Name, has_q: bool, has_center: bool, reduce: Reduce
) -> None:
    """Refuse what the format cannot express, before anything is measured."""
    target = FORMATS[name]
    if fp8_dtype not in target.fp8_dtypes:
        problem = f"it holds {' or '.join(target.fp8_dtypes)} scales; these are for {fp8_dtype}"
        formats = tuple(other for other in FORMATS if fp8_dtype in FORMATS[other].fp8_dtypes)
        ways = [WayOut("fp8_dtype", target.fp8_dtypes[:1]), WayOut("format", formats)]
    elif has_q and not target.reads_q:
        problem = "it holds no query scales"
        ways = [WayOut("targets", ("kv",)), WayOut("format", ("vllm",))]
    elif has_center and not target.reads_center:
        problem = f"nothing is subtracted from K in {target.engine}"
        ways = [WayOut("format", ("fp8kv",)), WayOut("center_keys")]
    elif strategy not in target.strategies and reduce != "max":
        allowed = " or ".join(target.strategies)
        problem = f"it holds {allowed} scales, for {target.engine}; these have strategy '{strategy}'"
        formats = tuple(other for other in FORMATS if strategy in FORMATS[other].strategies)
        ways = [
            WayOut("strategy", target.strategies[:1]),
            WayOut("reduce", ("max",)),
            WayOut("format", formats),
        ]
    elif target.build is None and reduce == "max" and strategy != "tensor":
        problem = f"it holds statistics, which --reduce max does not change; these have strategy '{strategy}'"
        ways = [WayOut("strategy", ("tensor",)), WayOut("reduce")]
    else:
        return
    raise FormatRefusal(problem, *ways, name=name)


def check_latent(name: FormatName) -> None:
    """Refuse a format in which no engine computes with scales of latents (MLA)."""
    target = FORMATS[name]
    if target.latent:
        raise FormatRefusal(target.latent, *target.latent_ways, name=name)


def export(
    scales: KVScales,
    checkpoint: ModelDirectory,
    name: FormatName,
    *,
    reduce: Reduce = "none",
    tp_size: int = 1,
    draft: KVScales | None = None,
) -> Export:
    """Express `scales`, and those of a `draft` (MTP), in the format called `name`, for a `checkpoint`.

    Raises:
        FormatRefusal: the format, or its engine, cannot hold them.
    """
    # files of other tools do not say what their scales are of
    if scales.latent or checkpoint.caches_latents:
        check_latent(name)
    _check(name, scales.strategy, scales.fp8_dtype, scales.has_q, scales.has_center, reduce)
    skipped_layers(checkpoint)  # what it says of layers has to be known
    target = FORMATS[name]
    if target.build is None or target.rules is None:
        return Export()
    # formats add a quantization_config where there is none: engines would read codes as numbers
    if find_quantization_config(checkpoint.config) is None and split_weights(checkpoint).label:
        raise FormatRefusal(
            f"the weights of '{checkpoint.path}' are quantised, and its config.json has no "
            "quantization_config that says so",
            "a config.json with one",
            WayOut("format", ("fp8kv",)),
        )
    modules = scales.expand_shared()
    if len({*map(layer_of, modules)}) < len(modules):
        raise FormatRefusal(
            "layers of this model have several attention modules (as LongCat), whose scales `verify` and "
            "`convert` do not tell apart",
            *(WayOut("format", ("fp8kv",)), BAKE),
            name=name,
        )
    if reduce == "max":
        scales, draft = scales.reduce_max(), draft and draft.reduce_max()
    built = target.build(ScaledModel(scales, checkpoint, target.rules, tp_size))
    return _add_draft(built, ScaledModel(draft, checkpoint, target.rules)) if draft else built


def _add_draft(built: Export, draft: ScaledModel) -> Export:
    """Add the scales of a draft under the names that the engine's class loads, or say that it loads none."""
    config = built.config or {}
    quantization, engine = find_quantization_config(config) or {}, draft.engine
    method = str(quantization.get("quant_method"))
    kind = f"{method} attn_head" if draft.scales.strategy == "attn_head" else method
    names, ((module, layer),) = engine.draft_names(config, kind), draft.layers.items()
    if not names or quantization.get("kv_cache_quant_algo") == "NVFP4":
        note = (
            f"{engine.engine} is not known to load scales of {module}, which drafts tokens: it works at 1.0"
        )
        return replace(built, notes=(*built.notes, note))
    shape = (1,) if draft.scales.strategy == "tensor" else (-1, 1, 1)
    tensors = {names[0].format(module=module, x=x): getattr(layer, x).view(shape) for x in "kv"}
    return replace(built, tensors=built.tensors | tensors)


def _format(name: FormatName, build: Callable[[ScaledModel], Export], rules: Engine, **fields: Any) -> Format:
    """Return a format with the facts of its engine's rules, unless `fields` say otherwise."""
    values = rules.nvfp4 if fields.get("nvfp4") else None
    facts = {
        "engine": rules.engine,
        "serve": f"{rules.serve} {values.flag if values else rules.flag}",
        "note": rules.formats.get(name, "").format(note=rules.note, since=rules.since),
        "latent": rules.latent or f"whether {rules.engine} computes with scales of latents is not known",
        "latent_ways": (BAKE, *map(_parse_way, rules.latent_ways)),
        "over_written": values.divisor / FP8_DIVISOR if values else 1.0,
    }
    return Format(build=build, rules=rules, **{**facts, **fields})


def _parse_way(text: str) -> WayOut | str:
    """Return a way out as rules word it; one that is another format by its setting."""
    name, space, purpose = text.removeprefix("--format ").partition(" ")
    return WayOut("format", (name,), space + purpose) if text.startswith("--format ") else text


_PER_HEAD: dict[str, Any] = {"strategies": ("tensor", "attn_head"), "reads_q": True}
_VLLM, _SGLANG = find_engine("vllm"), find_engine("sglang")
_VLLM_04, _OLD_SGLANG = find_engine("vllm", "0.4.1"), find_engine("sglang", "0.5")

FORMATS: dict[FormatName, Format] = {
    "vllm": _format("vllm", compressed_tensors, _VLLM, **_PER_HEAD, skip_flag=_VLLM.skip_flag),
    "aphrodite": _format("aphrodite", compressed_tensors, find_engine("aphrodite"), **_PER_HEAD),
    "sglang": _format("sglang", sglang, _SGLANG),
    "tgi": _format("tgi", tgi, find_engine("tgi"), fp8_dtypes=("e4m3fn", "e4m3fnuz")),
    "json": _format(
        "json",
        scales_json,
        _VLLM_04,
        engine=f"{_VLLM_04.engine} {_VLLM_04.versions}",
        serve=f"{_VLLM_04.serve} {_VLLM_04.flag}".replace(JSON_FILE, f"{{path}}/{JSON_FILE}"),
        with_weights=False,
    ),
    "modelopt": _format(
        "modelopt",
        modelopt,
        _VLLM,
        engine=f"vLLM on MI300, {_OLD_SGLANG.engine} {_OLD_SGLANG.versions}",
        latent="",  # that depends on the model's class
    ),
    "trtllm": _format("trtllm", trtllm, find_engine("tensorrt-llm")),
    "vllm-nvfp4": _format("vllm-nvfp4", nvfp4, _VLLM, nvfp4=True),
    "sglang-nvfp4": _format("sglang-nvfp4", nvfp4, _SGLANG, nvfp4=True),
    "fp8kv": Format(
        engine="the bundled runtime",
        build=None,
        rules=None,
        serve="",
        strategies=("tensor", "attn_head", "channel"),
        fp8_dtypes=("e4m3fn", "e4m3fnuz", "e5m2"),
        reads_q=True,
        reads_center=True,
        with_weights=False,
    ),
}
