"""Summary of a calibration: one row per layer, and warnings in plain words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from calib.choices import Strategy
from calib.recipe import Recipe
from calib.scales.one_scale import LATENT_NOTE, dead_groups
from calib.scales.places import LayerPlaces, first_of, middle_of
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats
from calib.scales.text_summary import FEW_TOKENS, text_warnings
from fp8kv_runtime.fp8 import FP8_DTYPES, fp8_max

OUTLIER_HEAD = 20  # times the median of the other heads
GREW = 0.05  # share of growth in about the last half of the tokens
TOKENS_TO_GROW = FEW_TOKENS  # fewer say nothing of growth
OUTLIER_FIRST_TOKEN = 2  # times the amax of all other tokens: a bit of the FP8 range

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
    found = [LATENT_NOTE] if stats.latent else []
    found += text_warnings(stats.text, stats.tokens)
    if counts := {x.layer_idx: x.tokens for x in stats.layers.values() if x.tokens < stats.tokens}:
        found.append(
            f"only {min(counts.values()):,} of {stats.tokens:,} tokens were counted in "
            f"{name_layers([*counts])}: the scales there rest on less text"
        )
    if recipe.headroom != "auto" and recipe.headroom < 1:
        found.append(
            f"headroom {recipe.headroom:g}: scales hold {recipe.headroom:.0%} of the largest "
            "values that were seen, and clip what is beyond"
        )
    for is_so, text in _checks(scales.strategy):
        for which in ("k", "v"):
            layers = [
                layer.layer_idx
                for name, layer in stats.layers.items()
                if is_so(getattr(layer, which).amax, getattr(scales.layers[name], which))
            ]
            if layers:
                found.append(text.format(which.upper(), name_layers(layers)))
    # what is told of whole K and whole heads, and of scales that leave no room
    if not (scales.has_center or scales.strategy == "channel"):
        covers = recipe.headroom == "auto" or recipe.data.until is not None
        found += _of_places(stats.places(), scales.strategy, growth=not covers)
    if recipe.observer.name == "percentile":
        found.append(
            "observer percentile clips the largest K, which is known to hurt: "
            "compare it with absmax before serving"
        )
    for name, module in stats.shared.items():
        found.append(f"{name} shares the cache of {module.owner}: left out, it gets that layer's scales")
    return found


def _of_places(places: list[LayerPlaces], strategy: Strategy, *, growth: bool) -> list[str]:
    """Whether amax would have grown with more tokens, and whether first tokens alone set it."""
    found, per_head = [], strategy != "tensor"
    for which in ("k", "v"):
        grew, first = {}, {}
        for layer in places:
            x, middle = getattr(layer, which), middle_of(layer.read)
            if growth and layer.read >= TOKENS_TO_GROW:
                grew[layer.layer] = x.grew(middle, per_head=per_head)
            first[layer.layer] = x.first_alone(per_head=per_head)
        if named := [layer for layer, share in grew.items() if share > GREW]:
            read = places[0].read
            found.append(
                f"{which.upper()}: still grew by up to {max(grew.values()):.0%} in the last "
                f"{read - first_of(middle_of(read)):,} of {read:,} tokens in {name_layers(named)}; "
                "calibrate on more text"
            )
        if named := [layer for layer, ratio in first.items() if ratio >= OUTLIER_FIRST_TOKEN]:
            found.append(
                f"{which.upper()}: the first token of a sample is up to "
                f"{max(first.values()):.0f}x all others in {name_layers(named)}, and alone sets "
                "their scale; `fp8kv inspect` shows amax without it"
            )
    return found


def _row(name: str, stats: LayerStats, scales: LayerScales, limit: float) -> LayerSummary:
    stored_k = stats.k.amax if scales.k_center is None else stats.centered_keys()[1]
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


def _checks(strategy: Strategy) -> list[tuple[Callable[[Tensor, Tensor], bool], str]]:
    """Conditions on a layer's amax and scale of K or V, each with its warning."""
    clipped = "unscaled FP8 would clip there, so never serve without these scales"
    checks: list[tuple[Callable[[Tensor, Tensor], bool], str]] = [
        (lambda _, scale: bool(scale.max() > 1), f"{{}} scale > 1 in {{}}: {clipped}")
    ]
    if strategy != "tensor":
        dead = "{}: a head or channel held only zeros in {}; it takes the layer's largest scale"
        return [*checks, (lambda amax, _: dead_groups(amax, strategy) > 0, dead)]
    outlier = (
        f"{{}}: one head is {OUTLIER_HEAD}x the others in {{}}; "
        "use --strategy attn_head where the engine reads it"
    )
    dead = "{}: a head held only zeros in {}; the layer's one scale is for it too"
    return [
        *checks,
        (lambda amax, _: _head_ratio(amax) >= OUTLIER_HEAD, outlier),
        (lambda amax, _: dead_groups(amax, "attn_head") > 0, dead),
    ]


def _head_ratio(amax: Tensor) -> float:
    heads = amax.amax(-1).sort().values
    heads = heads[heads > 0]  # a dead head says nothing of what is usual
    return float(heads[-1] / heads[:-1].median()) if len(heads) > 1 else 1.0


def name_layers(indices: Sequence[int]) -> str:
    """Layers in words; of many their number."""
    if len(indices) > _MANY:
        return f"{len(indices)} layers"
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
