"""`fp8kv bake`: a model that computes the same, whose K and V suit a cache without scales."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from calib.atomic import atomic_directory, claimed
from calib.choices import FP8Name, Purpose
from calib.errors import InputError
from calib.marks.judging import judge
from calib.marks.record import Marks
from calib.marks.taking import take_marks
from calib.measure.attention import CachedAttention
from calib.model.checkpoint import Checkpoint, fingerprint
from calib.model.find import find_checkpoint
from calib.model.quantized import find_layout
from calib.output.checkpoint_directory import check_output, write_json
from calib.output.in_place import back_up, complete, local_directory
from calib.recipe import Recipe, load_recipe
from calib.rescale.bake_card import write_card
from calib.rescale.choosing import check_modules, factors_for_fp8, factors_for_int8
from calib.rescale.edits import FOR_FP8, FOR_INT8
from calib.rescale.parameters import Factors
from calib.rescale.proof import Observed
from calib.rescale.rescaling import Rescaling, rescale
from calib.scalefiles.baked import baked_for, weights_digest
from calib.scalefiles.file_names import BAKE_FILE, JSON_FILE
from calib.scalefiles.names import is_of_cache
from calib.scales.derive import derive_scales
from calib.scales.measured import load_measured
from calib.scales.stats import KVStats


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
    backup: Path | None = None  # of the files that were replaced in place

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
            "layers": self.layers,
            "layers_with_factors_per_head": {"k": k, "v": v},
            "octaves_short": {"k": k_short, "v": v_short},
            "changed": self.changed,
            "backup": self.backup and str(self.backup),
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
) -> Baked:
    """Write the model `name` with factors moved from Q to K and from the output projection to V.

    The factors are made of the calibration `scales`. InputError or UnsupportedModelError, and
    nothing written, where the model cannot be shown to compute the same.
    """
    if any_factor and purpose == "fp8":
        raise InputError("--any-factor is for int8; FP8 gains nothing from other factors")
    if in_place and (output or overwrite):
        raise InputError("--in-place writes into the model's directory; leave -o, --overwrite away")
    checkpoint = find_checkpoint(name)
    output = local_directory(name) if in_place else output or _default_output(name, purpose)
    if not in_place:
        check_output(output, checkpoint.path, overwrite=overwrite)
    _check_bakeable(checkpoint)
    stats, report = load_measured(scales)
    _check_measured(scales, report, stats, name, checkpoint)
    recipe = load_recipe(None, {**overrides, "device": "cpu"})
    _check_dtype(recipe, checkpoint, any_factor)
    choose = partial(_choose, scales, stats, report, purpose, any_factor)
    with (
        claimed(output, overwrite=overwrite or in_place) as claim,
        atomic_directory(output, claim=claim) as scratch,
    ):
        what = f"'{name}' cannot be baked"
        coarser = FOR_FP8 if purpose == "fp8" else FOR_INT8
        done = rescale(
            checkpoint, scratch, recipe, choose, what=what, coarser=coarser, exact=not any_factor
        )
        if not done.changed:
            raise InputError(f"'{name}' is as an {purpose} cache wants it: nothing to bake")
        baked = _summed(name, output, purpose, recipe.dtype, not any_factor, done)
        _describe(baked, checkpoint, scratch, done.factors, report)
        if in_place:
            complete(scratch, output)
            baked = replace(baked, backup=back_up(output, scratch))
    return baked


def _summed(
    name: str, output: Path, purpose: Purpose, dtype: str, exact: bool, done: Rescaling
) -> Baked:
    return Baked(
        name, output, purpose, exact, done.changed, _per_head(done.factors), len(done.factors),
        dtype, _short(done.wanted, done.factors), _difference(done.before, done.after),
    )  # fmt: skip


def _describe(
    baked: Baked, checkpoint: Checkpoint, out: Path, factors: Factors, report: dict[str, Any]
) -> None:
    facts = {
        "fp8_dtype": _fp8_type(report),
        "source": fingerprint(checkpoint),
        "weights": weights_digest(out),
        "dataset": report["dataset"],
        "factors": _factors_json(factors),
    }
    write_json(out / BAKE_FILE, baked.to_json() | facts)
    write_card(checkpoint, out, baked.to_json(), report["dataset"])


def _default_output(name: str, purpose: Purpose) -> Path:
    """`./<model>-baked-<purpose>`."""
    return Path(f"{Path(name.rstrip('/').removeprefix('builtin:')).name}-baked-{purpose}")


def _check_bakeable(checkpoint: Checkpoint) -> None:
    """Refuse a model that was baked, or has scales."""
    if purpose := baked_for(checkpoint.path):
        raise InputError(
            f"'{checkpoint.path}' is baked for {purpose}; bake the model it was made from"
        )
    files = filter(Path.exists, [checkpoint.path / JSON_FILE])
    if scale := next(chain(filter(is_of_cache, checkpoint.entries), (f.name for f in files)), None):
        raise InputError(
            f"'{checkpoint.path}' has KV scales ('{scale}'), which would not fit what is baked; "
            "take them out with fp8kv strip"
        )


def _check_dtype(recipe: Recipe, checkpoint: Checkpoint, any_factor: bool) -> None:
    if recipe.dtype not in ("auto", "float32"):
        raise InputError(f"--dtype {recipe.dtype} may round weights; use auto or float32")
    if find_layout(checkpoint) and (any_factor or recipe.dtype != "auto"):
        raise InputError(
            f"the weights of '{checkpoint.path}' are quantised: their scales take powers of two in "
            "their own type; leave --any-factor and --dtype away"
        )


def _check_measured(
    given: Path, report: dict[str, Any], stats: KVStats, name: str, checkpoint: Checkpoint
) -> None:
    """Refuse statistics of another model; of another checkpoint, unless K and V are the same."""
    if report["checkpoint"] == fingerprint(checkpoint):
        return
    if report.get("marks") is None:
        raise InputError(f"'{given}' was not measured on '{name}'; calibrate '{name}'")
    marks = Marks.from_json(report["marks"], f"'{given}'")
    judge(str(given), marks, name, take_marks(checkpoint, stats.layers))


def _choose(
    given: Path,
    stats: KVStats,
    report: dict[str, Any],
    purpose: Purpose,
    any_factor: bool,
    model: PreTrainedModel,
    modules: dict[str, CachedAttention],
) -> Factors:
    check_modules(stats, modules, str(given))
    if purpose == "int8":
        return factors_for_int8(stats, model, modules, any_factor=any_factor)
    fixed = {"strategy": "attn_head", "center_keys": False, "fp8_dtype": _fp8_type(report)}
    recipe = load_recipe(None, report["recipe"] | fixed)
    return factors_for_fp8(derive_scales(stats, recipe), model, modules)


def _fp8_type(report: dict[str, Any]) -> FP8Name:
    """E4M3, as MI300 has it or others: what fits that fits E5M2 as well."""
    return "e4m3fnuz" if report["recipe"]["fp8_dtype"] == "e4m3fnuz" else "e4m3fn"


def _difference(before: Observed, after: Observed) -> float:
    after_log, before_log = (
        each.logits.double().log_softmax(-1).flatten(0, 1) for each in (after, before)
    )
    found = kl_div(after_log, before_log, log_target=True, reduction="batchmean")
    return found.clamp(min=0).item()


def _per_head(factors: Factors) -> tuple[int, int]:
    k = sum(bool((layer.k != layer.k[:1]).any()) for layer in factors.values())
    return k, sum(bool((layer.v != layer.v[:1]).any()) for layer in factors.values())


def _short(wanted: Factors, factors: Factors) -> tuple[float, float]:
    k, v = (
        max((getattr(wanted[n], x) / getattr(factors[n], x)).log2().max().item() for n in wanted)
        for x in "kv"
    )
    return k, v


def _factors_json(factors: Factors) -> dict[str, Any]:
    """K's and V's by module: [K] where a head has one, else [K, D]."""

    def plain(heads: Tensor) -> Any:
        alike = bool((heads == heads[:, :1]).all())
        return (heads[:, 0] if alike else heads).tolist()

    return {name: {"k": plain(each.k), "v": plain(each.v)} for name, each in factors.items()}
