"""Turn measurements into figures with intervals, and into advice."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calib.choices import REFERENCE
from calib.evaluate.layer_errors import anywhere, layer_row, value_rows
from calib.evaluate.measure import Measured
from calib.evaluate.other_text import MeasuredElsewhere, other_text
from calib.evaluate.recommend import Wish, advised_cache, recommend
from calib.evaluate.report import (
    Conditions,
    Figure,
    Recommendation,
    Report,
    Row,
    Search,
    Texts,
    lost_figures,
    not_finite,
)
from calib.evaluate.serve_commands import Offers
from calib.evaluate.statistics import Values, estimate, kl_by_position, perplexity, quantile
from calib.evaluate.verdict import Judgement
from calib.scales.places import LayerPlaces


class Evaluation(NamedTuple):
    """Measurements, before figures are made of them."""

    conditions: Conditions
    measured: dict[str, Measured]
    texts: Texts
    search: Search | None
    tasks: dict[str, Any]  # as in the report; empty: none were asked for
    warnings: Sequence[str]
    offers: Offers | None = None  # to recommend by
    other_texts: Sequence[MeasuredElsewhere] = ()
    places: Sequence[LayerPlaces] = ()  # of the calibration
    refused: dict[str, str] | None = None  # what was not measured: why it cannot be served
    clip_chances: Mapping[str, Mapping[int, float]] = {}  # predicted, by variant and layer


def summarize(evaluation: Evaluation, wish: Wish | None = None) -> Report:
    """Make the report: figures with their intervals, verdict and advice; a cache by `wish`."""
    measured = evaluation.measured
    kl = {name: estimate(_values(d.kl for d in m.documents)) for name, m in measured.items()}
    controls = [name for name, m in measured.items() if m.variant.kind == "control"]
    # what the controls reach is no difference
    floor = float(np.max([0.0, *(kl[name].high for name in controls)]))
    rows = {
        # what is no number is a difference
        name: _row(m, kl[name], name != REFERENCE and not kl[name].low <= floor, evaluation)
        for name, m in measured.items()
    }
    size = evaluation.conditions.bytes_per_token["16bit"]
    rows[REFERENCE] = rows[REFERENCE].model_copy(update={"bytes_per_token": size})
    judgement = Judgement(measured, rows, floor)
    recommended = _recommended(evaluation, judgement, wish)
    others = [other_text(each, measured, floor) for each in evaluation.other_texts]
    return Report(
        **dict(evaluation.conditions),
        noise_floor=floor,
        variants=rows,
        layers=value_rows(measured[REFERENCE].values, evaluation.places),
        texts=evaluation.texts,
        verdict=judgement.verdict(others),
        subject=judgement.subject,
        advised=judgement.advised,
        advice=_advice(evaluation, judgement, recommended, wish),
        recommended=recommended,
        other_texts=others,
        search=evaluation.search,
        **evaluation.tasks,
        warnings=[*evaluation.warnings, *lost_figures(rows, others, evaluation.search)],
    )


def _advice(
    evaluation: Evaluation,
    judgement: Judgement,
    recommended: Recommendation | None,
    wish: Wish | None,
) -> list[str]:
    lines = judgement.advise(evaluation.search)
    return lines + advised_cache(recommended, wish)


def _recommended(evaluation: Evaluation, judgement: Judgement, wish: Wish | None) -> Recommendation | None:
    """What to serve, if other caches than static FP8 were measured or it was asked for."""
    asked = wish is not None or any(row.kind == "cache" for row in judgement.rows.values())
    if evaluation.offers is None or not asked:
        return None
    found = recommend(judgement, evaluation.offers, wish or Wish())
    refused = {**(evaluation.refused or {}), **found.not_served}
    return found.model_copy(update={"not_served": refused})


def _row(measured: Measured, kl: Figure, measurable: bool, evaluation: Evaluation) -> Row:
    reference = evaluation.measured[REFERENCE]
    divergences = _values(d.kl for d in measured.documents)
    agrees = _values(d.agrees for d in measured.documents)
    pairs = zip(measured.documents, reference.documents, strict=True)
    nll = _values(torch.stack([d.nll, r.nll], 1) for d, r in pairs)
    return Row(
        what=measured.variant.what,
        kind=measured.variant.kind,
        kl=kl,
        kl_p99=estimate(divergences, quantile(0.99)),
        kl_p999=estimate(divergences, quantile(0.999)),
        ppl=perplexity(np.concatenate(nll)[:, 0]),
        ppl_change=estimate(nll, _ppl_change),
        top1=estimate(agrees),
        top1_count=int(sum(a.sum() for a in agrees)),
        kl_by_position=kl_by_position(divergences + _values(d.kl for d in measured.long_documents)),
        **_present(measured, evaluation),
        measurable=measurable,
    )


def _present(measured: Measured, evaluation: Evaluation) -> dict[str, Any]:
    """Make the entries that not every variant has: scales, greedy text, passkeys, layers."""
    found: dict[str, Any] = {}
    variant, scales = measured.variant, measured.variant.scales
    size = variant.bytes_per_token
    held = {"cache": variant.cache, "is_baked": variant.is_baked or None, "bytes_per_token": size}
    if scales is not None:
        found = {"strategy": scales.strategy, "fp8_dtype": scales.fp8_dtype}
        found["tensors"] = variant.tensors
    if variant.in_mode:
        found["attention"] = evaluation.conditions.attention
    if reason := not_finite([each.kl for each in (*measured.documents, *measured.long_documents)]):
        found["not_finite"] = reason
    found |= {name: each for name, each in held.items() if each is not None}
    greedy, keys = measured.same_tokens, measured.found_passkeys
    numbers: dict[str, Sequence[float]] = {"same_tokens": greedy, "passkey": keys}
    for name, values in numbers.items():
        if values:
            found[name] = estimate([np.array([float(each)]) for each in values])
    if measured.layers:
        layers = sorted(measured.layers.items())
        tensors = variant.tensors
        chances = evaluation.clip_chances.get(variant.name, {})
        found["layers"] = [
            layer_row(i, each, variant.layers[i], tensors, chances.get(i)) for i, each in layers
        ]
        found["clipped"] = anywhere([each.clipped for _, each in layers], tensors)
    return found


def _values(documents: Iterable[Tensor]) -> list[Values]:
    return [document.double().numpy() for document in documents]


def _ppl_change(nll: Values) -> float:
    """Relative change of perplexity; columns are the variant's nll and the reference's."""
    return float(np.expm1((nll[:, 0] - nll[:, 1]).mean()))
