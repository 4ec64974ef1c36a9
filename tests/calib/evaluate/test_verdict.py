"""Verdict, advice and recommendation are one judgement: none says what another denies."""

import re
from dataclasses import replace
from itertools import product

import torch
from evaluations import with_measured

from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import summary_lines
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import Judgement

BETTER = re.compile(r"\. (Scale 1\.0|[^.(]+) (?:is|are) measurably better \(KL")
KINDS = ("fp8", "given")
NO_BETTER = "No other scales that engines load are measurably better."


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
    report = judged(
        small_evaluation,
        none=(1.0, 1.0, 1.0),
        tensor=(0.1, 0.1, 2.4),
        attn_head=(0.9, 0.9, 0.9),
    )
    assert report.advised == "tensor"
    assert NO_BETTER in report.verdict
    assert report.advice[0].startswith("Use one scale per layer (--strategy tensor)")


def test_given_scales_that_beat_all_are_kept(small_evaluation):
    report = judged(small_evaluation, none=(1, 1, 1), tensor=(0.9, 0.9, 0.9), mine=(0.1, 0.2, 0.1))
    assert (report.subject, report.advised) == ("mine", "mine")
    assert report.verdict.endswith(f"{NO_BETTER} Scale 1.0 is measurably worse (KL 1).")
    assert report.advice[0].startswith("Keep the scales of 'mine'")


def test_the_verdict_names_what_is_advised(small_evaluation):
    report = judged(
        small_evaluation,
        none=(0.3, 0.3, 0.3),
        attn_head=(0.1, 0.5, 0.1),
        mine=(1, 1, 1),
    )
    assert report.advised == "none"
    assert report.verdict.endswith(" Scale 1.0 is measurably better (KL 0.3).")
    assert report.advice[0].startswith("Serve without scales (scale 1.0)")


def test_between_two_that_differ_is_the_simplest(small_evaluation):
    # per head is better than what was given; scale 1.0 is told from neither
    report = judged(
        small_evaluation,
        none=(0.8, 1.1, 0.85),
        attn_head=(0.9, 0.9, 0.9),
        mine=(1, 1, 1),
    )
    assert report.advised == "none"
    assert report.verdict.endswith(
        " One scale per KV head is measurably better (KL 0.9), but not measurably better than scale 1.0."
    )


def test_what_the_controls_reach_is_no_difference(small_evaluation):
    floor = summarize(small_evaluation).noise_floor
    # just below it: the mean of many equal values may differ from them in its last bit
    report = judged(small_evaluation, none=(floor * (1 - 1e-9),) * 3, tensor=(floor / 2,) * 3)
    assert report.advised == "none"
    assert "does not differ measurably from the model's own cache" in report.verdict
    assert NO_BETTER in report.verdict


def test_one_cache_alone_is_compared_with_nothing(small_evaluation):
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


def test_every_form_says_the_same(small_evaluation):
    report = judged(small_evaluation, none=(1, 1, 1), tensor=(0.9, 0.9, 0.9), mine=(1, 2, 1))
    said = [report.verdict, *report.advice]
    printed = "\n".join(summary_lines(report))
    for line in said:
        assert line in printed
        assert line in render_markdown(report).replace("\\", "")
        assert line in render_html(report).replace("&#39;", "'")
