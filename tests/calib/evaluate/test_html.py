"""report.html as text: what is in it, what names cannot put into it, that it loads nothing."""

import copy
import errno
import json
import math
import re
import resource
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from calib.errors import InputError
from calib.evaluate.page import page as files
from calib.evaluate.page.charts import Point, charts, frontier
from calib.evaluate.report import Figure, Report

pytestmark = pytest.mark.xdist_group("evaluate")
HOSTILE = "<script>alert(1)</script></style></svg>'\"&$x^2$ {{ 7 * 7 }} \x00\x1b[31m\x08\ud800 日本 🙂"
SHOWN = HOSTILE
for invisible in "\x00\x1b\x08\ud800":
    SHOWN = SHOWN.replace(invisible, "\ufffd")


def html(report):
    return files.render_html(Report.model_validate(report))


def write_report(report, directory):
    files.write_report(Report.model_validate(report), directory)


class Page(HTMLParser):
    """The elements of a page, its attributes and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)
        self.text = "\n".join(self.texts)
        self.line = " ".join(self.text.split())  # without the line breaks of templates

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, name):
        return [value for key, value in self.attributes if key == name]

    @property
    def labels(self):
        """What is said of each chart to who cannot see it."""
        return [x for x in self.values("aria-label") if re.match(r"\w+ (chart|map|plot|of the)", x)]


def renamed(report, old, new):
    """The report with one variant under another name, as if the user had given it."""
    report = copy.deepcopy(report)
    for names in (report["variants"], report["texts"]["continuations"]):
        entries = [(new if name == old else name, entry) for name, entry in names.items()]
        names.clear()
        names.update(entries)
    report["variants"][new]["kind"] = "given"
    return report | {"subject": new}


@pytest.fixture(scope="module")
def whole(small_report):
    return html(small_report)


@pytest.fixture(scope="module")
def page(whole):
    return Page(whole)


def test_everything_is_there_and_figures_are_those_of_the_report(small_report, page):
    assert page.tags.count("h1") == 1
    assert small_report["verdict"] in page.text
    for name, row in small_report["variants"].items():
        assert name in page.texts
        assert row["what"] in page.texts
        low, high = row["kl_p99"]["low"], row["kl_p99"]["high"]
        assert f"[{low:.2g}, {high:.2g}]" in page.texts
        assert f"{row['top1']['value']:.1%}" in page.texts
    assert f"{small_report['data']['tokens']:,} held-out tokens" in page.text
    assert small_report["advice"][0] in page.text
    assert small_report["warnings"][0] in page.text
    for package, found in small_report["versions"].items():
        assert f"{package} {found}" in page.text
    assert "no measurable difference" in page.text  # the controls
    # two line charts, heat maps, a histogram for each of three layers
    assert page.values("class").count("chart") == 9
    assert page.tags.count("figcaption") == page.tags.count("figure") == 9
    assert all(len(label) > 20 for label in page.labels)


def test_names_and_texts_are_text(small_report, page, tmp_path):
    report = renamed(small_report, small_report["subject"], HOSTILE)
    report["data"]["source"] = HOSTILE
    report["variants"]["tensor"]["what"] = HOSTILE
    report["texts"]["prompts"] = [HOSTILE] * 2
    for name in ("reference", HOSTILE):
        report["texts"]["continuations"][name][0] |= {"same": "", "rest": name}
    said = {"model": HOSTILE, "verdict": HOSTILE, "warnings": [HOSTILE], "advice": [HOSTILE]}

    write_report(report | said, tmp_path)

    assert json.loads((tmp_path / "report.json").read_text())["model"] == HOSTILE
    assert "日本" in (tmp_path / "report.md").read_text(encoding="utf-8")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = Page(text)
    # title, heading, verdict, source, advice, warning: 6; in the table: its name and what another
    # is; two legends, two captions, the text above histograms; two prompts, folded and whole, and
    # above each text its name; one text. Nothing in pictures
    assert found.text.count(SHOWN) == 6 + 2 + 5 + 6 + 1
    assert any(SHOWN in label for label in found.labels)
    assert found.tags.count("style") == found.tags.count("h1") == 1
    assert found.tags.count("svg") == page.tags.count("svg")
    assert "script" not in found.tags
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", text)


def test_nothing_is_loaded_and_references_are_found(whole, page):
    assert "http:" not in whole
    assert "https:" not in whole
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert "@import" not in whole
    for name in ("href", "xlink:href"):
        assert all(re.match(r"#|data:image/png;base64,", href) for href in page.values(name))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    hrefs = page.values("href") + page.values("xlink:href")
    referenced = {href[1:] for href in hrefs if href.startswith("#")}
    assert len(referenced) > 20  # most are in charts
    assert referenced | set(re.findall(r"url\(#([^)]+)\)", whole)) <= set(ids)
    assert not page.values("src") + page.values("srcset")


def test_charts_have_the_colours_of_the_page_and_leave_matplotlib_as_it_was(small_report, whole):
    css = Path(files.__file__).parent.joinpath("templates/report.css").read_text()
    pictures = re.findall(r"<svg xlink.*?</svg>|<svg width.*?</svg>", whole, re.DOTALL)
    assert len(pictures) == 9
    for picture in pictures:
        assert not re.search(r"#[0-9a-f]{6}\b|(fill|stroke): (#|rgb)", picture)
        variables = set(re.findall(r"var\(--(\w+)\)", picture))
        assert {"c0", "muted"} <= variables
        assert all(f"--{name}: " in css for name in variables)
    with matplotlib.rc_context({"xtick.direction": "in", "svg.fonttype": "path"}):
        assert html(copy.deepcopy(small_report)) == whole  # whatever the user's own style is
        assert matplotlib.rcParams["xtick.direction"] == "in"


def test_a_report_without_fp8_caches_has_a_page(small_report):
    report = copy.deepcopy(small_report)
    report["variants"] = {n: report["variants"][n] for n in ("reference", "bf16", "eager")}
    report |= {"subject": None, "advised": None, "advice": [], "layers": []}
    report["texts"] = {"prompts": [], "continuations": {}}
    page = Page(html(report))
    assert "chart" not in page.values("class")
    assert "bf16" in page.texts


def test_searched_layers_and_tasks_are_shown(small_report):
    search = {"variant": "tensor", "budget": 0.01, "documents": 2, "kl_of_all": 0.02, "skipped": [1]}
    search |= {"kl": 0.007, "kl_alone": {"0": 0.0, "1": 0.012, "2": 0.004}}
    tasks = {"arc_easy": {"reference": {"acc": {"value": 0.5, "stderr": 0.25}}}}
    harness = {"name": "lm-eval", "version": "1.2.3", "limit": None}
    page = Page(html(small_report | {"search": search, "tasks": tasks, "harness": harness}))
    assert page.values("class").count("chart") == 10
    assert "with layers 1 in 16 bits (hollow): 0.007, the budget is 0.01" in page.line
    assert "0.5 ± 0.25" in page.texts
    assert "lm-eval 1.2.3" in page.text


@pytest.mark.parametrize("number", [0.0, 1e-5, math.nan, math.inf])
def test_any_number_can_be_drawn(small_report, number):
    report = copy.deepcopy(small_report)
    figure = dict.fromkeys(("value", "low", "high"), number)
    for name in ("none", "tensor"):
        row = report["variants"][name]
        row |= {"kl": figure, "kl_by_position": [b | figure for b in row["kl_by_position"]]}
        for layer in row["layers"]:
            layer |= {"rel_rms_layer": figure, "rel_rms": [number] * 4}
    report["layers"][0]["k"]["amax"] = [number] * 2
    report["layers"][1]["v"] |= {"counts": [], "zeros": 77}
    points = report["layers"][0]["growth"]["k"]
    points[-1] = (points[-1][0], number)
    assert Page(html(report)).values("class").count("chart") == 9


def test_growth_is_that_of_the_calibration_and_not_drawn_where_unknown(small_report, page):
    tokens = small_report["data"]["calibration_tokens"]
    assert f"the calibration has read, {tokens:,} in all" in page.line
    for layer in small_report["layers"]:
        for points in layer["growth"].values():
            assert points[-1][0] == tokens
            assert points == sorted(points)
    report = copy.deepcopy(small_report)
    for layer in report["layers"]:
        del layer["growth"]
    assert "Amax against tokens" in page.texts
    assert "Amax against tokens" not in Page(html(report)).texts


def grown(report, layers, kv_heads, heads):
    """The report as of a model of this size."""
    report = copy.deepcopy(report)
    values = report["layers"][0]
    for letter in ("k", "v"):
        values[letter]["amax"] = [1.0 + i / 7 for i in range(kv_heads)]
    report["layers"] = [values | {"layer_idx": i} for i in range(layers)]
    for row in report["variants"].values():
        if "layers" in row:
            layer = row["layers"][0] | {"rel_rms": [0.01 + i / 999 for i in range(heads)]}
            row["layers"] = [layer | {"layer_idx": i} for i in range(layers)]
    return report


def test_the_page_of_a_large_model_is_no_large_file(small_report):
    text = html(grown(small_report, 80, 8, 64))
    assert Page(text).values("class").count("chart") == 86
    assert len(text.encode()) < 1_500_000


@pytest.fixture
def old_report(small_report, tmp_path):
    """An earlier report, and the contents of its three files."""
    write_report(small_report, tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["report.html", "report.json", "report.md"]
    return {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_files_are_written_whole_or_not_at_all(old_report, small_report, whole, tmp_path, monkeypatch):
    assert old_report[tmp_path / "report.html"].decode() == whole
    write, new = Path.write_text, small_report | {"model": "new"}

    def write_half(path, text, **options):
        writes.append(path)
        is_last = len(writes) == number + 1
        write(path, text[: len(text) // 2] if is_last else text, **options)
        if is_last:
            raise OSError(errno.ENOSPC, "No space left on device")

    def fail(report):
        raise RuntimeError

    monkeypatch.setitem(files._FORMS, "report.html", lambda report: whole)
    for number in range(3):
        writes = []
        monkeypatch.setattr(Path, "write_text", write_half)
        with pytest.raises(InputError, match="No space left on device; no file of a report was"):
            write_report(new, tmp_path)
        assert len(writes) == number + 1
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old_report
    monkeypatch.setitem(files._FORMS, "report.html", fail)
    with pytest.raises(RuntimeError):
        write_report(new, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old_report


def test_a_limit_of_the_system_that_only_the_page_exceeds_leaves_the_old_report(
    old_report, small_report, whole, tmp_path, monkeypatch
):
    monkeypatch.setitem(files._FORMS, "report.html", lambda report: whole)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) - 1, before[1]))
    try:
        with pytest.raises(InputError, match="File too large; no file of a report was replaced"):
            write_report(small_report | {"model": "new"}, tmp_path)
        with pytest.raises(InputError, match="File too large"):
            write_report(small_report, tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old_report


def test_the_frontier_is_what_nothing_beats():
    points = {"large": (0.6, 0.5), "best": (0.53, 0.001), "same bytes": (0.53, 0.002)}
    points |= {"small": (0.28, 0.1), "same KL": (0.3, 0.1), "middle": (0.5, 0.01)}
    drawn = [Point(n, share, Figure(value=x, low=x, high=x)) for n, (share, x) in points.items()]
    assert [each.name for each in frontier(drawn)] == ["small", "middle", "best"]


def test_the_picture_of_bytes_names_the_frontier_and_nothing_that_others_named(cache_report):
    texts = re.findall(r">([^<>]+)</text>", charts(cache_report)["bytes"].svg)
    for name in ("int4_per_token_head, baked", "lmdeploy_int8, baked"):
        assert name in texts
    assert "fp8_k_nvfp4_v, baked" not in texts  # no engine has it
    assert "bytes per token, beside a 16-bit cache" in texts

    hostile = "<b>hostile</b>"
    given = cache_report.variants["tensor"].model_copy(update={"kind": "given"})
    changes = {"variants": cache_report.variants | {hostile: given}, "subject": hostile}
    text = charts(cache_report.model_copy(update=changes))["bytes"].svg
    assert "hostile" not in text
    assert "given" in text


def test_caches_are_drawn_first_and_in_groups_of_their_bytes(cache_report, whole):
    page = files.render_html(cache_report)
    assert page.index('id="bytes"') < page.index('id="variants"')
    assert re.search(r'role="img" aria-label="Scatter plot[^"]*"', page)
    assert "from the smallest: int4_per_token_head, baked (0.042), " in " ".join(page.split())
    groups = re.findall(r'scope="rowgroup"[^>]*>([^<]+)<', page)
    assert groups == [
        "about 8 bits a value",
        "about 4 bits a value",
        "for comparison",
        "reference and controls",
    ]
    row = page.index("<bdi>int4_per_token_head</bdi>")
    assert page.rindex('rowgroup"', 0, row) == page.index("about 4 bits") - len('rowgroup" colspan="8">')
    # without other caches there is no picture
    assert 'id="bytes"' not in whole
    assert "about 8 bits a value" in whole
