"""Figures of other text: KL beside the evaluation's own, tokens clipped, and what to say of it."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from calib.choices import REFERENCE
from calib.eval.exceedance import anywhere, clipped_layer
from calib.eval.found import Differs, Events, Figure, OtherRow, OtherText
from calib.eval.lost import not_finite
from calib.eval.other_text import MeasuredElsewhere
from calib.eval.reader import Measured
from calib.eval.schema import Row
from calib.eval.statistics import Values, difference, estimate, perplexity

# shares of tokens from which the verdict names a text
CLIPS, MOST = 0.01, 0.5
_NAMED = 3


def other_text(found: MeasuredElsewhere, measured: Mapping[str, Measured], floor: float) -> OtherText:
    """Figures of one text, of every cache that it was read with."""
    documents, data = found.text.documents, found.text.data
    nll = np.concatenate(_values(d.nll for d in found.divergences[REFERENCE]))
    return OtherText(
        dataset=data.source,
        fingerprint=data.fingerprint,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        ppl=perplexity(nll),
        variants={name: _row(found, measured[name], floor) for name in found.clipped},
    )


def _row(found: MeasuredElsewhere, own: Measured, floor: float) -> OtherRow:
    name, tensors = own.variant.name, own.variant.tensors
    here = _values(d.kl for d in found.divergences[name])
    there = _values(d.kl for d in own.documents)
    kl, apart = estimate(here), difference(here, there)
    layers = sorted(found.clipped[name].items())
    reason = not_finite([each.kl for each in found.divergences[name]])
    return OtherRow(
        kl=kl,
        difference=apart,
        differs=differs(apart, max(kl.high, estimate(there).high), floor),
        clipped=anywhere([layer.tokens for _, layer in layers], tensors),
        layers=[clipped_layer(idx, layer, tensors) for idx, layer in layers],
        **({"not_finite": reason} if reason else {}),
    )


def differs(apart: Figure, largest: float, floor: float) -> Differs:
    """Whether a KL differs; not where neither interval, up to `largest`, leaves the noise floor."""
    if not math.isfinite(apart.value):
        return "not finite"
    if largest <= floor or apart.low <= 0 <= apart.high:
        return "no measurable difference"
    return "higher" if apart.low > 0 else "lower"


def clips(here: Events, own: Events) -> bool:
    """Whether scales clip other text: over `CLIPS` of its tokens and surely more than of our own.

    Surely: the intervals of the two shares do not overlap. Over `MOST` of the tokens is enough
    alone: such scales clip every text.
    """
    return here.share > MOST or (here.share > CLIPS and here.low > own.high)


def clipping(texts: Sequence[OtherText], subject: str, row: Row, label: str) -> str:
    """What the verdict adds: texts on which the subject's scales clip; empty where there are none.

    `row` has the subject's figures on the evaluation's own text, `label` is what it is called.
    """
    if row.clipped is None:
        return ""
    shares = {t.dataset: t.variants[subject].clipped for t in texts if subject in t.variants}
    named = {name: here for name, here in shares.items() if clips(here, row.clipped)}
    worst_first = sorted(named, key=lambda name: -named[name].share)
    if not worst_first:
        return ""
    listed = [f"{name} ({named[name].share:.1%} of tokens)" for name in worst_first[:_NAMED]]
    if more := worst_first[_NAMED:]:
        listed.append(f"{len(more)} more")
    shares_here = f"here {row.clipped.share:.1%}"
    return f"; with {label}, K or V are clipped on {', '.join(listed)}; {shares_here}"


def _values(documents: Iterable[Tensor]) -> list[Values]:
    return [document.double().numpy() for document in documents]
