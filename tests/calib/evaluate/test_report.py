"""report.html as text and report.json: what is in them, what names cannot put there, that files are whole."""

import copy
import json
import math
import re
import resource
from datetime import datetime, timezone
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from runpy import run_path

import matplotlib
import pytest

from calib.data.batches import CPU_TOKENS_PER_BATCH
from calib.evaluate import report as report_module
from calib.evaluate.page import page as files
from calib.evaluate.page.charts import Point, chart_style, charts, draw_kl_by_bytes, frontier
from calib.evaluate.report import Figure, Report
from calib.recipe import Recipe

pytestmark = pytest.mark.xdist_group("evaluate")
HOSTILE = "<script>alert(1)</script></style></svg>'\"&$x^2$ {{ 7 * 7 }} \x00\x1b[31m\x08\ud800 日本 🙂"
SHOWN = re.sub("[\x00\x1b\x08\ud800]", "\ufffd", HOSTILE)


def html(report):
    return files.render_html(Report.model_validate(report))


class Page(HTMLParser):
    """The elements of a page, its attributes and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)
        self.line = " ".join("\n".join(self.texts).split())  # without the line breaks of templates

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


@pytest.fixture(scope="module")
def whole(small_report):
    return html(small_report)


@pytest.fixture(scope="module")
def page(whole):
    return Page(whole)


def test_everything_is_there_and_figures_are_those_of_the_report(small_report, page):
    assert page.tags.count("h1") == 1
    for name, row in small_report["variants"].items():
        low, high = row["kl_p99"]["low"], row["kl_p99"]["high"]
        cells = {name, row["what"], f"[{low:.2g}, {high:.2g}]", f"{row['top1']['value']:.1%}"}
        assert cells <= set(page.texts)
    tokens = small_report["data"]["calibration_tokens"]
    for said in (
        *(small_report["verdict"], small_report["advice"][0], small_report["warnings"][0]),
        *(f"{package} {found}" for package, found in small_report["versions"].items()),
        f"{small_report['data']['tokens']:,} held-out tokens",
        "no measurable difference",  # the controls
        f"the calibration has read, {tokens:,} in all",
        f"Scales from {tokens:,} other tokens of it",
    ):
        assert said in page.line
    # two line charts, heat maps, a histogram for each of three layers
    assert page.values("class").count("chart") == 9
    assert page.tags.count("figcaption") == page.tags.count("figure") == 9
    assert all(len(label) > 20 for label in page.labels)
    for layer in small_report["layers"]:
        for points in layer["growth"].values():
            assert (points[-1][0], points) == (tokens, sorted(points))
    assert "Amax against tokens" in page.texts


def test_names_and_texts_are_text(small_report, page, tmp_path):
    report = copy.deepcopy(small_report)
    for entries in (report["variants"], report["texts"]["continuations"]):
        entries[HOSTILE] = entries.pop(report["subject"])
    report["variants"][HOSTILE]["kind"] = "given"
    report["data"]["source"] = report["variants"]["tensor"]["what"] = HOSTILE
    report["texts"]["prompts"] = [HOSTILE] * 2
    for name in ("reference", HOSTILE):
        report["texts"]["continuations"][name][0] |= {"same": "", "rest": name}
    said = dict.fromkeys(("model", "verdict", "subject"), HOSTILE)
    said |= {key: [HOSTILE] for key in ("warnings", "advice")}
    files.write_report(Report.model_validate(report | said), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["model"] == HOSTILE
    assert "日本" in (tmp_path / "report.md").read_text(encoding="utf-8")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    found = Page(text)
    # title, heading, verdict, source, advice, warning: 6; in the table: its name and what another
    # is; two legends, two captions, the text above histograms; two prompts, folded and whole, and
    # above each text its name; one text. Nothing in pictures
    assert found.line.count(SHOWN) == 6 + 2 + 5 + 6 + 1
    assert any(SHOWN in label for label in found.labels)
    assert found.tags.count("style") == found.tags.count("h1") == 1
    assert found.tags.count("svg") == page.tags.count("svg")
    assert "script" not in found.tags
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", text)


def test_nothing_is_loaded_and_references_are_found(whole, page):
    assert not re.search(r"https?:|@import|url\((?!#)", whole)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    hrefs = page.values("href") + page.values("xlink:href")
    assert all(re.match(r"#|data:image/png;base64,", href) for href in hrefs)
    assert re.findall('<a href="#([a-z]+)">', whole) == re.findall('<section id="([a-z]+)">', whole)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
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


def test_what_was_not_measured_has_no_charts_and_what_was_searched_has_one_more(small_report, monkeypatch):
    report = copy.deepcopy(small_report)
    for layer in report["layers"]:
        del layer["growth"]
    assert "Amax against tokens" not in Page(html(report)).texts
    report["variants"] = {n: report["variants"][n] for n in ("reference", "bf16", "eager")}
    report |= {"subject": None, "advised": None, "advice": [], "layers": []}
    report["texts"] = {"prompts": [], "continuations": {}}
    page = Page(html(report))
    assert "chart" not in page.values("class")
    assert "bf16" in page.texts
    search = {"variant": "tensor", "budget": 0.01, "documents": 2, "kl_of_all": 0.02, "skipped": [1]}
    search |= {"kl": 0.007, "kl_alone": {"0": 0.0, "1": 0.012, "2": 0.004}}
    tasks = {"arc_easy": {"reference": {"acc": {"value": 0.5, "stderr": 0.25}}}}
    harness = {"name": "lm-eval", "version": "1.2.3", "limit": None}
    page = Page(html(small_report | {"search": search, "tasks": tasks, "harness": harness}))
    assert page.values("class").count("chart") == 10
    assert "with layer 1 in 16 bits (hollow): 0.007, the budget is 0.01" in page.line
    assert "0.5 ± 0.25" in page.texts
    assert "lm-eval 1.2.3" in page.line
    assert "Not drawn" not in page.line
    assert not re.search("(?<!long )document", page.line.lower())  # they are samples
    custom = {f"mine{i}": small_report["variants"]["tensor"] | {"kind": "given"} for i in range(4)}
    page = Page(html(small_report | {"variants": small_report["variants"] | custom}))
    assert page.line.count("Not drawn, for 3 of --scales are: mine3 .") == 2  # by position, by layer
    monkeypatch.setattr("calib.evaluate.page.charts._CUSTOM_DASHES", ((), (5, 2)))
    page = Page(html(small_report | {"variants": small_report["variants"] | custom}))
    assert page.line.count("Not drawn, for 2 of --scales are: mine2 , mine3 .") == 2


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


def test_the_page_of_a_large_model_is_no_large_file(small_report):
    report, layers = copy.deepcopy(small_report), range(80)
    values = report["layers"][0]
    for letter in ("k", "v"):
        values[letter]["amax"] = [1.0 + i / 7 for i in range(8)]
    report["layers"] = [values | {"layer_idx": i} for i in layers]
    for row in report["variants"].values():
        if "layers" in row:
            layer = row["layers"][0] | {"rel_rms": [0.01 + i / 999 for i in range(64)]}
            row["layers"] = [layer | {"layer_idx": i} for i in layers]
    text = html(report)
    assert Page(text).values("class").count("chart") == 86
    assert len(text.encode()) < 1_500_000


def test_files_are_written_whole_or_not_at_all(small_report, whole, tmp_path, monkeypatch):
    def written():
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    new = Report.model_validate(small_report | {"model": "new"})
    files.write_report(Report.model_validate(small_report), tmp_path)
    old = written()
    assert sorted(old) == ["report.html", "report.json", "report.md"]
    assert old["report.html"].decode() == whole
    monkeypatch.setitem(files._FORMS, "report.html", lambda report: whole)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) - 1, before[1]))  # the page alone exceeds it
    try:
        for place in (tmp_path, tmp_path / "other"):
            assert "File too large; no file of a report was replaced" in files.write_report(new, place)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert written() == old
    monkeypatch.setitem(files._FORMS, "report.html", lambda report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_report(new, tmp_path)
    assert written() == old


def test_the_picture_of_bytes_names_the_frontier_and_plain_names_of_directories(cache_report, whole):
    points = {"large": (0.6, 0.5), "best": (0.53, 0.001), "same bytes": (0.53, 0.002)}
    points |= {"small": (0.28, 0.1), "same KL": (0.3, 0.1), "middle": (0.5, 0.01)}
    drawn = [Point(n, share, Figure(value=x, low=x, high=x)) for n, (share, x) in points.items()]
    assert [each.name for each in frontier(drawn)] == ["small", "middle", "best"]
    texts = re.findall(r">([^<>]+)</text>", charts(cache_report)["bytes"].svg)
    named = {"int4_per_token_head, baked", "lmdeploy_int8, baked"}
    assert named | {"bytes per token, beside a 16-bit cache"} <= set(texts)
    assert "fp8_k_nvfp4_v, baked" not in texts  # no engine has it
    hostile = "<b>hostile</b>"
    given = cache_report.variants["tensor"].model_copy(update={"kind": "given"})
    variants = cache_report.variants | {"my/scales-1.0": given, hostile: given}
    report = cache_report.model_copy(update={"variants": variants, "subject": hostile})
    text = charts(report)["bytes"].svg
    assert "hostile" not in text
    assert {"my/scales-1.0", "--scales 2"} <= {*re.findall(r">([^<>]+)</text>", text)}
    assert f"--scales 2: {hostile} ." in Page(files.render_html(report)).line
    page = files.render_html(cache_report)  # drawn first, and in the table in groups of their bytes
    assert page.index('id="bytes"') < page.index('id="variants"')
    assert re.search(r'role="img" aria-label="Scatter plot[^"]*"', page)
    assert "from the smallest: <bdi>int4_per_token_head, baked</bdi> (0.042), " in " ".join(page.split())
    groups = re.findall(r'scope="rowgroup"[^>]*>([^<]+)<', page)
    bits = [f"about {n} bits a value" for n in (8, 4)]
    assert groups == [*bits, "for comparison", "reference and controls"]
    row = page.index("<bdi>int4_per_token_head</bdi>")
    assert page.rindex('rowgroup"', 0, row) == page.index("about 4 bits") - len('rowgroup" colspan="8">')
    assert 'id="bytes"' not in whole  # without other caches there is no picture
    assert bits[0] in whole


def test_more_tokens_are_further_right():
    points = {"larger": 0.53, "half": 0.5, "smaller": 0.45}
    kl = {name: Figure(value=1 - x, low=1 - x, high=1 - x) for name, x in points.items()}
    with chart_style():
        svg = draw_kl_by_bytes([Point(name, x, kl[name]) for name, x in points.items()], 0, by_tokens=True)
    places = {text: float(x) for x, text in re.findall(r' x="([\d.]+)"[^>]*>([^<>]+)</text>', svg)}
    ticks = {float(text[:-1]): x for text, x in places.items() if re.fullmatch(r"[\d.]+x", text)}
    assert len(ticks) >= 3
    assert [*ticks.values()] == sorted(ticks.values())
    assert [*ticks] == sorted(ticks)
    assert places["larger"] < ticks[2] < places["half"] < places["smaller"]


def test_texts_are_cut_where_they_leave_the_reference(small_evaluation, small_report):
    texts = small_report["texts"]
    assert texts["prompts"] == list(small_evaluation.texts.prompts)
    # one tensor alone and the controls write nothing
    names = {"reference", "none", "e5m2", "tensor", "attn_head", "channel", "random"}
    assert texts["continuations"].keys() == names
    reference = texts["continuations"]["reference"]
    assert [(text["rest"], text["same_tokens"]) for text in reference] == [("", 6)] * 2
    for name, written in texts["continuations"].items():
        assert [t["same_tokens"] for t in written] == small_evaluation.measured[name].same_tokens
        for text, other in zip(written, reference, strict=True):
            assert other["same"].startswith(text["same"])


def test_conditions_are_recorded_and_read_back_as_they_were_written(small_recipe, small_report):
    assert {"python", "fp8kv", "transformers", "torch"} <= set(small_report["versions"])
    assert small_report["versions"]["torch"] == version("torch")
    assert small_report["machine"].strip()
    created = datetime.fromisoformat(small_report["created"])  # with a time zone
    assert 0 <= (datetime.now(timezone.utc) - created).total_seconds() + 1 < 24 * 3600
    assert small_report["data"]["layer_documents"] == 2
    row = small_report["variants"]["channel"]
    assert (row["kind"], row["strategy"], row["fp8_dtype"]) == ("fp8", "channel", "e4m3fn")
    bins = [(each["from"], each["to"], each["tokens"]) for each in row["kl_by_position"]]
    assert bins == [(0, 16, 48), (16, 32, 48), (32, 40, 24)]
    mean = sum(each["value"] * each["tokens"] for each in row["kl_by_position"]) / 120
    assert mean == pytest.approx(row["kl"]["value"], rel=1e-6)
    recipe = Recipe.model_validate(small_report["recipe"])
    asked = small_recipe.evaluation.model_copy(update={"backend": "torch"})
    assert (recipe.data.seed, recipe.evaluation) == (small_recipe.data.seed, asked)
    assert recipe.data.seq_len == small_report["suite"]["seq_len"]
    resolved = (recipe.device, recipe.dtype, recipe.offload, recipe.data.batch_size)
    assert resolved == ("cpu", "float32", "none", CPU_TOKENS_PER_BATCH // recipe.data.seq_len)
    written = json.dumps(small_report)
    assert json.dumps(Report.model_validate_json(written).to_json()) == written
    assert {"layers", "strategy", "passkey"}.isdisjoint(small_report["variants"]["bf16"])
    assert "tasks" not in small_report
    variants = small_report["variants"]
    assert [variants["reference"][name]["value"] for name in ("kl", "ppl_change", "top1")] == [0, 0, 1]
    assert (variants["bf16"]["measurable"], variants["e5m2"]["measurable"]) == (False, True)
    assert variants["eager"]["kl"]["value"] < variants["bf16"]["kl"]["value"] <= small_report["noise_floor"]


def test_every_field_is_documented_and_so_is_the_schema(small_report, capsys):
    variant, docs = small_report["variants"]["tensor"], Path(__file__).parents[3] / "docs"
    names = {*small_report, *small_report["data"], *variant, *variant["kl_by_position"][0]}
    names |= {*variant["layers"][0], *small_report["layers"][0]["k"]}
    names |= {*small_report["texts"], *small_report["texts"]["continuations"]["tensor"][0]}
    documented = (docs / "reference/report.md").read_text()
    assert {n for n in names if not re.search(rf"`[^`]*\b{n}\b[^`]*`", documented)} == set()
    run_path(report_module.__file__, run_name="__main__")
    schema = (docs / "report.schema.json").read_text()
    assert capsys.readouterr().out == schema, "python -m calib.evaluate.report > docs/report.schema.json"
