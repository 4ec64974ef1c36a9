"""What a page says of caches: KL against bytes, the frontier, and rows in groups of bytes."""

import math
import re
from dataclasses import replace

import pytest
from evaluations import with_measured

from calib.evaluate.page.charts import Point, charts, frontier
from calib.evaluate.page.page import render_html
from calib.evaluate.page.tables import variants_table
from calib.evaluate.report import Figure, Report
from calib.evaluate.summarize import summarize


def point(name, share, kl):
    return Point(name, share, Figure(value=kl, low=0.9 * kl, high=1.1 * kl))


def test_the_frontier_is_what_nothing_beats():
    points = [
        point("large", 0.6, 0.5),
        point("best", 0.53, 0.001),
        point("same bytes", 0.53, 0.002),
        point("small", 0.28, 0.1),
        point("same KL", 0.3, 0.1),
        point("middle", 0.5, 0.01),
    ]
    assert [each.name for each in frontier(points)] == ["small", "middle", "best"]


@pytest.fixture(scope="module")
def report(cache_report):
    return Report.model_validate(cache_report)


def drawn(report):
    return charts(report)["bytes"].svg


def test_the_picture_names_the_frontier(report):
    texts = re.findall(r">([^<>]+)</text>", drawn(report))
    for name in ("int4_per_token_head, baked", "lmdeploy_int8, baked"):
        assert name in texts
    assert "fp8_k_nvfp4_v, baked" not in texts  # no engine has it
    assert "bytes per token, beside a 16-bit cache" in texts


def test_the_picture_comes_first_and_says_what_it_shows(report):
    page = render_html(report)
    assert page.index('id="bytes"') < page.index('id="variants"')
    assert re.search(r'role="img" aria-label="Scatter plot[^"]*"', page)
    assert "from the smallest: int4_per_token_head, baked (0.042), " in " ".join(page.split())


def test_what_others_named_is_not_drawn(report):
    hostile = "<b>hostile</b>"
    given = report.variants["tensor"].model_copy(update={"kind": "given"})
    changes = {"variants": report.variants | {hostile: given}, "subject": hostile}
    text = drawn(report.model_copy(update=changes))
    assert "hostile" not in text
    assert "given" in text


def test_rows_are_in_groups_of_their_bytes(report):
    page = render_html(report)
    groups = re.findall(r'scope="rowgroup"[^>]*>([^<]+)<', page)
    assert groups == [
        "about 8 bits a value",
        "about 4 bits a value",
        "for comparison",
        "reference and controls",
    ]
    row = page.index("<bdi>int4_per_token_head</bdi>")
    assert page.rindex('rowgroup"', 0, row) == page.index("about 4 bits") - len('rowgroup" colspan="8">')


def test_without_other_caches_there_is_no_picture(small_report):
    page = render_html(Report.model_validate(small_report))
    assert 'id="bytes"' not in page
    assert "about 8 bits a value" in page


def test_what_is_no_number_is_no_missing_difference(small_evaluation):
    measured = dict(small_evaluation.measured)
    lost = [each._replace(kl=each.kl * math.nan) for each in measured["tensor"].documents]
    measured["tensor"] = replace(measured["tensor"], documents=lost)
    report = summarize(with_measured(small_evaluation, measured))
    assert report.variants["tensor"].measurable
    row = next(row for row in variants_table(report).lines if row[0] == "tensor")
    assert row[2] == "not finite"
    assert report.advised != "tensor"
    assert render_html(report)
