"""Scales as the bridge takes them: by name of the attention module, for any number of heads."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fp8kv_runtime.errors import AttentionError


@runtime_checkable
class Scales(Protocol):
    """Scales of a model by the names of its attention modules, as `calib.KVScales`."""

    @property
    def layers(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def fp8_dtype(self) -> str: ...  # noqa: D102


class ModuleScales(Protocol):
    """Scales of one attention module, as `calib` derives them."""

    @property
    def layer_idx(self) -> int: ...  # noqa: D102
    @property
    def k(self) -> Tensor: ...  # noqa: D102
    @property
    def v(self) -> Tensor: ...  # noqa: D102
    @property
    def q(self) -> Tensor | None: ...  # noqa: D102
    @property
    def k_center(self) -> Tensor | None: ...  # noqa: D102


def of_latent(scales: ModuleScales) -> bool:
    """Whether they are of a latent and k_pe (MLA); scales that do not say so are of K and V."""
    return bool(getattr(scales, "latent", False))


def for_heads(scale: Tensor, num_heads: int) -> Tensor:
    """Scales [1], [K] or [K, D] for a cache in which each KV head was repeated to `num_heads`."""
    if num_heads % scale.shape[0]:
        raise AttentionError(
            f"scales for {scale.shape[0]} KV heads do not fit a layer with {num_heads}: "
            "they are of another model"
        )
    return scale if scale.shape[0] == 1 else scale.repeat_interleave(num_heads // scale.shape[0], 0)
