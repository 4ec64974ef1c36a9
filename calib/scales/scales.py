"""Scales: frozen, checked data by module name, derived from statistics and written by `formats/`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from calib.arguments import check_values
from calib.choices import FP8Name, Strategy, Targets
from calib.errors import InputError
from calib.files.stored_scales import is_usable
from calib.files.text import plain

_MOST_ROWS = 100  # of a table in a notebook
# for tables and reports
LATENT_NOTE = (
    "this model caches latents (MLA): K stands for the latent, V for k_pe, the rotated part of the "
    "keys that all heads share; one scale is for both"
)


@dataclass(frozen=True)
class LayerScales:
    """Scales of one attention module; `x ≈ x_fp8 * scale`. An InputError unless finite, positive float32."""

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
        """Return `("k", k)`, `("v", v)` and, if there is one, `("q", q)`; [1], [heads] or [heads, D] each."""
        named = [("k", self.k), ("v", self.v)]
        return named if self.q is None else [*named, ("q", self.q)]


@dataclass(frozen=True)
class SharedAttention:
    """An attention module without a cache of its own, which reads that of the module `owner`."""

    layer_idx: NonNegativeInt
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
        """Return whether there are query scales."""
        return any(layer.q is not None for layer in self.layers.values())

    @property
    def has_center(self) -> bool:
        """Return whether something is subtracted from K before it is stored."""
        return any(layer.k_center is not None for layer in self.layers.values())

    @property
    def latent(self) -> bool:
        """Return whether a layer caches a latent instead of K and V per head (MLA)."""
        return any(layer.latent for layer in self.layers.values())

    def _repr_html_(self) -> str:
        indices = {name: layer.layer_idx for name, layer in self.layers.items()}
        scales = {
            (name, f"{letter.upper()} scale"): scale
            for name, layer in self.layers.items()
            for letter, scale in layer.items()
        }
        return layers_html(f"Scales: {self.strategy}, {self.fp8_dtype}", indices, scales)

    def expand_shared(self) -> Mapping[str, LayerScales]:
        """Return the scales of all modules that an engine asks about.

        A module that shares a cache has its owner's scales, but no query scale: its queries were
        not measured.
        """
        shared = {
            name: replace(self.layers[module.owner], layer_idx=module.layer_idx, q=None)
            for name, module in self.shared.items()
        }
        return {**self.layers, **shared}

    def reduce_max(self) -> "KVScales":
        """Return one scale per module and tensor, the largest: as safe, but coarser."""
        layers = {}
        for name, layer in self.layers.items():
            largest: dict[str, Any] = {letter: scale.amax().view(1) for letter, scale in layer.items()}
            layers[name] = replace(layer, **largest)
        return replace(self, strategy="tensor", layers=layers)


def check_one_scale(*, strategy: Strategy, targets: Targets, center_keys: bool) -> None:
    """Refuse options that the one scale of a latent and its k_pe (MLA) cannot follow."""
    refused = {
        f"--strategy {strategy}": strategy != "tensor",
        f"--targets {targets}": targets != "kv",
        "--center-keys": center_keys,
    }
    for option, is_refused in refused.items():
        if is_refused:
            raise InputError(
                f"{option}: this model caches one latent per token and layer (MLA), and engines hold "
                "one scale for it; use --strategy tensor --targets kv, without --center-keys"
            )


def layers_html(
    caption: str,
    layers: Mapping[str, int],
    values: Mapping[tuple[str, str], Tensor],
    lines: Iterable[str] = (),
) -> str:
    """Return a table of `layers`, whose indices are given by module, with `lines` below it.

    `values` are by module and heading, of any shape: their smallest and largest are shown. Every
    text may come from a stranger's file, and is escaped. Layers after the first 100 are counted.
    """
    headings = [*dict.fromkeys(heading for _, heading in values)]
    rows = [_elements("th", ["layer", "module", *headings])]
    for module, index in [*layers.items()][:_MOST_ROWS]:
        cells = [str(index), module]
        for tensor in (values.get((module, heading)) for heading in headings):
            low, high = (0.0, 0.0) if tensor is None else (float(tensor.min()), float(tensor.max()))
            text = f"{low:.4g} to {high:.4g}" if low < high else f"{high:.4g}"
            cells.append("" if tensor is None else text)
        rows.append(_elements("td", cells))
    if len(layers) > _MOST_ROWS:
        lines = [f"{len(layers) - _MOST_ROWS} more layers are not shown", *lines]
    table = _elements("caption", [caption]) + "".join(f"\n<tr>{row}</tr>" for row in rows)
    return f"<div><table>{table}\n</table>{_elements('p', lines)}</div>"


def _elements(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(plain(text))}</{tag}>" for text in texts)
