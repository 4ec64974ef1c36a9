"""Every format engines load, in one table; to add one: an entry here and a golden file."""

from functools import partial
from typing import Any, Literal

from calib.choices import FormatName, FP8Name, Reduce, Strategy
from calib.engines.catalogue import Engine, find_engine
from calib.errors import UnsupportedExportError
from calib.files.cache_type import FP8_DIVISOR
from calib.files.model_directory import ModelDirectory
from calib.files.names import JSON_FILE, layer_of
from calib.formats.base import BAKE, Build, Export, Format
from calib.formats.compressed_tensors import (
    compressed_tensors,
    find_quantization_config,
    sglang,
)
from calib.formats.modelopt import modelopt, nvfp4, trtllm
from calib.formats.scales_json import scales_json
from calib.formats.tgi import tgi
from calib.models.quantized.detect import find_weight_format
from calib.recipe import Recipe
from calib.scales.scales import KVScales

__all__ = [
    "FORMATS", "Export", "Format", "check_format", "check_latent", "check_recipe", "export",
]  # fmt: skip

Command = Literal["calibrate", "apply", "convert"]  # of which messages name flags


def check_recipe(name: FormatName, recipe: Recipe) -> None:
    """Refuse what the format cannot express of the scales that `recipe` asks for."""
    check_format(
        name,
        strategy=recipe.strategy,
        fp8_dtype=recipe.fp8_dtype,
        with_q=recipe.targets == "qkv",
        reduce=recipe.export.reduce,
        center_keys=recipe.center_keys,
    )


def check_format(
    name: FormatName, *, strategy: Strategy, fp8_dtype: FP8Name, with_q: bool,
    reduce: Reduce | None, center_keys: bool = False, by: Command = "calibrate",
) -> None:  # fmt: skip
    """Refuse what the format cannot express, before anything is measured.

    The message names the way out, by flags of the command it is given `by`; `reduce` is None where
    convert has none.
    """
    target, flag, measured = FORMATS[name], f"--format {name}", by != "convert"
    calibrates = by == "calibrate"
    if fp8_dtype not in target.fp8_dtypes:
        formats = _formats_with("fp8_dtypes", fp8_dtype, measured)
        way_out = _use(calibrates and f"--fp8-dtype {target.fp8_dtypes[0]}", formats)
        raise UnsupportedExportError(
            f"{flag} holds {' or '.join(target.fp8_dtypes)} scales; these are for {fp8_dtype}. " + way_out
        )
    if with_q and not target.reads_q:
        raise UnsupportedExportError(
            f"{flag} holds no query scales. {_use(calibrates and '--targets kv', '--format vllm')}"
        )
    if center_keys and not target.reads_center:
        raise UnsupportedExportError(
            f"{flag}: {target.engine} subtracts nothing from K. "
            + _use("--format fp8kv", calibrates and "leave --center-keys away")
        )
    if strategy not in target.strategies and reduce != "max":
        own = measured and f"--strategy {target.strategies[0]}"
        reducing = reduce is not None and by != "apply" and "add --reduce max"
        formats = _formats_with("strategies", strategy, measured)
        raise UnsupportedExportError(
            f"{flag}: {target.engine} reads {' or '.join(target.strategies)} scales; these have "
            f"strategy '{strategy}'. "
            + (_use(own, reducing, formats) if measured else _use(formats, reducing))
        )
    if target.build is _nothing and reduce == "max" and strategy != "tensor" and measured:
        own_strategy = f"--strategy {strategy}"  # of apply, which then reduces nothing
        raise UnsupportedExportError(
            f"{flag} holds statistics, which --reduce max does not change; these have strategy "
            f"'{strategy}'. "
            + _use("--strategy tensor", "leave --reduce max away" if calibrates else own_strategy)
        )


def check_latent(name: FormatName) -> None:
    """Refuse a format in which no engine computes with scales of latents (MLA)."""
    if reason := FORMATS[name].latent:
        raise UnsupportedExportError(f"--format {name}: {reason}")


def export(
    scales: KVScales,
    checkpoint: ModelDirectory,
    name: FormatName,
    *,
    reduce: Reduce | None = "none",
    tp_size: int = 1,
    by: Command = "calibrate",
) -> Export:
    """Express `scales` in the format called `name`, for the model in `checkpoint`.

    Raises:
        UnsupportedExportError: the format, or its engine, cannot hold them; see `check_format`.
    """
    # files of other tools do not say what their scales are of
    if scales.latent or checkpoint.caches_latents:
        check_latent(name)
    check_format(
        name,
        strategy=scales.strategy,
        fp8_dtype=scales.fp8_dtype,
        with_q=scales.has_q,
        reduce=reduce,
        center_keys=scales.has_center,
        by=by,
    )
    target = FORMATS[name]
    if target.build is not _nothing:
        _check_announced(checkpoint)
        _check_layers(scales, flag=f"--format {name}")
    return target.build(scales.reduce_max() if reduce == "max" else scales, checkpoint, tp_size)


def _check_announced(source: ModelDirectory) -> None:
    # formats add a quantization_config where there is none: engines would read codes as numbers
    if find_quantization_config(source.config) is None and find_weight_format(source):
        raise UnsupportedExportError(
            f"the weights of '{source.path}' are quantised, and its config.json has no "
            "quantization_config that says so; add it, or use --format fp8kv"
        )


def _check_layers(scales: KVScales, flag: str) -> None:
    modules = scales.expand_shared()
    if len({*map(layer_of, modules)}) < len(modules):
        raise UnsupportedExportError(
            f"{flag}: layers of this model have several attention modules (as LongCat), whose "
            f"scales `verify` and `convert` do not tell apart. Use --format fp8kv, or {BAKE}"
        )


def _formats_with(field: str, wanted: str, measured: bool) -> str | None:
    # scales that lie in files cannot become our runtime's statistics
    held = {name: f for name, f in FORMATS.items() if measured or f.build is not _nothing}
    names = [name for name, target in held.items() if wanted in getattr(target, field)]
    return f"--format {' or '.join(names)}" if names else None


def _use(*ways: str | bool | None) -> str:
    given = [str(way) for way in ways if way]
    if not given:
        return "Calibrate the model again"
    return "Use " + ", or ".join(filter(None, [", ".join(given[:-1]), given[-1]]))


def _nothing(scales: KVScales, checkpoint: ModelDirectory, tp_size: int) -> Export:
    # the statistics and the recipe, which every output holds, are all our own runtime needs
    return Export()


def _of(name: FormatName, build: Build, rules: Engine, **fields: Any) -> Format:
    """A format whose facts of the engine are those of `rules`, unless `fields` say otherwise."""
    fields.setdefault("engine", rules.engine)
    values = rules.nvfp4 if fields.get("nvfp4") else None
    if values:
        fields["over_written"] = values.divisor / FP8_DIVISOR
    fields.setdefault("serve", f"{rules.serve} {values.flag if values else rules.flag}")
    note = rules.formats.get(name, "").format(note=rules.note, since=rules.since)
    fields.setdefault("latent", _latent(rules))
    return Format(build=build, note=note, **fields)


def _latent(rules: Engine) -> str:
    """Why no scales of latents (MLA) are written for an engine, and the way out."""
    return f"{rules.latent_fate}. Use {', or '.join([BAKE, *rules.latent_ways])}"


_BOTH: tuple[Strategy, ...] = ("tensor", "attn_head")
_VLLM, _APHRODITE, _SGLANG = (find_engine(name) for name in ("vllm", "aphrodite", "sglang"))
_TRTLLM, _TGI = find_engine("tensorrt-llm"), find_engine("tgi")
_VLLM_04, _OLD_SGLANG = find_engine("vllm", "0.4.1"), find_engine("sglang", "0.5")

FORMATS: dict[FormatName, Format] = {
    "vllm": _of(
        *("vllm", partial(compressed_tensors, rules=_VLLM), _VLLM),
        strategies=_BOTH,
        reads_q=True,
        per_head_flags=f" {_VLLM.per_head_flag}",
    ),
    "aphrodite": _of(
        *("aphrodite", partial(compressed_tensors, rules=_APHRODITE), _APHRODITE),
        strategies=_BOTH,
        reads_q=True,
    ),
    "sglang": _of("sglang", partial(sglang, rules=_SGLANG), _SGLANG),
    "tgi": _of("tgi", partial(tgi, rules=_TGI), _TGI, fp8_dtypes=("e4m3fn", "e4m3fnuz")),
    "json": _of(
        *("json", scales_json, _VLLM_04),
        engine=f"{_VLLM_04.engine} {_VLLM_04.versions}",
        serve=f"{_VLLM_04.serve} {_VLLM_04.flag}".replace(JSON_FILE, f"{{path}}/{JSON_FILE}"),
        with_weights=False,
    ),
    "modelopt": _of(
        *("modelopt", partial(modelopt, rules=_VLLM), _VLLM),
        engine=f"vLLM on MI300, {_OLD_SGLANG.engine} {_OLD_SGLANG.versions}",
        latent="",  # that depends on the model's class
    ),
    "trtllm": _of("trtllm", partial(trtllm, rules=_TRTLLM), _TRTLLM),
    "vllm-nvfp4": _of("vllm-nvfp4", partial(nvfp4, rules=_VLLM), _VLLM, nvfp4=True),
    "sglang-nvfp4": _of("sglang-nvfp4", partial(nvfp4, rules=_SGLANG), _SGLANG, nvfp4=True),
    "fp8kv": Format(
        engine="the bundled runtime",
        build=_nothing,
        serve="",
        strategies=(*_BOTH, "channel"),
        fp8_dtypes=("e4m3fn", "e4m3fnuz", "e5m2"),
        reads_q=True,
        reads_center=True,
        with_weights=False,
    ),
}
