"""Random weights for a model on the meta device, the same in every layer to take little memory.

Every layer gets another input, so a forward pass still tells layers apart.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor, nn

from calib.offload.stages import named_tensors, replace_tensor

_SEED = 0
_ROWS = 64  # of an embedding, for token ids and positions below that


def random_bytes(decoder: nn.Module) -> int:
    """Bytes of memory that `random_weights` takes, but for a few rows of each embedding."""
    kinds = {_kind(n, t): t.nbytes for n, t in _meta(decoder).items() if not _rows(decoder, n)}
    return sum(kinds.values())


@contextmanager
def random_weights(decoder: nn.Module, device: torch.device) -> Iterator[None]:
    """Give what is on the meta device random values inside the block; embeddings in some rows."""
    meta = _meta(decoder)
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[tuple[str, torch.Size], Tensor] = {}
    try:
        for name, tensor in meta.items():
            kind = _kind(name, tensor)
            if kind not in made:
                made[kind] = _random(tensor, generator, _rows(decoder, name)).to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            values = nn.Parameter(made[kind], requires_grad=False) if is_parameter else made[kind]
            replace_tensor(decoder, name, values)
        yield
    finally:
        for name, tensor in meta.items():
            replace_tensor(decoder, name, tensor)


def _meta(decoder: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(decoder) if tensor.is_meta}


def _kind(name: str, tensor: Tensor) -> tuple[str, torch.Size]:
    # layer 3's and layer 4's are one
    return re.sub(r"\d+", "N", name), tensor.shape


def _rows(decoder: nn.Module, name: str) -> int | None:
    module = decoder.get_submodule(name.rpartition(".")[0])
    return _ROWS if isinstance(module, nn.Embedding) else None


def _random(like: Tensor, generator: torch.Generator, rows: int | None) -> Tensor:
    made = torch.empty_like(like, device="cpu")
    if not made.is_floating_point():
        return made.zero_()
    # memory that is not written takes no room, and an embedding can be half of a model
    part = made[:rows] if rows else made
    if part.dim() < 2:  # norms multiply, so they must not be near zero
        part.uniform_(0.5, 1.5, generator=generator)
    else:
        bound = sqrt(3 / part.shape[-1])
        part.uniform_(-bound, bound, generator=generator)
    return made
