"""Scales: frozen, checked data, keyed by module name. From `stats.py`, written by `export/`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calib.arguments import check_values
from calib.choices import FP8Name, Strategy
from calib.errors import InputError
from calib.files.stored_scales import is_usable
from calib.scales.notebook import layers_html


@dataclass(frozen=True)
class LayerScales:
    """Scales of one attention module; `x ≈ x_fp8 * scale`: float32, finite and positive."""

    layer_idx: int
    k: Tensor  # [1], [K] or [K, D] float32
    v: Tensor  # [1], [K] or [K, D] float32
    q: Tensor | None = None  # [1], [H] or [H, D] float32
    k_center: Tensor | None = None  # [K, D] float32, subtracted before storing; our runtime only
    latent: bool = False  # K is the compressed latent, V the rotated k_pe, under one scale (MLA)

    def __post_init__(self) -> None:
        check_values(vars(self), LayerScales)
        for name, scale in self.items():
            is_float = scale.dtype == torch.float32 and scale.dim() in (1, 2)
            if not is_float or not is_usable(scale.flatten().tolist()):
                raise InputError(
                    f"{name} scale must be finite, positive float32 [1], [heads] or [heads, "
                    f"channels], got {str(scale.dtype).removeprefix('torch.')} "
                    f"{[*scale.shape]}: {scale.flatten()[:4].tolist()}"
                )
        if self.latent and not (self.k.shape == (1,) and torch.equal(self.k, self.v)):
            raise InputError(f"a latent and k_pe have one scale, got {self.k} and {self.v}")

    def items(self) -> list[tuple[str, Tensor]]:
        """`("k", k)`, `("v", v)` and, where there is one, `("q", q)`."""
        named = [("k", self.k), ("v", self.v)]
        return named if self.q is None else [*named, ("q", self.q)]


@dataclass(frozen=True)
class SharedAttention:
    """An attention module that has no cache of its own and reads that of the module `owner`."""

    layer_idx: int
    owner: str


@dataclass(frozen=True)
class KVScales:
    """Scales of every attention module that caches K and V, in layer order."""

    strategy: Strategy
    fp8_dtype: FP8Name
    layers: Mapping[str, LayerScales]
    shared: Mapping[str, SharedAttention] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(vars(self), KVScales)

    @property
    def has_q(self) -> bool:
        """Whether query scales are present."""
        return any(layer.q is not None for layer in self.layers.values())

    @property
    def has_center(self) -> bool:
        """Whether something is subtracted from K before it is stored."""
        return any(layer.k_center is not None for layer in self.layers.values())

    @property
    def latent(self) -> bool:
        """Whether a layer caches a latent instead of K and V per head (MLA)."""
        return any(layer.latent for layer in self.layers.values())

    def _repr_html_(self) -> str:
        layers = {name: layer.layer_idx for name, layer in self.layers.items()}
        scales = {
            (name, f"{which.upper()} scale"): scale
            for name, layer in self.layers.items()
            for which, scale in layer.items()
        }
        return layers_html(f"Scales: {self.strategy}, {self.fp8_dtype}", layers, scales)

    def with_shared(self) -> Mapping[str, LayerScales]:
        """All modules an engine asks about; one that shares a cache has its owner's scales.

        Its queries are its own and were not measured, so it has no query scale.
        """
        shared = {
            name: replace(self.layers[module.owner], layer_idx=module.layer_idx, q=None)
            for name, module in self.shared.items()
        }
        return {**self.layers, **shared}

    def reduce_max(self) -> "KVScales":
        """One scale per module and tensor, the largest: safe for the range, coarser than before."""
        layers = {name: _reduce_layer(layer) for name, layer in self.layers.items()}
        return replace(self, strategy="tensor", layers=layers)


def _reduce_layer(layer: LayerScales) -> LayerScales:
    q = None if layer.q is None else layer.q.amax().view(1)
    return replace(layer, k=layer.k.amax().view(1), v=layer.v.amax().view(1), q=q)
