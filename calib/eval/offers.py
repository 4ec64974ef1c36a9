"""How engines serve each variant of an evaluation: the commands that make it, and the one that serves it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calib.caches.types import Shape
from calib.choices import REFERENCE, FormatName, Strategy
from calib.engines.catalogue import GPUS, find_engine
from calib.engines.offers import Offer, find_offer
from calib.errors import InputError, UnsupportedExportError
from calib.eval.variants import Variant
from calib.files.model_directory import ModelDirectory
from calib.formats import FORMATS, export
from calib.rescale.rescaling import check_no_scales
from calib.scales.scales import KVScales

# types whose scales are fixed: 1.0, unless the checkpoint has some
_STATIC_TYPES = ("fp8", "nvfp4", "nvfp4_4over6", "fp8_k_nvfp4_v")
_ENGINES_WITH_SCALES = ("vllm", "sglang")
_OWN_SCALES = (
    "the checkpoint has KV scales of its own, which engines load instead of 1.0; "
    "take them out with fp8kv strip"
)
_LATENT_SCALES = (
    "no engine stores latents with scales from a checkpoint by itself: vLLM loads those of "
    "--format modelopt with --model-impl transformers, which was not run on a GPU and so is not "
    "offered, and SGLang stores without them; bake the model, which makes scale 1.0 right"
)
_VARIANT_FLAGS = {"mse": " --observer mse", "rest": " --set data.skip_first=1"}


@dataclass(frozen=True)
class Offers:
    """Engines for the caches of one model."""

    model: str  # as commands name it
    checkpoint: ModelDirectory
    dataset: str
    shapes: Sequence[Shape]
    trust_remote_code: bool = False

    def of(self, variant: Variant, engine: str | None, gpu: str | None) -> Offer | str:
        """Return how the first engine serves `variant` there, or a sentence on why none does."""
        offer = self._find(variant, engine, gpu)
        if isinstance(offer, str) or not self.trust_remote_code:
            return offer
        return replace(offer, commands=tuple(f"{command} --trust-remote-code" for command in offer.commands))

    def _find(self, variant: Variant, engine: str | None, gpu: str | None) -> Offer | str:
        if variant.kind == REFERENCE:
            name = engine or "vllm"
            command, path = find_engine(name).serve.partition("{path}")[0], shlex.quote(self.model)
            return Offer(name, "", (gpu,) if gpu else (), commands=(f"{command}{path}",))
        if variant.scales is not None and variant.name != "none":
            return self._find_calibrated(variant.name, variant.scales, engine, gpu)
        cache = variant.cache or "fp8"
        if cache in _STATIC_TYPES and self._has_scales():
            return _OWN_SCALES
        offer = self._find_type(cache, engine, gpu)
        if isinstance(offer, str) or not variant.is_baked:
            return offer if isinstance(offer, str) else _add_commands(offer, self.model)
        purpose = "fp8" if cache == "fp8" else "int8"
        scales, output = f"{self._stem}-calibration", f"{self._stem}-baked-{purpose}"
        bake = shlex.join(["fp8kv", "bake", self.model, "--scales", scales, "--for", purpose, "-o", output])
        return _add_commands(offer, output, self._calibration("--format fp8kv", scales), bake)

    def _find_type(
        self, cache: str, engine: str | None, gpu: str | None, strategy: Strategy | None = None
    ) -> Offer | str:
        model_type = self.checkpoint.text_config.get("model_type")
        return find_offer(cache, self.shapes, engine, gpu, model_type, strategy=strategy)

    def _has_scales(self) -> bool:
        try:
            check_no_scales(self.checkpoint)
        except InputError:
            return True
        return False

    def _find_calibrated(
        self, name: str, scales: KVScales, engine: str | None, gpu: str | None
    ) -> Offer | str:
        """Return how the first engine serves calibrated scales, in a format that it loads."""
        if scales.latent:
            return _LATENT_SCALES
        reason = f"{engine or 'no engine'} reads no such scales"
        for candidate in _ENGINES_WITH_SCALES:
            if engine not in (None, candidate):
                continue
            offer = self._find_type("fp8", candidate, gpu, scales.strategy)
            if isinstance(offer, str):
                reason = offer
                continue
            format_name: FormatName = "sglang" if candidate == "sglang" else "vllm"
            if candidate == "vllm" and gpu and GPUS[gpu].is_fnuz:
                format_name = "modelopt"
            if problem := self._format_problem(scales, format_name):
                reason = problem
                continue
            output = f"{self._stem}-fp8kv-{name}"
            flags = f"--strategy {scales.strategy}{_VARIANT_FLAGS.get(name, '')} --format {format_name}"
            return _add_commands(offer, output, self._calibration(flags, output))
        return reason

    def _format_problem(self, scales: KVScales, name: FormatName) -> str | None:
        """Return why a format cannot hold scales of K and V for this model."""
        if scales.strategy not in FORMATS[name].strategies:
            return f"{FORMATS[name].engine} reads one scale per layer"
        layers = {key: replace(layer, q=None) for key, layer in scales.layers.items()}
        try:
            export(replace(scales, layers=layers), self.checkpoint, name)
        except (UnsupportedExportError, InputError) as error:
            return str(error)
        return None

    def _calibration(self, flags: str, output: str) -> str:
        data = shlex.join([self.model, "--dataset", self.dataset])
        return f"fp8kv-calibrate {data} {flags} -o {shlex.quote(output)}"

    @property
    def _stem(self) -> str:
        return Path(self.model.rstrip("/").removeprefix("builtin:")).name


def _add_commands(offer: Offer, path: str, *preparation: str) -> Offer:
    """Add the command that serves `path`, after those that make it."""
    serve = find_engine(offer.engine).serve.format(path=shlex.quote(path))
    return replace(offer, commands=(*preparation, f"{serve} {offer.flag}"))
