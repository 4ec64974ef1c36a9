"""Why figures of a report are no finite numbers, in words."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from torch import Tensor

from calib.choices import REFERENCE
from calib.eval.found import OtherText, Search
from calib.eval.schema import Row

_WHY = "logits are not finite there"


def not_finite(documents: Sequence[Tensor]) -> str | None:
    """Say of how many tokens the KL is no finite number; None if it is one everywhere."""
    lost = sum(int((~kl.isfinite()).sum()) for kl in documents)
    tokens = sum(map(len, documents))
    if not lost:
        return None
    return f"the KL of {lost:,} of {tokens:,} tokens is not a finite number: {_WHY}"


def lost_figures(
    rows: Mapping[str, Row], others: Iterable[OtherText], search: Search | None
) -> Iterable[str]:
    """A line for each cache and text whose figures are null."""
    own = rows[REFERENCE].not_finite
    if own:
        yield f"the model itself is broken on this text, whatever its cache: {own}"
    for name, row in rows.items():
        if row.not_finite not in (None, own):
            yield f"'{name}': {row.not_finite}"
    for text in others:
        for name, other in text.variants.items():
            if other.not_finite and not own:
                yield f"'{name}' on {text.dataset}: {other.not_finite}"
    lost = [str(i) for i, kl in search.kl_alone.items() if not isfinite(kl)] if search else []
    if lost:
        yield f"search: layers {', '.join(lost)} alone have a KL that is not finite: {_WHY}"
