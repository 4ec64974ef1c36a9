"""What K and V are multiplied by, and the parameters of norms and linear layers that take it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from calib.errors import UnsupportedModelError


@dataclass(frozen=True)
class LayerFactors:
    """What K and V are multiplied by, or a latent and k_pe; what reads them is divided by it."""

    k: Tensor  # [K, D] float32, positive
    v: Tensor  # [K, D] float32, positive


Factors = Mapping[str, LayerFactors]  # by attention module


@dataclass(frozen=True)
class Rescaled:
    """A parameter that is multiplied: `module` is of attention, `inner` the name below it."""

    module: str
    inner: str
    # [rows, 1], [1, columns], their product, or the shape of a parameter that is no matrix
    factor: Tensor
    adds_one: bool = False  # the module multiplies by 1 + parameter

    @property
    def name(self) -> str:
        """The name that transformers gives the parameter."""
        return f"{self.module}.{self.inner}"

    def product(self, parameter: Tensor) -> Tensor:
        """The parameter, or 1 + it, times the factor, in its own dtype; exact or not."""
        factor = self.factor.to(parameter.device)
        return (self.multiplier(parameter) * factor - self._one).to(parameter.dtype)

    def multiplier(self, parameter: Tensor) -> Tensor:
        """The parameter, or 1 + it, as the module computes it."""
        return _wide(parameter) + self._one

    def is_exact(self, parameter: Tensor) -> bool:
        """Whether nothing is lost in `product`."""
        wide, product = _wide(parameter), self.product(parameter)
        wanted = self.multiplier(parameter) * self.factor
        # what underflows does not come back
        is_whole = self.adds_one or torch.equal(wanted / self.factor, wide)
        same = torch.equal(self.multiplier(product), wanted)
        return is_whole and same and bool(product.isfinite().all())

    @property
    def _one(self) -> float:
        return 1.0 if self.adds_one else 0.0


def _wide(parameter: Tensor) -> Tensor:
    """As modules compute 1 + it."""
    return parameter if parameter.dtype == torch.float64 else parameter.float()


def of_norm(module: str, name: str, norm: nn.Module, heads: Tensor) -> Iterator[Rescaled]:
    """A norm whose output gets the factors `heads` [H, D], head by head or over all of them."""
    parameters = norm_parameters(f"{module}.{name}", norm)
    adds_one = _adds_one(f"{module}.{name}", norm, parameters)
    for key, parameter in parameters.items():
        of_one = parameter.numel() < heads.numel()
        factor = heads[0] if of_one else heads
        if not torch.equal(factor.expand_as(heads), heads):
            raise UnsupportedModelError(f"{module}.{name} has one weight for all heads")
        check_size(f"{module}.{name}", "weights", parameter.numel(), factor.numel())
        factor = factor.reshape(parameter.shape)
        yield Rescaled(module, f"{name}.{key}", factor, adds_one and key == "weight")


def norm_parameters(name: str, norm: nn.Module) -> dict[str, Tensor]:
    """The weight of a norm, and its bias if it has one; UnsupportedModelError for anything else."""
    parameters: dict[str, Tensor] = dict(norm.named_parameters())
    if "weight" not in parameters or parameters.keys() - {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} has no single weight that a factor could be put into "
            f"(it has {', '.join(parameters) or 'none'})"
        )
    return parameters


def _adds_one(name: str, norm: nn.Module, parameters: Mapping[str, Tensor]) -> bool:
    weight = parameters["weight"]
    x = torch.linspace(-1, 2, weight.numel()).to(weight).view(1, 1, *weight.shape)
    zeros = {key: torch.zeros_like(parameter) for key, parameter in parameters.items()}
    for adds_one, neutral in ((False, 0.0), (True, -1.0)):
        silent = {**zeros, "weight": torch.full_like(weight, neutral)}
        if not functional_call(norm, silent, (x,)).any():
            return adds_one
    raise UnsupportedModelError(f"{name} multiplies neither by its weight nor by 1 + its weight")


def of_linear(module: str, name: str, linear: nn.Linear, rows: Tensor) -> Iterator[Rescaled]:
    """A linear layer whose outputs get the factors `rows`."""
    if bool((rows == 1).all()):
        return  # it may hold more than heads, such as gates
    check_size(f"{module}.{name}", "rows", linear.weight.shape[0], len(rows))
    yield Rescaled(module, f"{name}.weight", rows[:, None])
    if linear.bias is not None:
        yield Rescaled(module, f"{name}.bias", rows)


def linear_child(module: nn.Module, name: str, names: tuple[str, ...]) -> tuple[str, nn.Linear]:
    """The one of `names` that is a linear layer of `module`."""
    for child in names:
        linear = getattr(module, child, None)
        if isinstance(linear, nn.Linear):
            return child, linear
    raise UnsupportedModelError(
        f"{name} ({type(module).__name__}) has no linear layer named {' or '.join(names)}, so "
        "fp8kv does not know which weights make what it caches, or read it"
    )


def check_size(name: str, what: str, size: int, wanted: int) -> None:
    """Refuse a parameter of another size than what its heads make up."""
    if size != wanted:
        raise UnsupportedModelError(
            f"{name} has {size} {what}, where its heads make up {wanted}: fp8kv does not know what "
            "the rest is"
        )
