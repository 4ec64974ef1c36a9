"""Two reports side by side: the figures, what makes them doubtful, and what is not a report."""

import json
import re

import pytest
from command_line import fp8kv, one_line_error, ran

from calib.errors import InputError
from calib.evaluate.compare import load_report


def figure(value, spread=0.1):
    low, high = sorted((value * (1 - spread), value * (1 + spread)))
    return {"value": value, "low": low, "high": high}


def row(kl, *, measurable=True, **others):
    figures = {"kl": figure(kl), "ppl_change": figure(0.01), "top1": figure(0.95)}
    return {**figures, "measurable": measurable, "what": "a cache", **others}


REPORT = {
    "schema": 1,
    "model": "org/model",
    "backend": "torch",
    "dtype": "float32",
    "data": {
        "source": "builtin:python-docs",
        "fingerprint": "12ab",
        "documents": 8,
        "tokens": 4096,
        "calibration_tokens": 6144,
    },
    "variants": {
        "reference": row(0.0, measurable=False),
        "tensor": row(0.02, same_tokens=figure(20.0), passkey=figure(1.0)),
        "attn_head": row(0.01),
        "only here": row(0.5),
    },
    "texts": {"not": ["compared"]},
}


@pytest.fixture
def report(tmp_path):
    """Write a report, some of its keys replaced by dotted name; returns its directory."""

    def write(name, **changes):
        document = json.loads(json.dumps(REPORT))
        for dotted, value in changes.items():
            place = document
            *parents, leaf = dotted.split("__")
            for parent in parents:
                place = place[parent]
            place[leaf] = value
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(document))
        return tmp_path / name

    return write


def compared(*arguments):
    done = ran("compare", *arguments, "--json")
    return json.loads(done.stdout)


def test_ratio_and_whether_the_intervals_overlap(report):
    # 0.02 ± 10 % and 0.023 ± 10 % overlap, 0.01 ± 10 % and 0.03 ± 10 % do not
    a, b = report("a"), report("b", variants__tensor=row(0.023), variants__attn_head=row(0.03))
    found = compared(a, b)
    tensor, head = found["variants"]["tensor"], found["variants"]["attn_head"]
    assert tensor["kl_ratio"] == pytest.approx(1.15)
    assert tensor["no_measurable_difference"]
    assert head["kl_ratio"] == pytest.approx(3.0)
    assert not head["no_measurable_difference"]
    assert head["b"]["kl"] == figure(0.03)
    assert tensor["a"]["passkey"] == figure(1.0)
    assert tensor["b"]["passkey"] is None
    assert "reference" not in found["variants"]
    assert found["warnings"] == []
    backward = compared(b, a)["variants"]["attn_head"]
    assert backward["kl_ratio"] == pytest.approx(1 / 3)
    assert not backward["no_measurable_difference"]


def test_below_the_noise_floor_nothing_differs(report):
    low = report("low", variants__tensor=row(1e-9, measurable=False))
    lower = report("lower", variants__tensor=row(1e-11, measurable=False))
    nothing = report("nothing", variants__tensor=row(0.0, measurable=False))
    assert compared(low, lower)["variants"]["tensor"]["no_measurable_difference"]
    assert compared(nothing, low)["variants"]["tensor"]["kl_ratio"] is None
    measurable = report("measurable")
    assert not compared(nothing, measurable)["variants"]["tensor"]["no_measurable_difference"]


def test_the_table_shows_both_and_names_what_one_alone_has(report):
    a, head = report("a"), row(0.03, ppl_change=figure(-1e-9))
    variants = {"reference": row(0.0), "attn_head": head, "channel": row(0.1)}
    done = ran("compare", a, report("b", variants=variants) / "report.json")
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    for cell in ("0.01 [0.009, 0.011]", "0.03 [0.027, 0.033]", "3x", "+1.00%, +0.00%", "95.0%, 95.0%"):
        assert cell in lines["attn_head"]
    assert "only in A: tensor, only here" in done.stdout
    assert "only in B: channel" in done.stdout


def test_other_conditions_are_warned_of(report):
    a = report("a")
    for number, (change, warning) in enumerate(
        (
            ({"model": "other"}, "the model differs: org/model in A, other in B; the figures are not"),
            ({"data__source": "mine"}, "the data differs: builtin:python-docs in A, mine in B; the fi"),
            ({"data__fingerprint": "9"}, "fingerprint differs: 12ab in A, 9 in B; the figures are not"),
            ({"data__tokens": 99}, "held-out tokens differs: 4096 in A, 99 in B; the figures are not"),
            ({"data__documents": 9}, "held-out documents differs: 8 in A, 9 in B; the figures are not"),
            ({"data__calibration_tokens": 1}, "calibration tokens differs: 6144 in A, 1 in B; so do"),
            ({"dtype": "bfloat16"}, "dtype differs: float32 in A, bfloat16 in B; small differences"),
            ({"backend": "triton"}, "backend differs: torch in A, triton in B; small differences"),
            ({"suite": {"prompts": 4}}, "the suite's prompts differs: None in A, 4 in B; so does what"),
        )
    ):
        (found,) = compared(a, b := report(f"b{number}", **change))["warnings"]
        assert warning in found
    assert f"warning: {found}" in fp8kv("compare", a, b).stdout


def test_names_cannot_steer_the_terminal(report):
    name = "[red]x[/red] :smile: \x1b[31m\nwarning: \x07"
    a = report("a", model=name, variants={"reference": row(0.0), name: row(0.1)})
    done = ran("compare", a, report("b"))
    assert "[red]x[/red] :smile: \ufffd[31m\ufffdwarning: \ufffd" in done.stdout
    both = fp8kv("compare", a, a).stdout
    assert "[red]x[/red] :smile:" in both
    assert not {"\x1b", "\x07"} & set(done.stdout + both)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a report"),
        ("[1]", "is not a report"),
        ('{"a": ' * 100_000, "is not a report"),
        (b"\xff\xfe{}", "is not a report"),
        ('{"model": 3}', "is not a report of fp8kv-eval: it has no `schema`"),
        ('{"schema": 2}', "is of schema 2; this version reads 1"),
        ('{"schema": "1"}', "is of schema '1'; this version reads 1"),
        ('{"schema": 1}', "is damaged: model: Field required"),
        (json.dumps({**REPORT, "variants": {"x": {}}}), "is damaged: variants.x.kl: "),
        (json.dumps(REPORT).replace("0.95", '"0.95"'), "top1.value: Input should be a valid num"),
    ],
)
def test_what_is_no_report_is_refused(text, problem, tmp_path):
    file = tmp_path / "bad.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=re.escape(problem)) as caught:
        load_report(file)
    assert f"'{file}' " in str(caught.value)


def test_paths_that_hold_no_report_get_one_line(report, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop/report.json").mkdir(parents=True)
    good = report("a")
    one_line_error(fp8kv("compare", good, tmp_path / "empty"), "holds no report.json; give what")
    one_line_error(fp8kv("compare", tmp_path / "gone", good), "cannot read", "No such file")
    one_line_error(fp8kv("compare", tmp_path / "loop", good), "cannot read", "Is a directory")
