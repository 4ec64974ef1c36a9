"""How engines serve each variant: flags, GPUs, and what has to be made first."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calib.caches.types import ALL_CACHES, ENGINES, GPUS, Serving, Shape, cache_type
from calib.choices import REFERENCE, FormatName, Strategy
from calib.errors import InputError, UnsupportedExportError
from calib.eval.variants import Variant
from calib.files.model_directory import ModelDirectory
from calib.formats import FORMATS, export
from calib.rescale.rescaling import check_no_scales
from calib.scales.scales import KVScales

_SERVE = {
    "vllm": "vllm serve {path}",
    "sglang": "python -m sglang.launch_server --model-path {path}",
    "lmdeploy": "lmdeploy serve api_server {path}",
}
# FlashAttention 3 and 4: rules of vLLM in calib/verify
_PER_HEAD_GPUS = ("h100", "h200", "b200")
_FNUZ_GPUS = ("mi300x",)
# types whose scales are fixed: 1.0, unless the checkpoint has some
_STATIC_TYPES = ("fp8", "nvfp4", "nvfp4_4over6", "fp8_k_nvfp4_v")
_OWN_SCALES = (
    "the checkpoint has KV scales of its own, which engines load instead of 1.0; "
    "take them out with fp8kv strip"
)
_LATENT_SCALES = (
    "no engine stores latents with scales from a checkpoint by itself: vLLM loads those of "
    "--format modelopt with --model-impl transformers, which was not run on a GPU and so is not "
    "offered, and SGLang stores without them; bake the model, which makes scale 1.0 right"
)
_ENDS_AT_240 = "FP8 at scale 1.0 is measured up to 448, and on {} FP8 ends at 240"


@dataclass(frozen=True)
class Offer:
    """One way to serve a variant."""

    engine: str
    version: str
    gpus: tuple[str, ...]
    notes: tuple[str, ...]
    commands: tuple[str, ...]  # in their order; the last one serves


@dataclass(frozen=True)
class Offers:
    """Engines for the caches of one model."""

    model: str  # as commands are given it
    checkpoint: ModelDirectory
    dataset: str
    shapes: Sequence[Shape]
    trust_remote_code: bool = False

    def of(self, variant: Variant, engine: str | None, gpu: str | None) -> Offer | str:
        """The first engine that serves `variant` there, or one line why none does."""
        found = self._of(variant, engine, gpu)
        if isinstance(found, str) or not self.trust_remote_code:
            return found
        commands = tuple(f"{command} --trust-remote-code" for command in found.commands)
        return replace(found, commands=commands)

    def _of(self, variant: Variant, engine: str | None, gpu: str | None) -> Offer | str:
        if variant.kind == REFERENCE:
            name = engine or "vllm"
            return Offer(name, "", (gpu,) if gpu else (), (), (_serve(name, self.model),))
        if variant.scales is not None and variant.name != "none":
            return self._calibrated(variant, engine, gpu)
        kind = variant.cache or "fp8"
        if kind in _STATIC_TYPES and self._has_scales():
            return _OWN_SCALES
        found = self.fitting(kind, engine, gpu)
        if isinstance(found, str):
            return found
        gpus = [gpu] if gpu else [each for serving in found for each in serving.gpus]
        if kind == "fp8":
            gpus = [each for each in gpus if each not in _FNUZ_GPUS]
        if not gpus:
            return _ENDS_AT_240.format(gpu)
        first, path = found[0], self.model
        made: tuple[str, ...] = ()
        if variant.is_baked:
            path, made = self._baking("fp8" if kind == "fp8" else "int8")
        return _offer(found, gpus, made, path, first.flag)

    def _has_scales(self) -> bool:
        try:
            check_no_scales(self.checkpoint)
        except InputError:
            return True
        return False

    def fitting(self, name: str, engine: str | None, gpu: str | None) -> list[Serving] | str:
        """All servings by the first engine that has the type for this model, or why none."""
        model_type = self.checkpoint.text_config.get("model_type")
        return cache_type(name).serving(engine, gpu, self.shapes, model_type)

    def _calibrated(self, variant: Variant, engine: str | None, gpu: str | None) -> Offer | str:
        assert variant.scales is not None
        if variant.scales.latent:
            return _LATENT_SCALES
        why = f"{engine or 'no engine'} reads no such scales"
        for name in ("vllm", "sglang"):
            if engine not in (None, name):
                continue
            found = self.fitting("fp8", name, gpu)
            if isinstance(found, str):
                why = found
                continue
            made = self._loaded(name, variant.scales, gpu, [g for s in found for g in s.gpus])
            if isinstance(made, str):
                why = made
                continue
            format_name, gpus = made
            return self._with_scales(variant, found, format_name, gpus)
        return why

    def _loaded(
        self, engine: str, scales: KVScales, gpu: str | None, gpus: Sequence[str]
    ) -> tuple[FormatName, tuple[str, ...]] | str:
        """The format that `engine` loads K's and V's from, and on which GPUs; or why none."""
        layers = {key: replace(layer, q=None) for key, layer in scales.layers.items()}
        scales = replace(scales, layers=layers)
        name: FormatName = "sglang" if engine == "sglang" else "vllm"
        if engine == "vllm" and gpu in _FNUZ_GPUS:
            name = "modelopt"
        elif engine == "vllm":
            gpus = [each for each in gpus if each not in _FNUZ_GPUS]
        if scales.strategy == "attn_head":
            gpus = [each for each in gpus if each in _PER_HEAD_GPUS]
        if not gpus or (gpu is not None and gpu not in gpus):
            return f"{engine} has no scales per head on {gpu or 'the GPUs that serve FP8'}"
        if scales.strategy not in FORMATS[name].strategies:
            return f"{FORMATS[name].engine} reads one scale per layer"
        try:
            export(scales, self.checkpoint, name)
        except (UnsupportedExportError, InputError) as error:
            return str(error)
        return name, (gpu,) if gpu else tuple(gpus)

    def _with_scales(
        self, variant: Variant, found: Sequence[Serving], name: FormatName, gpus: tuple[str, ...]
    ) -> Offer:
        assert variant.scales is not None
        strategy: Strategy = variant.scales.strategy
        options = {"mse": " --observer mse", "rest": " --set data.skip_first=1"}
        out = f"{self._stem}-fp8kv-{variant.name}"
        flags = f"--strategy {strategy}{options.get(variant.name, '')} --format {name}"
        per_head = FORMATS[name].per_head_flags if strategy == "attn_head" else ""
        return _offer(found, gpus, (self._calibrate(flags, out),), out, found[0].flag + per_head)

    def _baking(self, purpose: str) -> tuple[str, tuple[str, ...]]:
        """The directory of the baked model, and what makes it."""
        scales, out = f"{self._stem}-calibration", f"{self._stem}-baked-{purpose}"
        paths = shlex.join([self.model, "--scales", scales, "--for", purpose, "-o", out])
        return out, (self._calibrate("--format fp8kv", scales), f"fp8kv bake {paths}")

    def _calibrate(self, flags: str, out: str) -> str:
        data = shlex.join([self.model, "--dataset", self.dataset])
        return f"fp8kv-calibrate {data} {flags} -o {shlex.quote(out)}"

    @property
    def _stem(self) -> str:
        return Path(self.model.rstrip("/").removeprefix("builtin:")).name


def _serve(engine: str, path: str, flag: str = "") -> str:
    return f"{_SERVE[engine].format(path=shlex.quote(path))} {flag}".strip()


def _offer(found: Sequence[Serving], gpus: Sequence[str], made: Sequence[str], path: str, flag: str) -> Offer:
    first = found[0]
    there = [each for each in found if each.note and set(each.gpus) & set(gpus)]
    on_amd = set(_FNUZ_GPUS) & set(gpus)
    notes = dict.fromkeys(each.note for each in there if on_amd or "MI300X" not in each.note)
    last = _serve(first.engine, path, flag)
    return Offer(first.engine, first.version, tuple(dict.fromkeys(gpus)), tuple(notes), (*made, last))


def check_place(engine: str | None, gpu: str | None) -> None:
    """Refuse an engine or a GPU that is not known, or a pair that has no type at all."""
    for what, name, names in (("--engine", engine, ENGINES), ("--gpu", gpu, GPUS)):
        if name not in (None, *names):
            raise InputError(f"{what} '{name}' is not one of {', '.join(names)}")
    servings = [s for name in ALL_CACHES for s in cache_type(name).servings]
    if not any(engine in (None, s.engine) and gpu in (None, *s.gpus) for s in servings):
        where = " on ".join(filter(None, (engine or "any engine", gpu)))
        raise InputError(f"no type of KV cache but 16 bits is known for {where}")
