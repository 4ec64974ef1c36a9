"""How engines serve each variant of an evaluation: the commands that make it, and the one that serves it."""

import shlex
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig

from calib.caches.types import UNSIMULATED, Layers, cache_type
from calib.choices import REFERENCE, FormatName, Strategy
from calib.engines.cache_support import NotServed, Offer, find_offer, format_for
from calib.engines.catalogue import find_engine
from calib.engines.model_classes import architecture
from calib.engines.quantization_config import names_fp8_cache
from calib.engines.tokens_that_fit import REQUEST_TOKENS, Pool, vllm_pool
from calib.errors import InputError, UnsupportedExportError
from calib.evaluate.variants import Variant
from calib.files.model_directory import ModelDirectory
from calib.formats import FORMATS, export
from calib.models.config import model_positions
from calib.models.sources import short_name
from calib.rescale.pipeline import find_scale
from calib.scales.scales import KVScales

_LOADING: tuple[FormatName, ...] = ("vllm", "sglang")  # engines that load scales, in formats of their name
_OWN_SCALES = (
    "the checkpoint has KV scales of its own, which engines load instead of 1.0; "
    "take them out with fp8kv strip"
)
_LATENT_SCALES = (
    "no engine stores latents with scales from a checkpoint by itself: SGLang stores without them, vLLM "
    "needs --format modelopt and --model-impl transformers, which was not run on a GPU; bake the model, "
    "which makes scale 1.0 right"
)


@dataclass(frozen=True)
class Offers:
    """Engines for the caches of one model."""

    model: str  # as commands name it
    checkpoint: ModelDirectory
    dataset: str
    config: PreTrainedConfig
    layers: Layers
    trust_remote_code: bool = False

    def find(self, variant: Variant, engine: str | None = None, gpu: str | None = None) -> Offer:
        """Find how the first engine serves a variant there, or raise `NotServed`."""
        if variant.kind == REFERENCE:
            return self._find_16_bits(Offer(engine or "vllm", "", (gpu,) if gpu else ()))
        if variant.scales is not None and variant.is_calibrated:
            return self._find_calibrated(variant.name, variant.scales, engine, gpu)
        cache = variant.cache or "fp8"
        if cache_type(cache).is_static and self._has_scales:
            raise NotServed(_OWN_SCALES)
        offer = self._find_offer(cache, engine, gpu)
        if not variant.is_baked:
            return self.serve(offer, self.model)
        purpose = "fp8" if cache == "fp8" else "int8"
        scales, output = f"{short_name(self.model)}-calibration", f"{short_name(self.model)}-baked-{purpose}"
        bake = shlex.join(["fp8kv", "bake", self.model, "--scales", scales, "--for", purpose, "-o", output])
        return self.serve(offer, output, self._calibration("--format fp8kv", scales), bake)

    def refuse_unsimulated(self, engine: str | None, gpu: str | None) -> dict[str, str]:
        """Say of each type that is not simulated why no engine serves it there, or why it is not."""
        reasons = {name: cache_type(name).simulated for name in UNSIMULATED}
        for name in reasons:
            try:
                self._find_offer(name, engine, gpu)
            except NotServed as error:
                reasons[name] = str(error)
        return reasons

    def _find_16_bits(self, offer: Offer) -> Offer:
        """Find the commands for a cache in 16 bits. The first strips the config, if that asks for FP8."""
        if not names_fp8_cache(self.checkpoint):
            return self.serve(offer, self.model)
        output = f"{short_name(self.model)}-without-scales"
        strip = shlex.join(["fp8kv", "strip", self.model, "-o", output])
        return replace(offer, commands=(strip, *self.serve(offer, output).commands))

    def _find_calibrated(self, name: str, scales: KVScales, engine: str | None, gpu: str | None) -> Offer:
        """Find the first engine that serves calibrated scales, in a format that it loads."""
        if scales.latent:
            raise NotServed(_LATENT_SCALES)
        reason = f"{engine or 'no engine'} reads no such scales"
        for engine_name in _LOADING:
            if engine not in (None, engine_name):
                continue
            format_name = format_for(engine_name, gpu)
            try:
                offer = self._find_offer("fp8", engine_name, gpu, scales.strategy)
                self._check_format(scales, format_name)
            except NotServed as error:
                reason = str(error)
                continue
            output = f"{short_name(self.model)}-fp8kv-{name}"
            observer = " --observer mse" if name == "mse" else ""
            flags = f"--strategy {scales.strategy}{observer} --format {format_name}"
            return self.serve(offer, output, self._calibration(flags, output))
        raise NotServed(reason)

    def _check_format(self, scales: KVScales, name: FormatName) -> None:
        """Refuse a format that cannot hold scales of K and V for this model."""
        if scales.strategy not in FORMATS[name].strategies:
            raise NotServed(f"format {name} holds one scale per layer, for {FORMATS[name].engine}")
        layers = {key: replace(layer, q=None) for key, layer in scales.layers.items()}
        try:
            export(replace(scales, layers=layers), self.checkpoint, name)
        except (UnsupportedExportError, InputError) as error:
            raise NotServed(str(error)) from error

    def serve(self, offer: Offer, path: str, *preparation: str) -> Offer:
        """Add the command that serves `path`, after those that make it."""
        before, _, after = find_engine(offer.engine).serve.partition("{path}")
        serve = before + shlex.quote(path) + (f"{after} {offer.flag}" if offer.flag else "")
        trust = " --trust-remote-code" if self.trust_remote_code else ""
        return replace(offer, commands=tuple(f"{command}{trust}" for command in (*preparation, serve)))

    def _calibration(self, flags: str, output: str) -> str:
        data = shlex.join([self.model, "--dataset", self.dataset])
        return f"fp8kv-calibrate {data} {flags} -o {shlex.quote(output)}"

    def request_tokens(self, tokens: int | None) -> int:
        """Return the tokens of the requests that are to fit; a default within the model's positions."""
        return tokens or min(REQUEST_TOKENS, model_positions(self.config) or REQUEST_TOKENS)

    def pool(self, variant: Variant, engine: str, gpu: str, tokens: int) -> Pool | None:
        """Return how an engine allocates a request of `tokens`; None where the rule is not known."""
        if architecture(self.checkpoint.config) not in find_engine(engine).caches.pages:
            return None
        cache = None if variant.kind == REFERENCE else cache_type(variant.cache or "fp8")
        in_16_bits = variant.layers_in_16_bits(self.layers)
        text = self.config.get_text_config(decoder=True)
        has_media = text is not self.config
        try:
            return vllm_pool(text, self.layers, cache, in_16_bits, tokens, gpu, has_media=has_media)
        except InputError:
            return None

    @cached_property
    def _has_scales(self) -> bool:
        return find_scale(self.checkpoint) is not None

    def _find_offer(
        self, cache: str, engine: str | None, gpu: str | None, strategy: Strategy | None = None
    ) -> Offer:
        model_type = self.checkpoint.text_config.get("model_type")
        return find_offer(cache, self.layers.shapes.values(), engine, gpu, model_type, strategy=strategy)
