"""The query that an engine's class hands to its attention, made of the one that transformers' does.

Of most classes both are one. OPT's multiplies its query before the attention function is called,
with scaling 1.0; engines hand on the plain query, and multiply scores by head_dim ** -0.5.
"""

from dataclasses import dataclass

from torch import Tensor, nn

# attention classes whose engines multiply scores by head_dim ** -0.5, whatever scaling theirs has
_PLAIN_IN_ENGINES = frozenset({"OPTAttention"})


@dataclass(frozen=True)
class EngineQuery:
    """A query as engines have it, and the softmax scale that goes with it."""

    query: Tensor  # [B, H, T, D]
    scaling: float | None  # None: head_dim ** -0.5
    original: Tensor  # that of the model
    factor: float = 1.0  # by which `query` is larger

    @classmethod
    def of(cls, module: nn.Module, query: Tensor, scaling: float | None) -> "EngineQuery":
        """What an engine has for the `query` that `module` attends with at `scaling`."""
        own = query.shape[-1] ** -0.5
        names = {kind.__name__ for kind in type(module).__mro__}
        if scaling in (None, own) or not names & _PLAIN_IN_ENGINES:
            return cls(query, scaling, query)
        factor = scaling / own
        return cls(query * factor, own, query, factor)

    def undo(self, rounded: Tensor) -> Tensor:
        """The model's query for `rounded`, which an engine made of `query`."""
        if rounded is self.query:
            return self.original
        return rounded if self.factor == 1 else rounded / self.factor
