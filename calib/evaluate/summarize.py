"""One evaluation as a record, and the report that is made of it: figures with intervals, and advice."""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from calib.caches.types import CacheType, Layers
from calib.capture.directory_scales import ScalesForModel
from calib.choices import REFERENCE
from calib.evaluate.held_out import HeldOut, Readers
from calib.evaluate.inputs import EvaluationText
from calib.evaluate.layer_errors import count_events, layer_row, predict_clipping, value_rows
from calib.evaluate.measure import VariantResults
from calib.evaluate.other_text import OtherTextResults, summarize_text
from calib.evaluate.recommend import Wish, advised_cache, answer_lines, recommend
from calib.evaluate.report import (
    SCHEMA,
    Data,
    Figure,
    LongRow,
    Recommendation,
    Report,
    Row,
    Search,
    Suite,
    Texts,
    explain_not_finite,
    list_lost_figures,
)
from calib.evaluate.serve_commands import Offers
from calib.evaluate.statistics import (
    Divergence,
    Values,
    bin_positions,
    estimate,
    perplexity,
    quantile,
    to_numpy,
)
from calib.evaluate.tasks import Tasks
from calib.evaluate.variants import Setup, Variant
from calib.evaluate.verdict import Judgement
from calib.files.model_directory import ModelDirectory
from calib.formats.output import versions
from calib.recipe import Recipe
from calib.scales.stats import KVStats

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass
class Evaluation:
    """An evaluation; each step of `calib.evaluate.run.evaluate` sets the fields under its name."""

    # open
    model_name: str
    checkpoint: ModelDirectory
    config: PreTrainedConfig
    recipe: Recipe
    suite: Suite
    wish: Wish | None
    tasks: Tasks
    scales: Mapping[str, ScalesForModel]  # of --scales, by the names of their variants
    readers: Readers
    warnings: list[str]  # of all steps
    # load
    setup: Setup = field(init=False)
    text: EvaluationText = field(init=False)
    other_documents: Sequence[HeldOut] = field(init=False)
    layers: Layers = field(init=False)
    cache_types: Sequence[CacheType] = field(init=False)
    # calibrate
    stats: KVStats = field(init=False)
    random_stats: KVStats = field(init=False)
    # choose variants
    offers: Offers = field(init=False)
    refused: dict[str, str] = field(default_factory=dict)  # variants that cannot be served, and why
    variants: Sequence[Variant] = field(init=False)  # without the reference
    # measure
    measured: dict[str, VariantResults] = field(init=False)
    texts: Texts = field(init=False)
    other_texts: Sequence[OtherTextResults] = field(init=False)
    search: Search | None = None
    task_figures: dict[str, Any] = field(default_factory=dict)  # as in the report; empty without tasks


def summarize(evaluation: Evaluation) -> Report:
    """Make the report: figures with their intervals, verdict and advice; a cache by the wish."""
    measured = evaluation.measured
    kl = {name: estimate(to_numpy(d.kl for d in m.documents)) for name, m in measured.items()}
    controls = [name for name, m in measured.items() if m.variant.kind == "control"]
    # a KL that the controls reach is not a difference
    floor = float(np.max([0.0, *(kl[name].high for name in controls)]))
    rows = _rows(evaluation, kl, floor)
    judgement = Judgement(measured, rows, floor)
    recommended = _recommend(evaluation, judgement)
    advice = judgement.advise(evaluation.search, evaluation.config.get_text_config(decoder=True))
    other_texts = [summarize_text(text, measured, floor) for text in evaluation.other_texts]
    verdict, subject = judgement.verdict(other_texts), judgement.subject
    if recommended is not None:
        advice.append(advised_cache(recommended))
        if evaluation.wish is not None:  # the answer to another question than which scales are best
            verdict, subject = f"{answer_lines(recommended)[0]}.", recommended.chosen.cache
            advice = advice[-1:]
    return Report(
        **_conditions(evaluation),
        noise_floor=floor,
        variants=rows,
        layers=value_rows(measured[REFERENCE].values, evaluation.stats.places()),
        texts=evaluation.texts,
        verdict=verdict,
        subject=subject,
        advised=judgement.advised,
        advice=advice,
        recommended=recommended,
        other_texts=other_texts,
        search=evaluation.search,
        **evaluation.task_figures,
        warnings=[*evaluation.warnings, *list_lost_figures(rows, other_texts, evaluation.search)],
    )


def _recommend(evaluation: Evaluation, judgement: Judgement) -> Recommendation | None:
    """Choose a cache for a sound model, if there is a wish or other types than static FP8 were measured."""
    has_types = any(row.kind == "cache" for row in judgement.rows.values())
    if judgement.is_broken or (evaluation.wish is None and not has_types):
        return None
    answer = recommend(judgement, evaluation.offers, evaluation.wish or Wish())
    return answer.model_copy(update={"not_served": {**evaluation.refused, **answer.not_served}})


def _rows(evaluation: Evaluation, kl: Mapping[str, Figure], floor: float) -> dict[str, Row]:
    """Make the figures of every variant; a KL that is not a number counts as a difference."""
    reference = evaluation.measured[REFERENCE]
    rows = {}
    for name, measured in evaluation.measured.items():
        divergences = to_numpy(d.kl for d in measured.documents)
        agreements = to_numpy(d.agrees for d in measured.documents)
        pairs = zip(measured.documents, reference.documents, strict=True)
        nll = to_numpy(torch.stack([d.nll, r.nll], 1) for d, r in pairs)
        rows[name] = Row(
            description=measured.variant.description,
            kind=measured.variant.kind,
            kl=kl[name],
            kl_p99=estimate(divergences, quantile(0.99)),
            kl_p999=estimate(divergences, quantile(0.999)),
            ppl=perplexity(np.concatenate(nll)[:, 0]),
            ppl_change=estimate(nll, _ppl_change),
            top1=estimate(agreements),
            top1_count=int(sum(a.sum() for a in agreements)),
            kl_by_position=bin_positions(measured.documents),
            measurable=name != REFERENCE and not kl[name].low <= floor,
            **{key: value for key, value in _optional_figures(evaluation, measured).items() if value},
        )
    return rows


def _optional_figures(evaluation: Evaluation, measured: VariantResults) -> dict[str, Any]:
    """Return the entries that not every variant has; None, False or empty where this one has not."""
    variant, scales, layers = measured.variant, measured.variant.scales, sorted(measured.layers.items())
    own = evaluation.measured[REFERENCE].long_documents
    skips_tokens = evaluation.recipe.data.skip_first > 0  # whose clipping cannot be predicted
    chances = {} if skips_tokens else predict_clipping(variant, evaluation.stats)
    reference_bytes = 2 * evaluation.layers.values if variant.kind == REFERENCE else None
    return {
        "cache": variant.cache,
        "is_baked": variant.is_baked,
        "bytes_per_token": reference_bytes or variant.bytes_per_token,
        "strategy": scales and scales.strategy,
        "fp8_dtype": scales and scales.fp8_dtype,
        "tensors": scales and variant.tensors,
        "attention": variant.is_fp8_cache and evaluation.setup.attention,
        "not_finite": explain_not_finite([d.kl for d in (*measured.documents, *measured.long_documents)]),
        "long": measured.long_documents and _long_row(measured.long_documents, own),
        "same_tokens": _estimate_mean(measured.same_tokens),
        "passkey": _estimate_mean(measured.passkeys),
        "layers": [
            layer_row(idx, layer, variant.layers[idx], variant.tensors, chances.get(idx))
            for idx, layer in layers
        ],
        "clipped": layers and count_events((layer for _, layer in layers), variant.tensors),
    }


def _long_row(documents: Sequence[Divergence], own: Sequence[Divergence]) -> LongRow:
    """Return the figures of one cache on long documents, beside the `own` cache of the model."""
    margins = [document.margins for document in documents]
    changes = [margin - other.margins for margin, other in zip(margins, own, strict=True)]
    return LongRow(
        kl=estimate(to_numpy(document.kl for document in documents)),
        top1=estimate(to_numpy(document.agrees for document in documents)),
        kl_by_position=bin_positions(documents),
        margin=estimate(to_numpy(margins)),
        margin_change=estimate(to_numpy(changes)),
        margin_moved=estimate(to_numpy(change.abs() for change in changes)),
        retrieved=estimate(to_numpy(margin > 0 for margin in margins)),
    )


def _estimate_mean(values: Sequence[float]) -> Figure | None:
    """Estimate the mean of a value for each prompt."""
    return estimate([np.array([float(value)]) for value in values]) if values else None


def _ppl_change(nll: Values) -> float:
    """Return the relative change of perplexity; columns are the variant's nll and the reference's."""
    return float(np.expm1((nll[:, 0] - nll[:, 1]).mean()))


def _conditions(evaluation: Evaluation) -> dict[str, Any]:
    """Describe the model, machine and text of the evaluation."""
    setup, text = evaluation.setup, evaluation.text
    values = evaluation.layers.values
    return {
        "version": SCHEMA,
        "versions": versions(),
        "machine": machine_name(setup.model.device.type),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": evaluation.model_name,
        "suite": evaluation.suite,
        "backend": setup.resolved_backend,
        "attention": setup.attention,
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "data": Data(
            source=text.data.source,
            fingerprint=text.data.fingerprint,
            calibration_tokens=evaluation.stats.tokens,
            documents=len(text.documents),
            tokens=sum(map(len, text.documents)),
            layer_documents=len(text.layer_documents),
            new_tokens=text.new_tokens,
            long_documents=len(text.long_documents),
            long_tokens=sum(len(document.token_ids) for document in text.long_documents),
        ),
        "bytes_per_token": {"fp8": values, "16bit": 2 * values},
        "recipe": evaluation.recipe.model_dump(mode="json"),
    }


def machine_name(device: str) -> str:
    """Return the name of the GPU or CPU behind torch's `device`."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    # Linux alone leaves `platform.processor()` empty, or says no more than x86_64
    text = _CPU_INFO.read_text(errors="replace") if _CPU_INFO.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()
