"""report.html as text: what is in it, what names cannot put into it, that it loads nothing."""

import copy
import errno
import json
import math
import re
import resource
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from calib.errors import InputError
from calib.evaluate.page import page as files
from calib.evaluate.report import Report

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

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)

    @property
    def line(self):
        """The text without the line breaks of templates."""
        return " ".join(self.text.split())

    @property
    def labels(self):
        """What is said of each chart to who cannot see it."""
        return [x for x in self.values("aria-label") if re.match(r"\w+ (chart|map|plot|of the)", x)]

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


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
def page(small_report):
    return Page(html(small_report))


def test_everything_is_there(small_report, page):
    assert page.tags.count("h1") == 1
    assert small_report["verdict"] in page.text
    for name, row in small_report["variants"].items():
        assert name in page.texts
        assert row["what"] in page.texts
    assert small_report["advice"][0] in page.text
    assert small_report["warnings"][0] in page.text
    for package, found in small_report["versions"].items():
        assert f"{package} {found}" in page.text
    assert "no measurable difference" in page.text  # the controls
    # two line charts, heat maps, a histogram for each of three layers
    assert page.values("class").count("chart") == 9
    assert page.tags.count("figcaption") == page.tags.count("figure") == 9
    assert all(len(label) > 20 for label in page.labels)


def test_figures_are_those_of_the_report(small_report, page):
    for row in small_report["variants"].values():
        low, high = row["kl_p99"]["low"], row["kl_p99"]["high"]
        assert f"[{low:.2g}, {high:.2g}]" in page.texts
        assert f"{row['top1']['value']:.1%}" in page.texts
    assert f"{small_report['data']['tokens']:,} held-out tokens" in page.text


def test_names_and_texts_are_text(small_report, page):
    report = renamed(small_report, small_report["subject"], HOSTILE)
    report["data"]["source"] = HOSTILE
    report["variants"]["tensor"]["what"] = HOSTILE
    report["texts"]["prompts"] = [HOSTILE] * 2
    for name in ("reference", HOSTILE):
        report["texts"]["continuations"][name][0] |= {"same": "", "rest": name}
    said = {"model": HOSTILE, "verdict": HOSTILE, "warnings": [HOSTILE], "advice": [HOSTILE]}
    text = html(report | said)
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


def test_the_same_report_gives_the_same_page(small_report):
    assert html(small_report) == html(copy.deepcopy(small_report))


def test_nothing_is_loaded_and_references_are_found(small_report, page):
    text = html(small_report)
    assert "http:" not in text
    assert "https:" not in text
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert "@import" not in text
    for name in ("href", "xlink:href"):
        assert all(re.match(r"#|data:image/png;base64,", href) for href in page.values(name))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    hrefs = page.values("href") + page.values("xlink:href")
    referenced = {href[1:] for href in hrefs if href.startswith("#")}
    assert len(referenced) > 20  # most are in charts
    assert referenced | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert not page.values("src") + page.values("srcset")


def test_a_report_without_fp8_caches_has_a_page(small_report):
    report = copy.deepcopy(small_report)
    report["variants"] = {n: report["variants"][n] for n in ("reference", "bf16", "eager")}
    report |= {"subject": None, "advised": None, "advice": [], "layers": []}
    report["texts"] = {"prompts": [], "continuations": {}}
    page = Page(html(report))
    assert "chart" not in page.values("class")
    assert "bf16" in page.texts


def test_searched_layers_and_tasks_are_shown(small_report):
    search = {
        "variant": "tensor",
        "budget": 0.01,
        "documents": 2,
        "kl_of_all": 0.02,
        "kl_alone": {"0": 0.0, "1": 0.012, "2": 0.004},
        "skipped": [1],
        "kl": 0.007,
    }
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


def test_growth_is_that_of_the_calibration_and_not_drawn_where_unknown(small_report):
    page = Page(html(small_report))
    tokens = small_report["data"]["calibration_tokens"]
    assert f"the calibration has read, {tokens:,} in all" in page.line
    for layer in small_report["layers"]:
        for letter in "kv":
            points = layer["growth"][letter]
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


def test_files_are_written_whole_or_not_at_all(small_report, tmp_path, monkeypatch):
    write_report(small_report, tmp_path)
    names = ["report.html", "report.json", "report.md"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == 1
    before = (tmp_path / "report.html").read_text()
    assert before == html(small_report)

    def fail(report):
        raise RuntimeError

    monkeypatch.setitem(files._FORMS, "report.html", fail)
    with pytest.raises(RuntimeError):
        write_report(small_report | {"model": "none of them"}, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert (tmp_path / "report.html").read_text() == before
    assert "none of them" not in (tmp_path / "report.json").read_text()


OLD = {"report.html", "report.json", "report.md"}


@pytest.fixture
def old_report(small_report, tmp_path):
    """A directory with an earlier report in three files, and the contents of all."""
    write_report(small_report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == OLD
    return {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("number", range(3))
def test_a_disk_that_is_full_before_any_of_the_files_leaves_the_old_report(
    number, old_report, small_report, tmp_path, monkeypatch
):
    whole, writes = Path.write_text, []

    def write_text(path, text, **options):
        writes.append(path)
        if len(writes) == number + 1:
            whole(path, text[: len(text) // 2], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, text, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(InputError, match="No space left on device; no file of a report was"):
        write_report(small_report | {"model": "new"}, tmp_path)
    assert len(writes) == number + 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old_report


def test_a_limit_of_the_system_that_only_the_page_exceeds_leaves_the_old_report(
    old_report, small_report, tmp_path
):
    report = small_report | {"model": "new"}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(html(report)) - 1, before[1]))
    try:
        with pytest.raises(InputError, match="File too large; no file of a report was replaced"):
            write_report(report, tmp_path)
        with pytest.raises(InputError, match="File too large"):
            write_report(report, tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old_report


def test_hostile_names_are_written(small_report, tmp_path):
    write_report(small_report | {"model": HOSTILE}, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["model"] == HOSTILE
    assert "日本" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_templates_are_package_data():
    names = {entry.name for entry in Path(files.__file__).parent.rglob("*")}
    assert {"report.html", "report.md", "report.css", "macros.html", "glossary.html"} <= names
    assert "chart.mplstyle" in names


def test_charts_have_the_colours_of_the_page(small_report):
    css = Path(files.__file__).parent.joinpath("templates/report.css").read_text()
    pictures = re.findall(r"<svg xlink.*?</svg>|<svg width.*?</svg>", html(small_report), re.DOTALL)
    assert len(pictures) == 9
    for picture in pictures:
        assert not re.search(r"#[0-9a-f]{6}\b|(fill|stroke): (#|rgb)", picture)
        variables = set(re.findall(r"var\(--(\w+)\)", picture))
        assert {"c0", "muted"} <= variables
        assert all(f"--{name}: " in css for name in variables)


def test_charts_are_quiet_and_leave_matplotlib_as_it_was(small_report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(small_report))
    (tmp_path / "matplotlibrc").write_text("xtick.direction: in\nsvg.fonttype: path\n")
    code = (
        "import json, sys\n"
        "from calib.evaluate.page.page import render_html\n"
        "from calib.evaluate.report import Report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "page = render_html(Report(**json.load(open('report.json', encoding='utf-8'))))\n"
        "import matplotlib\n"
        "assert matplotlib.rcParams['xtick.direction'] == 'in'\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "sys.stdout.write(page)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout == html(small_report)
