"""A twin of a model with the same outputs, whose K and V do not fit FP8 at scale 1.0.

An engine that uses a calibration's scales serves the twin as well as the source; one that leaves
them out writes garbage. So the twin answers, for any stack, whether it uses the scales. Where
latents are cached (MLA), one scale serves the latent and k_pe, so both get the same factor: so
small a one that at 1.0 nothing is left of them.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from calib.capture.attention import CachedAttention
from calib.errors import InputError
from calib.files.atomic import atomic_directory
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import STRESS_FILE
from calib.formats.compressed_tensors import find_quantization_config
from calib.formats.directory import check_output, write_json
from calib.models.config import caches_latents, load_config
from calib.models.quantized.detect import find_weight_format
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import load_recipe
from calib.rescale.products import LayerFactors
from calib.rescale.proof import PROBE_TOKENS
from calib.rescale.rescaling import check_no_scales, rescale
from calib.rescale.stress_card import write_card
from fp8kv_runtime.fp8 import FP8_DTYPES

_LARGEST_EXPONENT = 64
_K, _V, _OF_LATENT = 2.0**8, 2.0**-10, 2.0**-14  # where none is given
_FP8 = torch.finfo(FP8_DTYPES["e4m3fn"])


@dataclass(frozen=True)
class Factors:
    """Powers of two that K and V are multiplied by; Q and the output projection are divided."""

    k: float
    v: float

    def of(self, module: CachedAttention) -> LayerFactors:
        """The same for all heads and channels of `module`."""
        k, v = (torch.ones(module.num_kv_heads, n) for n in (module.head_dim, module.v_head_dim))
        return LayerFactors(k * self.k, v * self.v)

    @classmethod
    def chosen(cls, k: float | None, v: float | None, *, latent: bool) -> "Factors":
        """Those that are given, else usual ones; of a latent and k_pe the same for both."""
        if latent:
            return cls(k or v or _OF_LATENT, v or k or _OF_LATENT)
        return cls(k or _K, v or _V)


@dataclass(frozen=True)
class Stressed:
    """A twin that was written, and its proof; amax over all layers."""

    model: str
    output: Path
    factors: Factors
    dtype: str  # of the weights
    changed: list[str]  # names of tensors
    k_amax: tuple[float, float]  # of the source, of the twin
    v_amax: tuple[float, float]
    kl: float  # nats per token by which the outputs differ
    rounded: list[str]  # names of norms' weights that do not hold their product exactly
    latent: bool = False  # K is the latent, V is k_pe (MLA)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints, also kept beside the weights."""
        return {
            "model": self.model,
            "output": str(self.output),
            "latent": self.latent,
            "k_factor": self.factors.k,
            "v_factor": self.factors.v,
            "dtype": self.dtype,
            "tokens_compared": PROBE_TOKENS,
            "kl": self.kl,
            "rounded": self.rounded,
            "k_amax": dict(zip(("source", "twin"), self.k_amax, strict=True)),
            "v_amax": dict(zip(("source", "twin"), self.v_amax, strict=True)),
            "changed": self.changed,
        }

    @property
    def parts(self) -> tuple[str, str]:
        """What K and V are called."""
        return ("latent", "k_pe") if self.latent else ("K", "V")

    @property
    def warnings(self) -> list[str]:
        """Reasons why the twin may not tell stacks apart."""
        k, v, found = self.k_amax[1], self.v_amax[1], []
        if self.latent:
            return self._of_latent(k, v)
        if k <= _FP8.max:
            found.append(f"K reaches {k:g} and fits FP8 ({_FP8.max:g}): use a larger --k-factor")
        if v >= _FP8.tiny:  # below it a value loses mantissa bits, and soon all of them
            found.append(f"V reaches {v:g}, normal in FP8: use a smaller --v-factor")
        return found

    def _of_latent(self, k: float, v: float) -> list[str]:
        found = []
        if all(_FP8.tiny <= amax <= _FP8.max for amax in (k, v)):
            found.append(f"the latent reaches {k:g} and k_pe {v:g}, which FP8 holds: use a smaller factor")
        if self.factors.k != self.factors.v:
            found.append(
                "one scale serves the latent and k_pe, so with different factors the smaller one "
                "may be lost even with scales: use the same --k-factor and --v-factor"
            )
        return found


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

    The factors are powers of two that K and V are multiplied by, None for the usual ones.
    `overrides` are recipe keys for loading the model: dtype, trust_remote_code.
    """
    recipe = load_recipe(None, {**overrides, "device": "cpu"})
    if recipe.dtype not in ("auto", "float32"):
        raise InputError(
            f"--dtype {recipe.dtype} may round the source's weights, and with them the "
            "twin's outputs; use auto or float32"
        )
    progress.stage("load")
    checkpoint = find_model(name)
    check_output(output, checkpoint.path, overwrite=overwrite)
    _check_plain(checkpoint)
    check_no_scales(checkpoint)
    latent = caches_latents(load_config(checkpoint, recipe.trust_remote_code))
    factors = Factors.chosen(k_factor, v_factor, latent=latent)
    with atomic_directory(output, overwrite=overwrite) as scratch:
        architecture = (checkpoint.config.get("architectures") or ["this model"])[0]
        done = rescale(
            checkpoint,
            scratch,
            recipe,
            lambda _, modules: {each: factors.of(module) for each, module in modules.items()},
            what=f"no twin of {architecture}",
            advice="use a --k-factor and --v-factor nearer to 1",
            progress=progress,
        )
        k, v = ((done.before.amax(which), done.after.amax(which)) for which in "kv")
        dtype = _dtype(open_model_directory(scratch))
        twin = Stressed(name, output, factors, dtype, done.changed, k, v, done.kl, done.rounded, latent)
        write_json(scratch / STRESS_FILE, twin.to_json())
        write_card(twin.to_json(), checkpoint, done.factors, scratch)
    return twin


def _check_plain(checkpoint: ModelDirectory) -> None:
    """Refuse quantised weights."""
    if find_quantization_config(checkpoint.config) is not None:
        raise InputError(
            f"'{checkpoint.path}' has a quantization_config; give the model it was made from: "
            "quantised weights cannot be multiplied exactly"
        )
    if find_weight_format(checkpoint):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised, so they cannot be multiplied "
            "exactly; give the model it was made from"
        )


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
            f"{flag} must be a power of two from 2**-{_LARGEST_EXPONENT} to "
            f"2**{_LARGEST_EXPONENT}, such as 256, 1/1024, 0.5 or 2**-10, which multiplies "
            f"weights exactly; got '{text}'"
        )
    return float(value)


def _dtype(checkpoint: ModelDirectory) -> str:
    """What its config says of the weights' dtype."""
    text = checkpoint.text_config
    return str(text.get("dtype") or text.get("torch_dtype") or checkpoint.config.get("dtype"))
