"""Turn measurements into figures with intervals, and into advice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calib.choices import REFERENCE
from calib.eval.advice import advise, advised, subject, verdict
from calib.eval.layer_errors import layer_rows, value_rows
from calib.eval.reader import Measured
from calib.eval.schema import Conditions, Figure, Report, Row, Search, Texts
from calib.eval.statistics import Values, estimate, kl_by_position, quantile
from calib.eval.variants import Variant


@dataclass(frozen=True)
class Evaluation:
    """Measurements, before figures are made of them."""

    conditions: Conditions
    measured: dict[str, Measured]
    texts: Texts
    search: Search | None
    tasks: dict[str, Any]  # as in the report; empty: none were asked for
    warnings: Sequence[str]


def summarize(evaluation: Evaluation) -> Report:
    """Make the report: figures with their intervals, verdict and advice."""
    measured = evaluation.measured
    kl = {name: estimate(_per_document(m, lambda d: d.kl)) for name, m in measured.items()}
    controls = [name for name, m in measured.items() if m.variant.kind == "control"]
    # what the controls reach is no difference
    floor = max((kl[name].high for name in controls), default=0.0)
    rows = {
        name: _row(m, measured[REFERENCE], kl[name], name != REFERENCE and kl[name].low > floor)
        for name, m in measured.items()
    }
    return Report(
        **dict(evaluation.conditions),
        noise_floor=floor,
        variants=rows,
        layers=value_rows(measured[REFERENCE].values),
        texts=evaluation.texts,
        verdict=verdict(measured, rows, floor),
        subject=subject(measured, rows),
        advised=advised(measured, rows),
        advice=advise(measured, rows, evaluation.search),
        search=evaluation.search,
        **evaluation.tasks,
        warnings=list(evaluation.warnings),
    )


def _row(measured: Measured, reference: Measured, kl: Figure, measurable: bool) -> Row:
    divergences = _per_document(measured, lambda d: d.kl)
    long = [d.kl.double().numpy() for d in measured.long_documents]
    agrees = _per_document(measured, lambda d: d.agrees)
    nll = [
        np.stack([d.nll.double().numpy(), r.nll.double().numpy()], 1)
        for d, r in zip(measured.documents, reference.documents, strict=True)
    ]
    return Row(
        **_described(measured.variant),
        kl=kl,
        kl_p99=estimate(divergences, quantile(0.99)),
        kl_p999=estimate(divergences, quantile(0.999)),
        ppl=math.exp(float(np.concatenate(nll)[:, 0].mean())),
        ppl_change=estimate(nll, _ppl_change),
        top1=estimate(agrees),
        top1_count=int(sum(a.sum() for a in agrees)),
        kl_by_position=kl_by_position(divergences + long),
        **_generated(measured),
        measurable=measurable,
    )


def _described(variant: Variant) -> dict[str, Any]:
    described = {"what": variant.what, "kind": variant.kind}
    if variant.scales is None:
        return described
    return {
        **described,
        "strategy": variant.scales.strategy,
        "fp8_dtype": variant.scales.fp8_dtype,
        "tensors": variant.tensors,
    }


def _generated(measured: Measured) -> dict[str, Any]:
    """Figures that not every variant has: greedy text, passkeys, layers."""
    numbers: dict[str, Sequence[float]] = {
        "same_tokens": measured.same_tokens,
        "passkey": measured.found_passkeys,
    }
    found: dict[str, Any] = {
        name: estimate([np.array([float(each)]) for each in values])
        for name, values in numbers.items()
        if values
    }
    if measured.layers:
        found["layers"] = layer_rows(measured.layers, measured.variant.layers)
    return found


def _per_document(measured: Measured, pick: Callable[[Any], Any]) -> list[Values]:
    return [pick(document).double().numpy() for document in measured.documents]


def _ppl_change(nll: Values) -> float:
    """Relative change of perplexity; columns are the variant's nll and the reference's."""
    return math.expm1(float((nll[:, 0] - nll[:, 1]).mean()))
