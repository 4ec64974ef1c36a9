"""`fp8kv bake`: a model that computes the same, whose K and V suit a cache without scales."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from calib.capture.attention import CachedAttention
from calib.capture.directory_scales import attention_facts
from calib.choices import FP8Name, Purpose
from calib.errors import InputError
from calib.files.atomic import atomic_directory, claimed
from calib.files.cache_type import FP8_MAX
from calib.files.calibration import statistics_file
from calib.files.fingerprint import baked_for, fingerprint, fingerprints, weights_digest
from calib.files.model_directory import ModelDirectory
from calib.files.names import BAKE_FILE
from calib.formats.directory import (
    ADAPTER_FILE,
    back_up,
    check_output,
    check_places,
    complete,
    local_directory,
    other_weights,
    write_json,
)
from calib.models.quantized.detect import find_weight_format
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import Recipe, load_recipe
from calib.rescale.bake_card import write_card
from calib.rescale.choosing import (
    check_finite,
    check_purpose,
    factors_for_fp8,
    factors_for_int8,
    per_part,
)
from calib.rescale.edits import FOR_FP8, FOR_INT8
from calib.rescale.held import held_factors
from calib.rescale.products import Factors
from calib.rescale.proof import Observed
from calib.rescale.rescaling import Rescaling, check_no_scales, rescale
from calib.same_model.check import ModelFacts, check_same_model, model_facts, scales_facts, statistics_layers
from calib.scales.stats import KVStats, derive_scales
from calib.scales.stats_file import load_calibration
from calib.scales.text_records import records_json
from calib.scales.text_summary import text_warnings


@dataclass(frozen=True)
class Baked:
    """A model that was baked."""

    model: str
    output: Path
    purpose: Purpose
    exact: bool
    changed: list[str]  # names of tensors
    per_head: tuple[int, int]  # layers whose heads have other factors than each other, in K and V
    layers: int
    dtype: str  # of the weights: auto, the source's, or float32
    short: tuple[float, float]  # octaves by which a head's factor is too small at most, in K and V
    kl: float  # nats per token by which the outputs differ; 0 if exact
    rounded: list[str]  # names of norms' weights that do not hold their product exactly
    left: dict[str, str]  # layers that stay as they are, as their weights hold no factor
    v_as_it_is: int = 0  # layers whose V gets no factor
    latent: bool = False  # K are latents, V k_pe (MLA), in at least one layer
    backup: Path | None = None  # of the files that were replaced in place
    warnings: tuple[str, ...] = ()  # that the calibration read too little text

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints, also kept beside the weights."""
        (k, v), (k_short, v_short) = self.per_head, self.short
        return {
            "fp8kv_bake": 1,
            "model": self.model,
            "output": str(self.output),
            "for": self.purpose,
            "exact": self.exact,
            "dtype": self.dtype,
            "kl": self.kl,
            "rounded": self.rounded,
            "left": self.left,
            "layers": self.layers,
            "latent": self.latent,
            "layers_with_factors_per_head": {"k": k, "v": v},
            "layers_with_v_as_it_is": self.v_as_it_is,
            "octaves_short": {"k": k_short, "v": v_short},
            "changed": self.changed,
            "backup": self.backup and str(self.backup),
            "warnings": [*self.warnings],
        }


def bake(
    name: str,
    scales: Path,
    purpose: Purpose,
    output: Path | None = None,
    *,
    in_place: bool = False,
    any_factor: bool = False,
    overrides: dict[str, Any],
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Baked:
    """Write the model `name` with factors moved from Q to K and from the output projection to V.

    The factors are made of the calibration `scales`. InputError or UnsupportedModelError, and
    nothing written, where the model cannot be shown to compute the same.
    """
    if any_factor and purpose == "fp8":
        raise InputError("--any-factor is for int8; FP8 gains nothing from other factors")
    check_places(output, in_place=in_place, overwrite=overwrite)
    progress.stage("load")
    checkpoint = find_model(name)
    output = local_directory(name) if in_place else output or _default_output(name, purpose)
    if not in_place:
        check_output(output, checkpoint.path, overwrite=overwrite)
        measured = statistics_file(scales).parent
        check_output(output, measured, overwrite=overwrite, kind="calibration")
    _check_bakeable(checkpoint, in_place=in_place)
    stats, report = load_calibration(scales)
    check_purpose(stats, purpose)
    _check_measured(scales, stats, name, checkpoint)
    recipe = load_recipe(None, {**overrides, "device": "cpu"})
    _check_dtype(recipe, checkpoint, any_factor)
    choose = partial(_choose, scales, stats, report, purpose, any_factor)
    with (
        claimed(output, overwrite=overwrite or in_place) as claim,
        atomic_directory(output, claim=claim) as scratch,
    ):
        done = rescale(
            checkpoint, scratch, recipe, choose, what=f"'{name}' cannot be baked",
            hold=partial(held_factors, stats=stats, purpose=purpose),
            coarser=FOR_FP8 if purpose == "fp8" else FOR_INT8, exact=not any_factor,
            progress=progress,
        )  # fmt: skip
        exact = not (any_factor or done.rounded)
        baked = _summed(name, output, purpose, recipe.dtype, exact, done, stats)
        _check_fits(scales, baked, done.after)
        _describe(baked, checkpoint, scratch, done, report, stats)
        if in_place:
            complete(scratch, output)
            baked = replace(baked, backup=back_up(output, scratch))
    return baked


def _summed(
    name: str,
    output: Path,
    purpose: Purpose,
    dtype: str,
    exact: bool,
    done: Rescaling,
    stats: KVStats,
) -> Baked:
    return Baked(
        name, output, purpose, exact, done.changed, done.per_head, len(done.factors), dtype,
        done.short(purpose), done.kl, done.rounded, done.left, done.v_as_it_is, stats.latent,
        warnings=tuple(text_warnings(stats.text, stats.tokens)),
    )  # fmt: skip


def _describe(
    baked: Baked,
    checkpoint: ModelDirectory,
    out: Path,
    done: Rescaling,
    report: dict[str, Any],
    stats: KVStats,
) -> None:
    facts = {
        "fp8_dtype": _fp8_type(report),
        "source": fingerprint(checkpoint),
        "weights": weights_digest(out),
        "dataset": report["dataset"],
        "factors": done.factors_json(),
        **records_json(stats.records),
    }
    write_json(out / BAKE_FILE, baked.to_json() | facts)
    write_card(checkpoint, out, baked.to_json(), report["dataset"])


def _check_fits(given: Path, baked: Baked, after: Observed) -> None:
    """Refuse what changes nothing, and what the few tokens of the proof go far beyond."""
    if not baked.changed:
        raise InputError(f"'{baked.model}' is as an {baked.purpose} cache wants it: nothing to bake")
    largest = max(map(after.amax, "kv"))  # other text may go a little beyond
    parts = "a latent or k_pe" if baked.latent else "K or V"
    if baked.purpose == "fp8" and largest > 2 * FP8_MAX["e4m3fn"]:
        raise InputError(
            f"{parts} reaches {largest:g} at 1.0, beyond FP8: '{given}' is not of this model, or "
            "saw too little text; calibrate again"
        )


def _default_output(name: str, purpose: Purpose) -> Path:
    """`./<model>-baked-<purpose>`."""
    return Path(f"{Path(name.rstrip('/').removeprefix('builtin:')).name}-baked-{purpose}")


def _check_bakeable(checkpoint: ModelDirectory, *, in_place: bool) -> None:
    """Refuse a model that was baked, has scales, or more weights than those that are changed."""
    others = other_weights(checkpoint)
    if others and (in_place or ADAPTER_FILE in others):
        raise InputError(
            f"'{checkpoint.path}' holds '{others[0]}' too, which would not fit what is baked; "
            "merge adapters first, and take other weights away or use -o"
        )
    if purpose := baked_for(checkpoint.path):
        raise InputError(f"'{checkpoint.path}' is baked for {purpose}; bake the model it was made from")
    check_no_scales(checkpoint)


def _check_dtype(recipe: Recipe, checkpoint: ModelDirectory, any_factor: bool) -> None:
    if recipe.dtype not in ("auto", "float32"):
        raise InputError(f"--dtype {recipe.dtype} may round weights; use auto or float32")
    if find_weight_format(checkpoint) and (any_factor or recipe.dtype != "auto"):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised: their scales take powers of two in "
            "their own type; leave --any-factor and --dtype away"
        )


def _check_measured(scales: Path, stats: KVStats, name: str, checkpoint: ModelDirectory) -> None:
    """Refuse statistics of another model; of another checkpoint, unless K and V are the same."""
    # without layers, of which LongCat's config counts half: `_choose` compares those of the loaded model
    source, model = scales_facts(scales), replace(model_facts(checkpoint, stats.layers), name=name)
    if source.marks is None:  # the fingerprint samples, and tells edited models less
        model = replace(model, fingerprints=fingerprints(checkpoint))
    check_same_model(source, model)


def _choose(
    given: Path,
    stats: KVStats,
    report: dict[str, Any],
    purpose: Purpose,
    any_factor: bool,
    model: PreTrainedModel,
    modules: dict[str, CachedAttention],
) -> Factors:
    shapes = attention_facts(type(model).__name__, modules, stats.shared)
    check_same_model(ModelFacts(str(given), layers=statistics_layers(stats)), shapes)
    check_finite(stats, str(given))
    if purpose == "int8":
        return factors_for_int8(stats, model, modules, any_factor=any_factor)
    # nothing that was measured saturates: observers and headroom that clip are for scales
    headroom = report["recipe"].get("headroom", 1.0)
    headroom = headroom if headroom == "auto" else max(1.0, headroom)
    fixed = {"strategy": "attn_head", "center_keys": False, "fp8_dtype": _fp8_type(report)}
    fixed |= {"headroom": headroom, "observer": {"name": "absmax"}}
    recipe = load_recipe(None, report["recipe"] | fixed)
    return factors_for_fp8(derive_scales(per_part(stats), recipe), model, modules)


def _fp8_type(report: dict[str, Any]) -> FP8Name:
    """E4M3, as MI300 has it or others: what fits that fits E5M2 as well."""
    return "e4m3fnuz" if report["recipe"]["fp8_dtype"] == "e4m3fnuz" else "e4m3fn"
