"""report.html in headless Chromium: it is seen whole, on any screen."""

import re

import pytest
from browser import browser, look, needs_browser

from calib.evaluate.page.page import write_report
from calib.evaluate.report import Report

pytestmark = [needs_browser, pytest.mark.xdist_group("evaluate")]
CLIPPED = {"tokens": 2048, "events": 77, "low": 0.0297, "high": 0.047}
LAYER = {"layer_idx": 127, "saturated": {"k": [0.001], "v": [0.0]}}
LAYER |= {"exceedance": CLIPPED | {"by_head": {"k": [77], "v": [0]}}}
FIGURE = {"value": 0.0123, "low": 0.0101, "high": 0.0145}
OTHER = {"kl": FIGURE, "difference": FIGURE, "differs": "no measurable difference", "clipped": CLIPPED}
OTHER |= {"layers": [LAYER]}
TEXT = {"fingerprint": "0", "documents": 8, "tokens": 2048, "ppl": 9.0}
TEXT |= {"variants": {"attn_head": OTHER, "tensor": OTHER}}
SEARCH = {"variant": "tensor", "budget": 0.01, "documents": 2, "kl_of_all": 0.02, "skipped": [1], "kl": 0.007}
# one search, one table of tasks and other text, so that every section is there
MORE = {
    "search": SEARCH | {"kl_alone": {"0": 0.001, "1": 0.012, "2": 0.004}},
    "tasks": {"arc_easy": {"reference": {"acc_norm": {"value": 0.5, "stderr": 0.25}}}},
    "harness": {"name": "lm-eval", "version": "0", "limit": None},
    "other_texts": [TEXT | {"dataset": name} for name in ("builtin:code", "an_unbroken_path/" * 12)],
    "warnings": ["an_unbroken_name_" * 20],
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def address(tmp_path_factory, cache_report):
    directory = tmp_path_factory.mktemp("report")
    write_report(Report.model_validate(cache_report.to_json() | MORE), directory)
    return (directory / "report.html").as_uri()


@pytest.fixture
def page(driver, address):
    """The page on a wide light screen; `look` changes that."""
    look(driver)
    driver.get(address)
    driver.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true })")
    return driver


def luminance(color):
    parts = [int(x) / 255 for x in re.findall(r"\d+", color)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(*colors):
    low, high = sorted(map(luminance, colors))
    return (high + 0.05) / (low + 0.05)


def style(driver, selector, name):
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return driver.execute_script(script, selector, name)


# Of every chart: the size of its smallest letters in CSS pixels, and texts that cover each other.
LETTERS = """
const hit = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
  && a.top < b.bottom - 3 && b.top < a.bottom - 3;
return [...document.querySelectorAll('figure .chart svg')].map(svg => {
  const texts = [...svg.querySelectorAll('text')];
  const boxes = texts.map(t => t.getBoundingClientRect());
  const sizes = texts.map(t => parseFloat(getComputedStyle(t).fontSize));
  const covered = texts.flatMap((t, i) =>
    boxes.slice(i + 1).filter(box => hit(boxes[i], box)).map(() => t.textContent));
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return {size: scale * Math.min(...sizes), covered: covered}})
"""


@pytest.mark.parametrize("width", [375, 1200])
def test_charts_are_seen_and_their_letters_can_be_read(page, width):
    look(page, width=width)
    for chart in page.find_elements("css selector", "figure .chart"):
        assert (chart.size["width"] > 250, chart.size["height"] > 100) == (True, True)
        assert chart.get_attribute("role") == "img"
        assert len(chart.get_attribute("aria-label")) > 20
        assert chart.find_element("xpath", "ancestor::figure//figcaption").text
        shapes = chart.find_elements("css selector", "path, use, image")
        assert sum(s.rect["width"] > 0 or s.rect["height"] > 0 for s in shapes) > 3
    letters = page.execute_script(LETTERS)
    assert len(letters) == 11
    assert min(each["size"] for each in letters) >= 8.5
    assert [each["covered"] for each in letters] == [[]] * 11


# What a box has beyond its edge: its charts, whether shadows tell of it, and its first two columns;
# scrolled to its end, how far the last column is from the edge.
BOXES = """
return [...document.querySelectorAll('.scroll')].map(box => {
  const {left, right} = box.getBoundingClientRect();
  const cells = [...box.querySelectorAll('tbody tr:last-child > *')];
  const shown = cells.filter(cell => cell.offsetWidth);
  const found = {
    charts: box.querySelectorAll('.chart').length,
    scrolls: box.scrollWidth > box.clientWidth,
    shadows: getComputedStyle(box).backgroundImage.split('linear-gradient').length - 1,
    stays: getComputedStyle(shown[0] ?? box).position === 'sticky',
    cut: shown.slice(0, 2).filter(cell => cell.getBoundingClientRect().right > right + 1).length,
    left: left, right: right,
  };
  box.scrollLeft = 1e6;
  return {end: cells.pop().getBoundingClientRect().right - right, ...found}})
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_screen_scrolls_sideways_and_a_phone_says_where_tables_go_on(page, scheme):
    for width in (320, 375, 800, 1200, 420):
        look(page, width=width, scheme=scheme)
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        outside = page.execute_script(
            "return [...document.querySelectorAll('main *, header *')].filter(e => "
            "!e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1).length"
        )
        assert outside == 0, width
    for chart in page.find_elements("css selector", "figure .chart"):
        assert 0 <= chart.rect["x"] < chart.rect["x"] + chart.rect["width"] <= 420
    boxes = page.execute_script(BOXES)
    assert sum(box["scrolls"] for box in boxes) >= 3
    for box in boxes:
        assert (box["charts"], abs(box["end"]) <= 1) == (0, True)
        assert 0 <= box["left"] < box["right"] <= 420
        assert not box["scrolls"] or (box["shadows"], box["stays"], box["cut"]) == (4, True, 0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(page, scheme):
    look(page, scheme=scheme)
    paper = style(page, "body", "backgroundColor")
    assert (luminance(paper) > 0.5) == (scheme == "light")
    for selector in ("body", "figcaption", ".chart text", "a", ".warning", ".detail"):
        name = "fill" if "text" in selector else "color"
        assert contrast(style(page, selector, name), paper) >= 4.5, selector
    for number in range(9):
        page.execute_script(f"document.body.style.outlineColor = 'var(--c{number})'")
        # WCAG asks for 3 in what is no text
        assert contrast(style(page, "body", "outlineColor"), paper) >= 3, number


def test_dark_print_is_printed_light(page):
    look(page, media="print", scheme="dark")
    assert luminance(style(page, "body", "backgroundColor")) > 0.9
    assert contrast(style(page, ".chart text", "fill"), "rgb(255, 255, 255)") >= 4.5
    assert style(page, "nav", "display") == "none"
    pdf = page.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert len(pdf["data"]) > 20_000
