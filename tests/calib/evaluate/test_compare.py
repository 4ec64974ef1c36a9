"""Two reports side by side: the figures, what makes them doubtful, and what is not a report."""

import json
import re
from itertools import product

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


DATA = {"source": "mine", "fingerprint": "12", "documents": 8, "tokens": 4096, "calibration_tokens": 6144}
ROWS = {"reference": row(0.0, measurable=False), "tensor": row(0.02, passkey=figure(1.0))}
ROWS |= {"attn_head": row(0.01), "only here": row(0.5)}
REPORT = {"schema": 1, "model": "org/model", "backend": "torch", "dtype": "float32", "data": DATA}
REPORT |= {"variants": ROWS, "texts": {"not": ["compared"]}}


@pytest.fixture
def report(tmp_path):
    """Write a report, some of its entries replaced; returns its directory."""

    def write(name, **changes):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(REPORT | changes))
        return tmp_path / name

    return write


def compared(*arguments):
    return json.loads(ran("compare", *arguments, "--json").stdout, parse_constant=pytest.fail)


def test_ratio_and_whether_the_intervals_overlap_or_both_are_noise(report):
    low, lower, nothing = (row(kl, measurable=False) for kl in (1e-9, 1e-11, 0.0))
    a = report("a", variants=ROWS | {"low": low, "nothing": nothing, "much": nothing})
    # 0.02 ± 10 % and 0.023 ± 10 % overlap, 0.01 ± 10 % and 0.03 ± 10 % do not
    rows = {"tensor": row(0.023), "attn_head": row(0.03), "low": lower, "nothing": low, "much": row(0.5)}
    b = report("b", variants={"reference": nothing, **rows})
    found = compared(a, b)
    answers = {n: (x["kl_ratio"], x["no_measurable_difference"]) for n, x in found["variants"].items()}
    assert answers == {
        "tensor": (pytest.approx(1.15), True),
        "attn_head": (pytest.approx(3.0), False),
        "low": (pytest.approx(0.01), True),
        "nothing": (None, True),
        "much": (None, False),
    }
    a_row, b_row = (found["variants"]["tensor"][letter] for letter in "ab")
    assert (b_row["kl"], a_row["passkey"], b_row["passkey"]) == (figure(0.023), figure(1.0), None)
    assert (found["only_a"], found["only_b"], found["warnings"]) == (["only here"], [], [])
    backward = compared(b, a)["variants"]["attn_head"]
    assert backward["kl_ratio"] == pytest.approx(1 / 3)
    assert not backward["no_measurable_difference"]


def test_the_table_shows_both_and_names_what_one_alone_has(report):
    a, head = report("a"), row(0.03, ppl_change=figure(-1e-9))
    variants = {"reference": row(0.0), "attn_head": head, "channel": row(0.1)}
    done = ran("compare", a, report("b", variants=variants) / "report.json")
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    for cell in ("0.01 [0.009, 0.011]", "0.03 [0.027, 0.033]", "3x", "+1.00%, +0.00%", "95.0%, 95.0%"):
        assert cell in lines["attn_head"]
    assert "only in A: tensor, only here" in done.stdout
    assert "only in B: channel" in done.stdout
    # names cannot steer the terminal
    name = "[red]x[/red] :smile: \x1b[31m\nwarning: \x07"
    hostile = report("hostile", model=name, variants={"reference": row(0.0), name: row(0.1)})
    done = ran("compare", hostile, a)
    assert "[red]x[/red] :smile: \ufffd[31m\ufffdwarning: \ufffd" in done.stdout
    both = fp8kv("compare", hostile, hostile).stdout
    assert "[red]x[/red] :smile:" in both
    assert not {"\x1b", "\x07"} & set(done.stdout + both)


def test_other_conditions_are_warned_of(report):
    a = report("a")
    for number, (change, warning) in enumerate(
        (
            ({"model": "other"}, "the model differs: org/model in A, other in B; the figures are not"),
            ({"attention": "fa3"}, "the engine's attention differs: exact in A, fa3 in B; the figures are"),
            ({"source": "b"}, "the data differs: mine in A, b in B; the figures are not comparable"),
            ({"fingerprint": "9"}, "fingerprint differs: 12 in A, 9 in B; the figures are not"),
            ({"tokens": 99}, "held-out tokens differs: 4096 in A, 99 in B; the figures are not"),
            ({"documents": 9}, "held-out documents differs: 8 in A, 9 in B; the figures are not"),
            ({"calibration_tokens": 1}, "calibration tokens differs: 6144 in A, 1 in B; so do"),
            ({"dtype": "bfloat16"}, "dtype differs: float32 in A, bfloat16 in B; small differences"),
            ({"backend": "triton"}, "backend differs: torch in A, triton in B; small differences"),
            ({"suite": {"prompts": 4}}, "the suite's prompts differs: None in A, 4 in B; so does what"),
        )
    ):
        changes = {"data": DATA | change} if change.keys() <= DATA.keys() else change
        (found,) = compared(a, b := report(f"b{number}", **changes))["warnings"]
        assert warning in found
    assert f"warning: {found}" in fp8kv("compare", a, b).stdout


def test_a_kl_that_is_no_number_differs_from_all_and_has_no_ratio(report):
    lost = dict.fromkeys(("value", "low", "high"), "LOST")
    tensor = ROWS["tensor"] | {"kl": lost, "ppl_change": lost}
    good, bad = report("a"), report("b", variants=ROWS | {"tensor": tensor})
    text = (bad / "report.json").read_text()
    for number, pair in product(("null", "NaN", "1e999"), ((good, bad), (bad, good), (bad, bad))):
        (bad / "report.json").write_text(text.replace('"LOST"', number))
        (line,) = (line for line in ran("compare", *pair).stdout.splitlines() if " tensor " in line)
        assert "not finite" in line
        assert not re.search(r"(?i)\bnan\b|\binf\b|no measurable difference", line)
        found = compared(*pair)["variants"]["tensor"]
        assert (found["kl_ratio"], found["no_measurable_difference"]) == (None, False)


def test_what_is_no_report_is_refused(report, tmp_path):
    file = tmp_path / "bad.json"
    for text, problem in (
        *((text, "is not a report") for text in ("[1]", '{"a": ' * 100_000, "\xff\xfe{}")),
        ('{"model": 3}', "is not a report of fp8kv-eval: it has no `schema`"),
        ('{"schema": 2}', "is of schema 2; this version reads 1"),
        ('{"schema": 1}', "is damaged: model: Field required"),
        (json.dumps(REPORT | {"variants": {"x": {}}}), "is damaged: variants.x.kl: "),
        (json.dumps(REPORT).replace("0.95", '"0.95"'), "top1.value: Input should be a valid num"),
    ):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=re.escape(f"'{file}' ")) as caught:
            load_report(file)
        assert problem in str(caught.value)
    (tmp_path / "loop/report.json").mkdir(parents=True)
    good = report("a")
    one_line_error(fp8kv("compare", good, tmp_path / "loop/report.json"), "holds no report.json; give what")
    one_line_error(fp8kv("compare", tmp_path / "gone", good), "cannot read", "No such file")
    one_line_error(fp8kv("compare", tmp_path / "loop", good), "cannot read", "Is a directory")
