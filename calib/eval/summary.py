"""From what was measured to figures with intervals, and to advice."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calib.eval.intervals import Estimate, Values, estimate, quantile
from calib.eval.job import Evaluation
from calib.eval.measure import REFERENCE, Measured

SCHEMA = 1
# what engines can load: the advice is chosen among these
_SERVED = ("none", "tensor", "attn_head")
# a layer stands out where its error is this many times the median layer's
_OUTLIER = 3.0
METRICS = ("kl", "kl_p99", "kl_p999", "ppl_change", "top1", "same_tokens", "passkey")


def summarize(evaluation: Evaluation) -> dict[str, Any]:
    """The report as JSON: see docs/evaluation.md for the schema."""
    measured = evaluation.measured
    rows = {name: _row(m, measured[REFERENCE]) for name, m in measured.items()}
    floor = _floor(measured, rows)
    for name, row in rows.items():
        row["measurable"] = name != REFERENCE and row["kl"]["low"] > floor
    return {
        "schema": SCHEMA,
        "model": evaluation.model,
        "backend": evaluation.backend,
        "dtype": evaluation.dtype,
        "data": {
            "source": evaluation.source,
            "fingerprint": evaluation.fingerprint,
            "calibration_tokens": evaluation.calibration_tokens,
            "documents": len(measured[REFERENCE].documents),
            "tokens": sum(len(d.kl) for d in measured[REFERENCE].documents),
        },
        "bytes_per_token": evaluation.bytes_per_token,
        "noise_floor": floor,
        "variants": rows,
        "advice": advise(measured, rows),
        "warnings": list(evaluation.warnings),
    }


def _row(measured: Measured, reference: Measured) -> dict[str, Any]:
    kl = _per_document(measured, lambda d: d.kl)
    agrees = _per_document(measured, lambda d: d.agrees)
    nll = [
        np.stack([d.nll.double().numpy(), r.nll.double().numpy()], 1)
        for d, r in zip(measured.documents, reference.documents, strict=True)
    ]
    row: dict[str, Any] = {
        "what": "the model's own cache" if measured.variant is None else measured.variant.what,
        "kl": _json(estimate(kl)),
        "kl_p99": _json(estimate(kl, quantile(0.99))),
        "kl_p999": _json(estimate(kl, quantile(0.999))),
        "ppl": math.exp(float(np.concatenate(nll)[:, 0].mean())),
        "ppl_change": _json(estimate(nll, _ppl_change)),
        "top1": _json(estimate(agrees)),
        "top1_count": int(sum(a.sum() for a in agrees)),
    }
    if measured.same_tokens:
        row["same_tokens"] = _json(estimate([np.array([float(n)]) for n in measured.same_tokens]))
    if measured.found_passkeys:
        found = [np.array([float(each)]) for each in measured.found_passkeys]
        row["passkey"] = _json(estimate(found))
    if measured.layers:
        row["layers"] = [_layer(layer) for _, layer in sorted(measured.layers.items())]
    return row


def _layer(layer: Any) -> dict[str, Any]:
    shares = {
        "saturated": layer.saturated / layer.values,
        "underflowed": layer.underflowed / layer.values,
        "range_used": layer.amax,
    }
    return {
        "layer_idx": layer.layer_idx,
        "rel_rms": layer.rel_rms.tolist(),
        **{name: {"k": x[0].tolist(), "v": x[1].tolist()} for name, x in shares.items()},
    }


def _floor(measured: dict[str, Measured], rows: dict[str, Any]) -> float:
    """KL that the controls reach: what is not above it is no difference."""
    controls = [
        rows[name]["kl"]["high"]
        for name, m in measured.items()
        if m.variant is not None and m.variant.kind == "control"
    ]
    return max(controls, default=0.0)


def subjects(report: dict[str, Any], scales: Sequence[Path] | None) -> list[str]:
    """The variants that a condition means that names none: what was given, or what is advised."""
    if scales:
        return [path.resolve().name for path in scales]
    return [name for name in ("attn_head", "tensor") if name in report["variants"]][:1]


def advise(measured: dict[str, Measured], rows: dict[str, Any]) -> list[str]:
    """What to serve, from the figures alone."""
    served = [name for name in _SERVED if name in rows]
    if not served:
        return []
    best = min(served, key=lambda name: rows[name]["kl"]["value"])
    # the simplest that is no worse than the best
    simplest = next(name for name in served if not _worse(measured[name], measured[best]))
    advice = {
        "none": "uncalibrated (scale 1.0) is as good as any scales on this text",
        "tensor": "use one scale per layer (--strategy tensor)",
        "attn_head": "use one scale per KV head (--strategy attn_head)",
    }[simplest]
    lines = [advice]
    outliers = _outliers(rows[simplest].get("layers", []))
    if outliers:
        listed = ",".join(map(str, outliers))
        lines.append(
            f"layers {listed} have more than {_OUTLIER:.0f} times the median layer's error: "
            f"vLLM keeps them in 16 bits with --kv-cache-dtype-skip-layers {listed}"
        )
    return lines


def _worse(one: Measured, other: Measured) -> bool:
    """Whether the KL is higher by more than chance, document by document."""
    if one is other:
        return False
    pairs = zip(one.documents, other.documents, strict=True)
    differences = [(a.kl - b.kl).double().numpy() for a, b in pairs]
    return estimate(differences).low > 0


def _outliers(layers: list[dict[str, Any]]) -> list[int]:
    errors = {layer["layer_idx"]: float(np.mean(layer["rel_rms"])) for layer in layers}
    median = float(np.median(list(errors.values()))) if errors else 0.0
    return [idx for idx, error in errors.items() if error > _OUTLIER * median]


def _per_document(measured: Measured, pick: Callable[[Any], Any]) -> list[Values]:
    return [pick(document).double().numpy() for document in measured.documents]


def _ppl_change(nll: Values) -> float:
    """Relative change of perplexity; columns are the variant's nll and the reference's."""
    return math.expm1(float((nll[:, 0] - nll[:, 1]).mean()))


def _json(figure: Estimate) -> dict[str, float]:
    return {"value": figure.value, "low": figure.low, "high": figure.high}
