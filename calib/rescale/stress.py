"""`fp8kv stress`: a twin of a model with the same outputs, whose K and V do not fit FP8 at scale 1.0.

An engine that uses a calibration's scales serves the twin as well as the source; one that leaves them out
writes garbage. So the twin answers, for any stack, whether it uses the scales. Where latents are cached
(MLA), one scale serves the latent and k_pe, so both get the same factor, small enough to lose both at scale
1.0.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from calib.engines.catalogue import find_engine
from calib.engines.simulate_loading import find_flags_at_one
from calib.errors import InputError, UnsupportedExportError
from calib.files.atomic import atomic_directory
from calib.files.config import find_quantization_config
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import CARD_FILE, STRESS_FILE
from calib.formats.card import render_card
from calib.formats.directory import check_output, write_json
from calib.formats.tensor_names import name_for_latents
from calib.models.config import caches_latents, load_config
from calib.models.quantized.weights import split_weights
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.rescale.factors import FactorChoice, uniform_factors
from calib.rescale.pipeline import Rescaling, check_no_scales, choose_dtype_flag, exact_recipe, rescale
from calib.rescale.proof import PROBE_TOKENS
from fp8kv_runtime.fp8 import FP8_DTYPES

_LARGEST_EXPONENT = 64
_K_FACTOR, _V_FACTOR, _LATENT_FACTOR = 2.0**8, 2.0**-10, 2.0**-14
_FP8 = torch.finfo(FP8_DTYPES["e4m3fn"])


@dataclass(frozen=True)
class Stressed:
    """A twin that was written, and its proof."""

    model: str
    output: Path
    k_factor: float  # a power of two that K is multiplied by; Q is divided
    v_factor: float  # of V, and the output projection
    dtype: str  # of the weights
    rescaling: Rescaling
    latent: bool = False  # K is the latent, V is k_pe (MLA)

    def amax(self, part: str) -> dict[str, float]:
        """Return the largest magnitude of k or v over all layers, of the source and of the twin."""
        return {"source": self.rescaling.before.amax(part), "twin": self.rescaling.after.amax(part)}

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints, also kept beside the weights."""
        return {
            "model": self.model,
            "output": str(self.output),
            "latent": self.latent,
            "k_factor": self.k_factor,
            "v_factor": self.v_factor,
            "dtype": self.dtype,
            "tokens_compared": PROBE_TOKENS,
            "kl": self.rescaling.kl,
            "rounded": self.rescaling.rounded,
            "k_amax": self.amax("k"),
            "v_amax": self.amax("v"),
            "changed": self.rescaling.changed,
        }

    @property
    def parts(self) -> tuple[str, str]:
        """Names of K and V in messages."""
        return ("latent", "k_pe") if self.latent else ("K", "V")

    @property
    def warnings(self) -> list[str]:
        """Reasons why the twin may not tell stacks apart."""
        warnings = []
        k, v = (self.rescaling.after.amax(part) for part in "kv")
        if self.latent and _FP8.tiny <= min(k, v) and max(k, v) <= _FP8.max:
            warnings.append(f"the latent reaches {k:g} and k_pe {v:g}, which FP8 holds: use a smaller factor")
        if self.latent and self.k_factor != self.v_factor:
            warnings.append(
                "one scale serves the latent and k_pe, so the smaller one may be lost even with scales: use "
                "the same --k-factor and --v-factor"
            )
        if not self.latent and k <= _FP8.max:
            warnings.append(f"K reaches {k:g} and fits FP8 ({_FP8.max:g}): use a larger --k-factor")
        if not self.latent and v >= _FP8.tiny:  # below it a value loses mantissa bits, and soon all of them
            warnings.append(f"V reaches {v:g}, normal in FP8: use a smaller --v-factor")
        return warnings


def stress(
    name: str,
    output: Path,
    k_factor: float | None,
    v_factor: float | None,
    *,
    overrides: dict[str, Any],
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Stressed:
    """Write the twin of the model `name` to `output`, once it is proved to be one.

    The factors are powers of two that K and V are multiplied by, None for the usual ones. `overrides` are
    recipe keys for loading the model: dtype, trust_remote_code.
    """
    recipe = exact_recipe(overrides)
    progress.stage("load")
    checkpoint = find_model(name)
    check_output(output, checkpoint.path, overwrite=overwrite)
    _check_plain(checkpoint)
    latent = caches_latents(load_config(checkpoint, recipe.trust_remote_code))
    if latent:  # one scale serves the latent and k_pe
        k = k_factor or v_factor or _LATENT_FACTOR
        v = v_factor or k
    else:
        k, v = k_factor or _K_FACTOR, v_factor or _V_FACTOR

    with atomic_directory(output, overwrite=overwrite) as scratch:
        architecture = (checkpoint.config.get("architectures") or ["this model"])[0]
        rescaling = rescale(
            checkpoint,
            scratch,
            recipe,
            lambda source: FactorChoice(uniform_factors(source.modules, k, v)),
            refusal=f"no twin of {architecture}",
            advice="use a --k-factor and --v-factor nearer to 1",
            progress=progress,
        )
        written = open_model_directory(scratch)
        text = written.text_config
        dtype = str(text.get("dtype") or text.get("torch_dtype") or written.config.get("dtype"))
        twin = Stressed(name, output, k, v, dtype, rescaling, latent)
        write_json(scratch / STRESS_FILE, twin.to_json())
        write_stress_card(twin.to_json(), checkpoint, rescaling.plan.factors, scratch)
    return twin


def _check_plain(checkpoint: ModelDirectory) -> None:
    """Refuse quantised weights, and KV scales."""
    is_declared = find_quantization_config(checkpoint.config) is not None
    if is_declared or split_weights(checkpoint).label:
        reason = "a quantization_config" if is_declared else "quantised weights"
        raise InputError(
            f"'{checkpoint.path}' has {reason}; give the model it was made from, without scales: quantised "
            "weights cannot be multiplied exactly"
        )
    check_no_scales(checkpoint)


def parse_factor(text: str, flag: str) -> float:
    """Read a power of two: 256, 0.5, 1/1024 or 2**-10; an InputError for anything else."""
    power = re.fullmatch(r"2\*\*([+-]?\d{1,3})", text.strip())
    try:
        value = Fraction(2) ** int(power[1]) if power else Fraction(text.strip()[:40])
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    parts = (value.numerator, value.denominator)
    is_power = all(part > 0 and part & (part - 1) == 0 for part in parts)
    if not is_power or max(parts) > 2**_LARGEST_EXPONENT:
        raise InputError(
            f"{flag} must be a power of two from 2**-{_LARGEST_EXPONENT} to 2**{_LARGEST_EXPONENT}, such as "
            f"256, 1/1024, 0.5 or 2**-10; got '{text}'"
        )
    return float(value)


def write_stress_card(
    twin: dict[str, Any], checkpoint: ModelDirectory, modules: Iterable[str], out: Path
) -> None:
    """Say how a twin of `checkpoint`, with these attention `modules`, differs, and how to serve it."""
    factors = {key: Fraction(twin[key]) for key in ("k_factor", "v_factor")}
    commands = _serve_twin(twin, checkpoint, modules)
    limits = {"fp8_largest": _FP8.max, "fp8_smallest": _FP8.tiny}
    card = render_card("stress", **{**twin, **factors, **commands, **limits}, exact=True)
    (out / CARD_FILE).write_text(card)


def _serve_twin(twin: dict[str, Any], checkpoint: ModelDirectory, modules: Iterable[str]) -> dict[str, str]:
    """Return the commands that show garbage, and then good text: with scales, or baked."""
    path, scaled, baked = (shlex.quote(twin["output"] + ending) for ending in ("", "-fp8kv", "-baked"))
    vllm = find_engine("vllm")
    serve, export, bake = f"{vllm.serve} {vllm.flag}", "", ""
    if twin["latent"]:
        try:
            names = [checkpoint.attention_prefix(module) for module in modules]
            _, flag = name_for_latents(vllm, names, checkpoint)
            serve, export = f"{serve} {flag}".rstrip(), " --format modelopt"
        except UnsupportedExportError:
            engines = vllm, find_engine("sglang")
            flags = ((engine.serve, find_flags_at_one(engine, checkpoint.config)) for engine in engines)
            serve = next((f"{command} {flag}" for command, flag in flags if flag), "")
            export, bake = " --format fp8kv", f"fp8kv bake {path} --scales {scaled} --for fp8 -o {baked}"
    if serve:
        serve += choose_dtype_flag(twin["dtype"], latent=twin["latent"])
    return {
        "serve_twin": serve.format(path=path),
        "calibrate": f"fp8kv-calibrate {path}{export} -o {scaled}",
        "bake": bake,
        "serve_answer": serve.format(path=baked if bake else scaled),
    }
