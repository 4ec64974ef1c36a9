"""What a calibration means to its user: one row per layer, and warnings in plain words."""

from dataclasses import dataclass

from torch import Tensor

from calib.recipe import Recipe
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats, centered, dead_groups
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max

OUTLIER_HEAD = 20  # times the median of the other heads

_MANY = 6  # layers named in a warning before it only counts them


@dataclass(frozen=True)
class LayerSummary:
    """One attention module in figures; a scale is the largest of its groups."""

    module: str
    layer_idx: int
    k_amax: float
    v_amax: float
    k_scale: float
    v_scale: float
    k_range_used: float  # share of the FP8 range that the smallest head's amax reaches
    v_range_used: float


def summarize(stats: KVStats, scales: KVScales) -> list[LayerSummary]:
    """Return one row per layer, in layer order."""
    limit = fp8_max(FP8_DTYPES[scales.fp8_dtype])
    return [_row(name, layer, scales.layers[name], limit) for name, layer in stats.layers.items()]


def warnings_for(stats: KVStats, scales: KVScales, recipe: Recipe) -> list[str]:
    """Return what the user should know before trusting the scales, one line each."""
    found = [
        *_clipped_without_scales(scales),
        *_outlier_heads(stats, scales),
        *_dead(stats, scales),
    ]
    if recipe.observer.name == "percentile":
        found.append(
            "observer percentile clips the largest K, which is known to hurt: "
            "compare it with absmax before serving"
        )
    for name, module in stats.shared.items():
        found.append(
            f"{name} shares the cache of {module.owner}: left out, it gets that layer's scales"
        )
    return found


def _row(name: str, stats: LayerStats, scales: LayerScales, limit: float) -> LayerSummary:
    stored_k = stats.k.amax if scales.k_center is None else centered(stats)[1]
    return LayerSummary(
        module=name,
        layer_idx=stats.layer_idx,
        k_amax=float(stats.k.amax.max()),
        v_amax=float(stats.v.amax.max()),
        k_scale=float(scales.k.max()),
        v_scale=float(scales.v.max()),
        k_range_used=_range_used(stored_k, scales.k, limit),
        v_range_used=_range_used(stats.v.amax, scales.v, limit),
    )


def _range_used(amax: Tensor, scale: Tensor, limit: float) -> float:
    heads = amax.amax(-1)
    per_head = scale.amax(-1) if scale.dim() == 2 else scale
    return float((heads / (per_head * limit)).min().clamp(max=1.0))


def _clipped_without_scales(scales: KVScales) -> list[str]:
    found = []
    for which in ("k", "v"):
        layers = [s.layer_idx for s in scales.layers.values() if getattr(s, which).max() > 1]
        if layers:
            found.append(
                f"{which.upper()} scale > 1 in {_layers(layers)}: "
                "unscaled FP8 would clip there, so never serve without these scales"
            )
    return found


def _outlier_heads(stats: KVStats, scales: KVScales) -> list[str]:
    if scales.strategy != "tensor":
        return []
    found = []
    for which in ("k", "v"):
        layers = [
            layer.layer_idx
            for layer in stats.layers.values()
            if _head_ratio(getattr(layer, which).amax) >= OUTLIER_HEAD
        ]
        if layers:
            found.append(
                f"{which.upper()}: one head is {OUTLIER_HEAD}x the others in {_layers(layers)}; "
                "use --strategy attn_head where the engine reads it"
            )
    return found


def _head_ratio(amax: Tensor) -> float:
    heads = amax.amax(-1).sort().values
    heads = heads[heads > 0]  # a dead head says nothing of what is usual
    return float(heads[-1] / heads[:-1].median()) if len(heads) > 1 else 1.0


def _dead(stats: KVStats, scales: KVScales) -> list[str]:
    found = []
    whole = scales.strategy == "tensor"
    kind = "a head held" if whole else "a head or channel held"
    covered = (
        "the layer's one scale is for it too" if whole else "it takes the layer's largest scale"
    )
    for which in ("k", "v"):
        layers = [
            layer.layer_idx
            for layer in stats.layers.values()
            if dead_groups(getattr(layer, which).amax, "attn_head" if whole else scales.strategy)
        ]
        if layers:
            found.append(f"{which.upper()}: {kind} only zeros in {_layers(layers)}; {covered}")
    return found


def _layers(indices: list[int]) -> str:
    if len(indices) > _MANY:
        return f"{len(indices)} layers"
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
