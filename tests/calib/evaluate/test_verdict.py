"""Verdict, advice and gates are one judgement: none says what another denies."""

import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from evaluations import with_measured

from calib.errors import InputError
from calib.evaluate.measure import Measured
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import summary_lines
from calib.evaluate.report import Figure, Report, Row
from calib.evaluate.statistics import Divergence
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Variant
from calib.evaluate.verdict import Judgement, failures
from calib.files.text import parse_condition

pytestmark = pytest.mark.xdist_group("evaluate")
BETTER = re.compile(r"\. (Scale 1\.0|[^.(]+) (?:is|are) measurably better \(KL")
KINDS = ("fp8", "given")
NO_BETTER = "No other scales that engines load are measurably better."


def measured(kl, kind="fp8"):
    """Three documents of two tokens with this KL, a little apart."""
    nll, agrees = torch.zeros(1), torch.ones(2, dtype=torch.bool)
    documents = [Divergence(torch.full((2,), kl * (1 + i / 100)), agrees, nll) for i in range(3)]
    return Measured(Variant("", "", kind), documents)


def row(kl, what, kind="fp8", measurable=True):
    figure, one = Figure(value=kl, low=kl, high=kl), Figure(value=1.0, low=1.0, high=1.0)
    change = one.model_copy(update={"value": 0.001})
    named = {"description": what, "kind": kind, "measurable": measurable}
    return Row.model_construct(**named, kl=figure, ppl_change=change, top1=one)


def say(floor=1e-5, **variants):
    rows = {name: row(*parts) for name, parts in variants.items()}
    of = {name: measured(parts[0]) for name, parts in variants.items()}
    return Judgement(of, rows, floor).verdict()


def test_the_verdict_is_sentences():
    assert say(none=(0.5, "scale 1.0"), tensor=(0.01, "one scale per layer")) == (
        "FP8 KV cache, one scale per layer: the KL is 0.01 nats [0.01, 0.01], perplexity changes by "
        "+0.10%, and 100.0% of top-1 tokens agree. No other scales that engines load are measurably "
        "better. Scale 1.0 is measurably worse (KL 0.5)."
    )
    assert say(tensor=(0.01, "one scale per layer"), mine=(0.03, "", "given")) == (
        "FP8 KV cache, scales of 'mine': the KL is 0.03 nats [0.03, 0.03], perplexity changes by "
        "+0.10%, and 100.0% of top-1 tokens agree. One scale per layer is measurably better (KL 0.01)."
    )
    assert say(tensor=(1e-6, "one scale per layer", "fp8", False)) == (
        "FP8 KV cache, one scale per layer: it does not differ measurably from the model's own cache "
        "(KL 1e-06 nats, noise floor 1e-05)."
    )
    assert Judgement({}, {}).verdict() == "No FP8 KV cache was measured."
    assert Judgement({}, {}).advise(None) == []


def figures(evaluation, **kl):
    """What was measured, where each of three documents has this KL; `mine` are scales given."""
    measured = {n: m for n, m in evaluation.measured.items() if m.variant.kind not in KINDS}
    for name, values in kl.items():
        found = evaluation.measured["tensor" if name == "mine" else name]
        variant = found.variant
        if name == "mine":
            variant = replace(variant, name=name, description="scales of mine", kind="given")
        pairs = zip(found.documents, values, strict=True)
        documents = [d._replace(kl=torch.full_like(d.kl, value)) for d, value in pairs]
        measured[name] = replace(found, variant=variant, documents=documents, layers={})
    return with_measured(evaluation, measured)


def judged(evaluation, **kl):
    return summarize(figures(evaluation, **kl))


def test_a_noisy_best_hides_no_measurable_difference(small_evaluation):
    # one scale per layer has the lowest mean, by luck in two documents: worse than it is nothing
    values = {"none": (1.0, 1.0, 1.0), "tensor": (0.1, 0.1, 2.4), "attn_head": (0.9, 0.9, 0.9)}
    report = judged(small_evaluation, **values)
    assert report.advised == "tensor"
    assert NO_BETTER in report.verdict
    assert report.advice[0].startswith("Use one scale per layer (--strategy tensor)")


def test_given_scales_that_beat_all_are_kept_and_every_form_says_so(small_evaluation):
    report = judged(small_evaluation, none=(1, 1, 1), tensor=(0.9, 0.9, 0.9), mine=(0.1, 0.2, 0.1))
    assert (report.subject, report.advised) == ("mine", "mine")
    assert report.verdict.endswith(f"{NO_BETTER} Scale 1.0 is measurably worse (KL 1).")
    assert report.advice[0].startswith("Keep the scales of 'mine'")
    printed = "\n".join(summary_lines(report))
    page, text = render_html(report).replace("&#39;", "'"), render_markdown(report).replace("\\", "")
    for line in [report.verdict, *report.advice]:
        assert line in printed
        assert line in text
        assert line in page


def test_between_two_that_differ_is_the_simplest(small_evaluation):
    # per head is better than what was given; scale 1.0 is told from neither
    report = judged(small_evaluation, none=(0.8, 1.1, 0.85), attn_head=(0.9, 0.9, 0.9), mine=(1, 1, 1))
    assert report.advised == "none"
    assert report.verdict.endswith(
        " One scale per KV head is measurably better (KL 0.9), but not measurably better than scale 1.0."
    )


def test_what_the_controls_reach_is_no_difference(small_evaluation, small_report):
    floor = small_report["noise_floor"]
    # just below it: the mean of many equal values may differ from them in its last bit
    report = judged(small_evaluation, none=(floor * (1 - 1e-9),) * 3, tensor=(floor / 2,) * 3)
    assert report.advised == "none"
    assert "does not differ measurably from the model's own cache" in report.verdict
    assert NO_BETTER in report.verdict


def test_half_a_cache_is_judged_by_nobody_and_one_cache_alone_compared_with_nothing(small_evaluation):
    half = {n: small_evaluation.measured[n] for n in ("reference", "bf16", "k only")}
    report = summarize(with_measured(small_evaluation, half))
    assert (report.subject, report.verdict) == (None, "No FP8 KV cache was measured.")
    report = judged(small_evaluation, none=(0.5, 0.5, 0.5))
    assert "measurably" not in report.verdict
    assert report.advice == ["No other scales were measured that scale 1.0 could be compared with."]


LEVELS = ((1.0, 1.0, 1.0), (0.9, 0.9, 0.9), (0.1, 0.1, 2.4), (1e-9,) * 3)
NAMES = ("none", "tensor", "attn_head", "mine")


def test_no_judgement_contradicts_itself(small_evaluation):
    at = [figures(small_evaluation, **dict.fromkeys(NAMES, level)) for level in LEVELS]
    reports = [summarize(each) for each in at]
    for picks in product(range(len(LEVELS)), repeat=len(NAMES)):
        measured = {n: at[i].measured[n] for n, i in zip(NAMES, picks, strict=True)}
        rows = {n: reports[i].variants[n] for n, i in zip(NAMES, picks, strict=True)}
        judgement = Judgement(measured, rows, reports[0].noise_floor)
        best, verdict, (advice, *_) = judgement.advised, judgement.verdict(), judgement.advise(None)
        better = BETTER.search(verdict)
        assert NO_BETTER.lower() in advice.lower()
        assert bool(better) != (NO_BETTER in verdict), verdict
        assert better is None or best != "mine", verdict
        label = "scale 1.0" if best == "none" else rows[best].description
        if better and better[1].lower() != label.lower():
            assert verdict.endswith(f", but not measurably better than {label}."), verdict
        assert best != "none" or "Scale 1.0 is measurably worse" not in verdict
        assert rows["mine"].measurable or better is None, verdict


def report_of(**variants):
    """A report of nothing but these values."""
    rows = {
        name: Row.model_construct(**{metric: Figure(value=x, low=x, high=x) for metric, x in metrics.items()})
        for name, metrics in variants.items()
    }
    return Report.model_construct(variants=rows)


REPORT = report_of(
    reference={"kl": 0.0}, tensor={"kl": 0.03, "top1": 0.9}, attn_head={"kl": 0.01, "top1": 0.97}
)


def test_conditions():
    for text, failed in {
        "kl_mean>0.02": ["tensor"],
        "kl > 0.005": ["tensor", "attn_head"],
        "top1<0.95": ["tensor"],
        "top1<=0.97": ["tensor", "attn_head"],
        "attn_head:kl>=0.01": ["attn_head"],
        "attn_head:kl>0.01": [],
    }.items():
        lines = failures(parse_condition(text), REPORT, ["tensor", "attn_head"])
        assert [line.split(":")[0] for line in lines] == failed, text


@pytest.mark.parametrize("text", ["kl", "speed>3", "kl>much", "kl=1", "", "kl>nan", "kl<-inf", "top1<1e999"])
def test_what_is_no_condition(text):
    with pytest.raises(InputError, match="METRIC one of kl, kl_p99") as caught:
        parse_condition(text)
    assert "\n" not in str(caught.value)


def test_conditions_on_what_was_not_measured_or_is_no_number():
    with pytest.raises(InputError, match="no variant 'channel'; there are tensor, attn_head"):
        failures(parse_condition("channel:kl>1"), REPORT, [])
    with pytest.raises(InputError, match="'kl>1' names no variant, and none was measured"):
        failures(parse_condition("kl>1"), REPORT, [])
    with pytest.raises(InputError, match="passkey was not measured for 'tensor'"):
        failures(parse_condition("tensor:passkey<1"), REPORT, [])
    lost = report_of(tensor={"kl": math.nan})
    for text in ("kl>0.02", "kl<0.02", "tensor:kl>=1e9"):
        lines = failures(parse_condition(text), lost, ["tensor"])
        assert lines == [f"tensor: kl is not a finite number ({text})"]
