"""The engine of `bake` and `stress`: a checkpoint whose K and V are multiplied, and the proof of all else.

Factors are chosen, fitted to what the stored weights hold, written, and proved on the model that was written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calib.caches.types import Shape
from calib.choices import Purpose
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import JSON_FILE, is_of_cache
from calib.progress import Progress
from calib.recipe import Recipe, load_recipe
from calib.rescale.factors import FactorChoice, Fallback
from calib.rescale.proof import Observation, kl_between, load_exact, observe, prove
from calib.rescale.stored_weights import Edit, NotHeld, StoredModel, write_weights
from calib.rescale.weight_changes import Factors, LayerFactors, Norms

Choose = Callable[[StoredModel], FactorChoice]


@dataclass(frozen=True)
class RescalePlan:
    """Factors that the weights of a model hold, and the edits that put them there."""

    factors: Factors
    ideal: Factors  # chosen if all weights could hold them
    edits: Mapping[str, Edit]  # by the name of a tensor in the checkpoint
    rounded: Norms  # norms whose weights do not hold the product exactly
    unchanged_layers: Mapping[str, str]  # layers that stay as they are, and why

    @property
    def shapes(self) -> list[Shape]:
        """Number and sizes of the heads of each layer."""
        return [Shape(len(x.k), x.k.shape[1], x.v.shape[1]) for x in self.factors.values()]

    @property
    def layers_per_head(self) -> tuple[int, int]:
        """Number of layers in which heads have factors of their own, for K and for V."""
        k = sum(bool((layer.k != layer.k[:1]).any()) for layer in self.factors.values())
        return k, sum(bool((layer.v != layer.v[:1]).any()) for layer in self.factors.values())

    @property
    def layers_without_v(self) -> int:
        """Number of layers in which V gets no factor."""
        return sum(bool((layer.v == 1).all()) for layer in self.factors.values())

    def missing_octaves(self, purpose: Purpose) -> tuple[float, float]:
        """Return by how many octaves factors fall short of the ideal at most, for K and for V.

        For int8 only differences within a head count, because its scale absorbs the rest.
        """

        def octaves(ideal: Tensor, factor: Tensor) -> float:
            missing = (ideal / factor).log2()
            return float((missing - (purpose == "int8") * missing.amin(-1, keepdim=True)).max())

        pairs = [(self.ideal[name], self.factors[name]) for name in self.ideal]
        k = max(octaves(ideal.k, layer.k) for ideal, layer in pairs)
        return k, max(octaves(ideal.v, layer.v) for ideal, layer in pairs)

    def factors_json(self) -> dict[str, Any]:
        """Return K's and V's factors by module: [K] where a head has one, else [K, D]."""

        def plain(heads: Tensor) -> Any:
            return (heads[:, 0] if bool((heads == heads[:, :1]).all()) else heads).tolist()

        return {name: {"k": plain(layer.k), "v": plain(layer.v)} for name, layer in self.factors.items()}


@dataclass(frozen=True)
class Rescaling:
    """A model that was written: its plan, and what the source and it compute."""

    plan: RescalePlan
    before: Observation
    after: Observation

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that changed in the checkpoint."""
        return sorted(self.plan.edits)

    @property
    def rounded(self) -> list[str]:
        """Names of norms' weights that do not hold their product exactly."""
        return sorted(change.name for change, _ in self.plan.rounded)

    @property
    def kl(self) -> float:
        """Nats per token by which the outputs differ, on the few tokens of the proof."""
        return kl_between(self.before, self.after)

    def lines(self) -> list[str]:
        """Say how many tensors changed, and what was proved of the outputs."""
        changed, rounded = f"{len(self.plan.edits)} tensors changed", self.rounded
        if not rounded:
            return [f"{changed}; the logits in float32 are the source's, bit for bit"]
        return [
            f"{changed}; the outputs differ by a KL of {self.kl:.2g} nats per token on a few random tokens",
            f"note: {len(rounded)} weights of norms are rounded, as '{rounded[0]}': (1 + weight) x factor "
            "has no exact value in its dtype; everything else is exact",
        ]


def rescale(
    checkpoint: ModelDirectory,
    out: Path,
    recipe: Recipe,
    choose: Choose,
    *,
    refusal: str,
    advice: str = "",
    progress: Progress,
) -> Rescaling:
    """Fill `out` with `checkpoint`, its K and V multiplied by the factors that `choose` returns.

    Factors are powers of two. The model that was written is proved to have the same outputs bit for bit,
    except where norms round a weight. Errors begin with `refusal`; those about an inexact product end with
    `advice`. The weights are written in the recipe's dtype.
    """
    progress.stage("load")
    dtype = None if recipe.dtype == "auto" else torch.float32
    source = StoredModel(load_exact(checkpoint, recipe.trust_remote_code), checkpoint, dtype, advice)
    before, modules = observe(source.model), source.modules
    progress.stage("choose factors")
    plan = plan_rescaling(source, choose)
    norms = [change for change, _ in plan.rounded]
    originals = {norm.name: source.model.get_parameter(norm.name).detach().clone() for norm in norms}
    del source  # one copy in memory is enough
    write_weights(checkpoint, plan.edits, out, dtype, progress)
    progress.stage("prove")
    model = load_exact(open_model_directory(out), recipe.trust_remote_code)
    after = observe(model)
    # norms that were rounded are proved with their own weights, and their outputs multiplied
    prove(before, observe(model, norms, originals) if norms else after, modules, plan.factors, refusal)
    for change, weight in plan.rounded:
        if not torch.equal(model.get_parameter(change.name).cpu(), change.product(weight).float()):
            raise UnsupportedModelError(
                f"{refusal}: '{change.name}' was not written as it was rounded. Nothing was written"
            )
    checkpoint.check_unchanged()
    return Rescaling(plan, before, after)


def plan_rescaling(source: StoredModel, choose: Choose) -> RescalePlan:
    """Fit the factors that `choose` returns to the stored weights, layer by layer, as finely as these allow.

    If K's or V's do not fit, fallbacks are tried in turn. A layer that holds none of them stays unchanged if
    factors of 1 are a fallback; otherwise NotHeld is raised.
    """
    ideal, nearest, fallbacks = choose(source)
    factors: dict[str, LayerFactors] = {}
    edits: dict[str, Edit] = {}
    unchanged: dict[str, str] = {}
    for name, layer in (nearest or ideal).items():
        try:
            factors[name], layer_edits = _fit_layer(source, name, layer, fallbacks)
            edits |= layer_edits
        except NotHeld as error:
            unchanged[name] = str(error)
            if torch.ones_like not in fallbacks or len(unchanged) == len(ideal):
                raise
            factors[name] = LayerFactors(torch.ones_like(layer.k), torch.ones_like(layer.v))
    norms = source.one_plus_norms(source.list_changes(factors))  # refuses a tensor that two layers share
    rounded = [(change, weight) for change, weight in norms if not change.is_exact(weight)]
    return RescalePlan(factors, ideal, edits, rounded, unchanged)


def _fit_layer(
    source: StoredModel, name: str, nearest: LayerFactors, fallbacks: Sequence[Fallback]
) -> tuple[LayerFactors, dict[str, Edit]]:
    """Return the finest factors that the weights of a layer hold, and the edits they make."""
    k_ways: list[Fallback] = [torch.clone, *fallbacks]
    # rounded inputs share one range: factors per channel would change how finely each channel is rounded
    v_ways = [*fallbacks] if source.rounds_inputs else k_ways
    # the nearest to the ideal first
    ways = sorted(product(enumerate(k_ways), enumerate(v_ways)), key=lambda pair: pair[0][0] + pair[1][0])
    problem = None
    for (_, k), (_, v) in ways:
        factors = LayerFactors(k(nearest.k), v(nearest.v))
        changes = source.list_changes({name: factors})
        if problem and not changes:
            continue  # the layer would stay unchanged
        try:
            return factors, source.edits(changes)
        except NotHeld as error:
            problem = problem or error
    raise problem or NotHeld(name)


def exact_recipe(overrides: Mapping[str, Any]) -> Recipe:
    """Return a recipe for the CPU; refuse dtypes that may round weights."""
    recipe = load_recipe(None, {**overrides, "device": "cpu"})
    if recipe.dtype not in ("auto", "float32"):
        raise InputError(f"--dtype {recipe.dtype} may round the source's weights; use auto or float32")
    return recipe


def choose_dtype_flag(dtype: str, *, latent: bool) -> str:
    """Return the flag that engines need for float32 weights, which they round to 16 bits by themselves.

    Of latents (MLA) vLLM loads no scales in float32, and its kernels on GPUs take 16 bits alone. In float16
    a small k_pe is lost.
    """
    served = "bfloat16" if latent else "float32"
    return f" --dtype {served}" if dtype == "float32" else ""


def find_scale(checkpoint: ModelDirectory) -> str | None:
    """Return the name of a KV scale of a model, or of its document of them; None: it has none."""
    files = open_model_directory(checkpoint.path, weights=False)
    names = [tensor.name for tensor in files.tensors]
    document = None if files.json is None else JSON_FILE
    return next(chain(filter(is_of_cache, checkpoint.entries), names), document)


def check_no_scales(checkpoint: ModelDirectory) -> None:
    """Refuse a model with KV scales, which fit no other K and V."""
    if scale := find_scale(checkpoint):
        problem = f"'{checkpoint.path}' has KV scales ('{scale}'), which would not fit another K and V"
        raise InputError(f"{problem}; take them out with fp8kv strip")
