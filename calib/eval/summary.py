"""From what was measured to figures with intervals, and to advice."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from calib.eval.advice import advise, advised, subject, verdict
from calib.eval.conditions import conditions
from calib.eval.intervals import Values, as_json, estimate, quantile
from calib.eval.job import Evaluation
from calib.eval.layer_summary import layer_rows, value_rows
from calib.eval.measure import Measured
from calib.eval.positions import kl_by_position
from calib.eval.variants import REFERENCE, Variant

SCHEMA = 1


def summarize(evaluation: Evaluation) -> dict[str, Any]:
    """The report as JSON: see docs/evaluation.md for the schema."""
    measured = evaluation.measured
    rows = {name: _row(m, measured[REFERENCE]) for name, m in measured.items()}
    floor = _floor(measured, rows)
    for name, row in rows.items():
        row["measurable"] = name != REFERENCE and row["kl"]["low"] > floor
    return {
        "schema": SCHEMA,
        **conditions(evaluation.device),
        "model": evaluation.model,
        "suite": asdict(evaluation.suite),
        "backend": evaluation.backend,
        "dtype": evaluation.dtype,
        "data": {
            "source": evaluation.source,
            "fingerprint": evaluation.fingerprint,
            "calibration_tokens": evaluation.calibration_tokens,
            "documents": len(measured[REFERENCE].documents),
            "tokens": sum(len(d.kl) for d in measured[REFERENCE].documents),
            "layer_documents": min(
                evaluation.suite.layer_documents, len(measured[REFERENCE].documents)
            ),
            "new_tokens": evaluation.suite.new_tokens,
        },
        "bytes_per_token": evaluation.bytes_per_token,
        "noise_floor": floor,
        "variants": rows,
        "layers": value_rows(measured[REFERENCE].values),
        "texts": _texts(evaluation),
        "verdict": verdict(measured, rows, floor),
        "subject": subject(measured, rows),
        "advised": advised(measured, rows),
        "advice": advise(measured, rows, evaluation.search),
        "search": None if evaluation.search is None else asdict(evaluation.search),
        **evaluation.tasks,
        "warnings": list(evaluation.warnings),
    }


def _row(measured: Measured, reference: Measured) -> dict[str, Any]:
    kl = _per_document(measured, lambda d: d.kl)
    long = [d.kl.double().numpy() for d in measured.long_documents]
    agrees = _per_document(measured, lambda d: d.agrees)
    nll = [
        np.stack([d.nll.double().numpy(), r.nll.double().numpy()], 1)
        for d, r in zip(measured.documents, reference.documents, strict=True)
    ]
    row: dict[str, Any] = {
        **_described(measured.variant),
        "kl": as_json(estimate(kl)),
        "kl_p99": as_json(estimate(kl, quantile(0.99))),
        "kl_p999": as_json(estimate(kl, quantile(0.999))),
        "ppl": math.exp(float(np.concatenate(nll)[:, 0].mean())),
        "ppl_change": as_json(estimate(nll, _ppl_change)),
        "top1": as_json(estimate(agrees)),
        "top1_count": int(sum(a.sum() for a in agrees)),
        "kl_by_position": kl_by_position(kl + long),
    }
    if measured.same_tokens:
        row["same_tokens"] = as_json(estimate([np.array([float(n)]) for n in measured.same_tokens]))
    if measured.found_passkeys:
        found = [np.array([float(each)]) for each in measured.found_passkeys]
        row["passkey"] = as_json(estimate(found))
    if measured.layers:
        row["layers"] = layer_rows(measured)
    return row


def _described(variant: Variant | None) -> dict[str, Any]:
    if variant is None:
        return {"what": "the model's own cache", "kind": REFERENCE}
    described = {"what": variant.what, "kind": variant.kind}
    if variant.scales is None:
        return described
    return {
        **described,
        "strategy": variant.scales.strategy,
        "fp8_dtype": variant.scales.fp8_dtype,
        "tensors": variant.tensors,
    }


def _texts(evaluation: Evaluation) -> dict[str, Any]:
    """Prompts, and what each variant that generates wrote after them."""
    same = {name: m.same_tokens for name, m in evaluation.measured.items()}
    return {
        "prompts": list(evaluation.prompts),
        "continuations": {
            name: [
                {"same_tokens": count, "same": text.same, "rest": text.rest}
                for count, text in zip(same[name], texts, strict=True)
            ]
            for name, texts in evaluation.texts.items()
        },
    }


def _floor(measured: dict[str, Measured], rows: dict[str, Any]) -> float:
    """KL that the controls reach: what is not above it is no difference."""
    controls = [
        rows[name]["kl"]["high"]
        for name, m in measured.items()
        if m.variant is not None and m.variant.kind == "control"
    ]
    return max(controls, default=0.0)


def subjects(report: dict[str, Any]) -> list[str]:
    """The variants that a condition means that names none: what was given, else the subject."""
    given = [name for name, row in report["variants"].items() if row.get("kind") == "given"]
    return given or [name for name in (report["subject"],) if name is not None]


def _per_document(measured: Measured, pick: Callable[[Any], Any]) -> list[Values]:
    return [pick(document).double().numpy() for document in measured.documents]


def _ppl_change(nll: Values) -> float:
    """Relative change of perplexity; columns are the variant's nll and the reference's."""
    return math.expm1(float((nll[:, 0] - nll[:, 1]).mean()))
