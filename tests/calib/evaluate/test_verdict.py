"""Verdict, advice and gates are one judgement, null where nothing is a number; two reports side by side."""

import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from command_line import fp8kv, one_line_error, ran
from evaluations import with_measured
from families import save_model, tiny_model

from calib.errors import InputError
from calib.evaluate.compare import load_report
from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import summary_lines, variants_table
from calib.evaluate.report import Figure, Report, Row
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import Judgement, failures
from calib.files.strict_json import json_text
from calib.files.text import parse_condition, show_number

pytestmark = pytest.mark.xdist_group("evaluate")
BETTER = re.compile(r"\. (Scale 1\.0|[^.(]+) (?:is|are) measurably better \(KL")
NO_BETTER = "No other scales that engines load are measurably better."


def figures(evaluation, **kl):
    """What was measured, where all or each of three documents have this KL; `mine` are scales given."""
    measured = {n: m for n, m in evaluation.measured.items() if m.variant.kind not in ("fp8", "given")}
    reference = measured["reference"].documents
    for name, values in kl.items():
        found = evaluation.measured["tensor" if name == "mine" else name]
        variant = found.variant
        if name == "mine":
            variant = replace(variant, name=name, description="scales of mine", kind="given")
        pairs = zip(reference, values if isinstance(values, tuple) else (values,) * 3, strict=True)
        documents = [d._replace(kl=torch.full_like(d.kl, value), nll=d.nll + 0.001) for d, value in pairs]
        measured[name] = replace(found, variant=variant, documents=documents, layers={})
    return with_measured(evaluation, measured)


def judged(evaluation, **kl):
    return summarize(figures(evaluation, **kl))


def test_the_verdict_is_sentences(small_evaluation, small_report):
    same = "perplexity changes by +0.10%, and 100.0% of top-1 tokens agree."
    report = judged(small_evaluation, none=0.5, tensor=0.01)
    assert report.verdict == (
        f"FP8 KV cache, one scale per layer: the KL is 0.01 nats [0.01, 0.01], {same} {NO_BETTER} "
        "Scale 1.0 is measurably worse (KL 0.5)."
    )
    assert judged(small_evaluation, tensor=0.01, mine=0.03).verdict == (
        f"FP8 KV cache, scales of 'mine': the KL is 0.03 nats [0.03, 0.03], {same} "
        "One scale per layer is measurably better (KL 0.01)."
    )
    # one scale per layer has the lowest mean, by luck in two documents: worse than it is nothing
    report = judged(small_evaluation, none=1.0, tensor=(0.1, 0.1, 2.4), attn_head=0.9)
    assert report.advised == "tensor"
    assert NO_BETTER in report.verdict
    no_better = NO_BETTER.replace("No", "no")
    assert report.advice == [f"Use one scale per layer (--strategy tensor): {no_better}"]
    # per head is better than what was given; scale 1.0 is told from neither
    report = judged(small_evaluation, none=(0.8, 1.1, 0.85), attn_head=0.9, mine=1)
    assert report.advised == "none"
    assert report.verdict.endswith(
        " One scale per KV head is measurably better (KL 0.9), but not measurably better than scale 1.0."
    )
    report = judged(small_evaluation, none=0.5)
    assert report.verdict == f"FP8 KV cache, scale 1.0: the KL is 0.5 nats [0.5, 0.5], {same}"
    assert report.advice == ["No other scales were measured that scale 1.0 could be compared with."]
    far = figures(small_evaluation, none=9.0, tensor=5.0)
    rows = dict(summarize(far).variants)
    for low, high, said in ((0.1, 0.4, "Serve none of these caches"), (0.4, 0.6, "Use one scale per layer")):
        rows["tensor"] = rows["tensor"].model_copy(update={"top1": Figure(value=low, low=low, high=high)})
        assert Judgement(far.measured, rows).advise(None)[0].startswith(said)
    half = {n: small_evaluation.measured[n] for n in ("reference", "bf16", "k only")}
    report = summarize(with_measured(small_evaluation, half))
    assert (report.subject, report.verdict) == (None, "No FP8 KV cache was measured.")
    assert Judgement({}, {}).advise(None) == []
    # what the controls reach; just below it: the mean of equal values may differ from them in its last bit
    floor = small_report["noise_floor"]
    report = judged(small_evaluation, none=floor * (1 - 1e-9), tensor=floor / 2)
    assert report.advised == "none"
    assert report.verdict == (
        "FP8 KV cache, scale 1.0: it does not differ measurably from the model's own cache "
        f"(KL {floor:.2g} nats, noise floor {show_number(floor)}). {NO_BETTER}"
    )


def test_given_scales_that_beat_all_are_kept_and_every_form_says_so(small_evaluation):
    report = judged(small_evaluation, none=1, tensor=0.9, mine=(0.1, 0.2, 0.1))
    assert (report.subject, report.advised) == ("mine", "mine")
    assert report.verdict.endswith(f"{NO_BETTER} Scale 1.0 is measurably worse (KL 1).")
    assert report.advice[0].startswith("Keep the scales of 'mine'")
    page, text = render_html(report).replace("&#39;", "'"), render_markdown(report).replace("\\", "")
    for form in (page, text, "\n".join(summary_lines(report))):
        assert all(line in form for line in [report.verdict, *report.advice])


LEVELS = (1.0, 0.9, (0.1, 0.1, 2.4), 1e-9)
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


def test_conditions_are_met_by_what_they_name_and_by_what_is_no_number():
    values = {"reference": {"kl": 0.0}, "tensor": {"kl": 0.03, "top1": 0.9}}
    values |= {"attn_head": {"kl": 0.01, "top1": 0.97}, "lost": {"kl": math.nan}}
    rows = {
        name: Row.model_construct(**{metric: Figure(value=x, low=x, high=x) for metric, x in metrics.items()})
        for name, metrics in values.items()
    }
    report, measured = Report.model_construct(variants=rows, other_texts=[]), ["tensor", "attn_head"]
    for text, subjects, lines in (
        ("kl_mean>0.02", measured, ["tensor: kl is 0.03"]),
        ("kl > 0.005", measured, ["tensor: kl is 0.03", "attn_head: kl is 0.01"]),
        ("top1<0.95", measured, ["tensor: top1 is 0.9"]),
        ("top1<=0.97", measured, ["tensor: top1 is 0.9", "attn_head: top1 is 0.97"]),
        ("attn_head:kl>=0.01", [], ["attn_head: kl is 0.01"]),
        ("attn_head:kl>0.01", measured, []),
        ("kl<0.02", ["lost"], ["lost: kl is not a finite number"]),
        ("lost:kl>=1e9", measured, ["lost: kl is not a finite number"]),
    ):
        assert failures(parse_condition(text), report, subjects) == [f"{line} ({text})" for line in lines]
    for text, problem in (
        ("channel:kl>1", "no variant 'channel'; there are tensor, attn_head, lost"),
        ("kl>1", "'kl>1' names no variant, and none was measured"),
        ("tensor:passkey<1", "passkey was not measured for 'tensor'"),
    ):
        with pytest.raises(InputError, match=problem):
            failures(parse_condition(text), report, [])
    for text in ("kl", "speed>3", "kl>much", "kl=1", "kl<-inf", "top1<1e999"):
        with pytest.raises(InputError, match="METRIC one of kl, kl_p99"):
            parse_condition(text)


def strict(text):
    """JSON as any reader takes it: Python's own would let NaN through."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word} in JSON"))


def spoiled(evaluation, names, number):
    """The report where the KL and likelihoods of three tokens of `names` are spoiled."""
    measured = dict(evaluation.measured)
    for name in names:
        first, *rest = measured[name].documents
        lost = first._replace(kl=first.kl.clone(), nll=first.nll.clone())
        lost.kl[:3] = lost.nll[:3] = number
        measured[name] = replace(measured[name], documents=[lost, *rest])
    return summarize(with_measured(evaluation, measured))


def words(*texts):
    # in data of pictures any letters may be
    text = re.sub(r"data:[^\"' ]+", "", "\n".join(texts))
    return re.findall(r"(?i)(?<![\w-])[-+]?(?:nan|inf)(?![\w-])", text)


def lost_words(report):
    rows = (" ".join(row) for row in variants_table(report).lines)
    return words(*summary_lines(report), *rows, render_markdown(report), render_html(report))


def test_one_cache_has_null_a_reason_and_passes_no_gate(small_evaluation):
    report = spoiled(small_evaluation, ["none"], math.inf)
    document = strict(json_text(report.to_json()))
    row = document["variants"]["none"]
    assert (row["kl"], row["ppl"]) == ({"value": None, "low": None, "high": None}, None)
    reason = f"the KL of 3 of {document['data']['tokens']} tokens is not a finite number"
    assert row["not_finite"].startswith(reason)
    assert "not_finite" not in document["variants"]["tensor"]
    assert any(line.startswith(f"'none': {reason}") for line in document["warnings"])
    assert row["measurable"]
    assert document["advised"] not in (None, "none")
    assert not any("without scales" in line for line in document["advice"])
    assert lost_words(report) == []
    assert {row[0]: row[2] for row in variants_table(report).lines}["none"] == "not finite"
    read_back = Report.model_validate(document)
    assert strict(json_text(read_back.to_json())) == document
    for metric, operator, each in product(("kl", "kl_p99", "ppl_change"), "<>", (report, read_back)):
        text = f"{metric}{operator}0.5"
        lines = failures(parse_condition(text), each, ["none"])
        assert lines == [f"none: {metric} is not a finite number ({text})"]


def test_nothing_is_advised_where_nothing_has_a_kl(small_evaluation):
    report = spoiled(small_evaluation, list(small_evaluation.measured), math.nan)
    assert report.advised is None
    assert report.advice == ["Mend the model's weights first."]
    assert report.verdict.startswith("The model itself is broken on this text, whatever its cache: the KL")
    assert report.verdict.endswith("logits are not finite there.")
    (warning,) = [line for line in report.warnings if "finite" in line]
    assert warning.startswith("the model itself is broken on this text, whatever its cache: the KL")
    assert "no measurable difference" not in render_markdown(report)
    document = strict(json_text(report.to_json()))
    assert document["noise_floor"] is None
    assert lost_words(report) == lost_words(Report.model_validate(document)) == []


def test_a_model_whose_logits_are_no_numbers_has_a_report_and_no_recommendation(tmp_path):
    model, out = tiny_model("llama", num_hidden_layers=2, hidden_size=32), tmp_path / "report"
    model.lm_head.weight.data[0] = math.nan
    broken = save_model(model, tmp_path / "broken")
    few = ("--dataset", "random", "--samples", 8, "--seq-len", 24, "--device", "cpu")
    asked = ("--variants", "tensor,none", "--search", "0.1", "--also", "builtin:code")
    gates = ("--fail-if", "kl<0.5", "--fail-if", "top1<0.5")
    done = fp8kv("eval", broken, *few, *asked, *gates, "-o", out)
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exc_info
    said = "the model itself is broken on this text, whatever its cache"
    assert done.stderr.partition("failed: ")[2].startswith(f"{said}\n")
    assert "failed: none: kl is not a finite number (kl<0.5)" in done.stderr
    assert "top1 is 0 (top1<0.5)" in done.stderr
    assert words(done.stdout, (out / "report.md").read_text(), (out / "report.html").read_text()) == []
    document = strict((out / "report.json").read_text())
    assert document["search"]["kl_of_all"] is None
    other = document["other_texts"][0]["variants"]["tensor"]
    assert (other["kl"]["value"], other["differs"]) == (None, "not finite")
    assert not any(" on builtin:code: " in line for line in document["warnings"])  # said of the model
    one_line_error(fp8kv("recommend", broken, *few), f"{said}: the KL of ", "before a cache is chosen")
    assert (document["recommended"], document["advised"]) == (None, None)
    one_line_error(fp8kv("eval", broken, *few, "-o", out), f"the report '{out}' is finished; add --overw")


def figure(value, spread=0.1):
    low, high = sorted((value * (1 - spread), value * (1 + spread)))
    return {"value": value, "low": low, "high": high}


def row(kl, *, measurable=True, **others):
    figures = {"kl": figure(kl), "ppl_change": figure(0.01), "top1": figure(0.95)}
    figures |= {"kl_p99": figure(kl), "kl_p999": figure(kl), "ppl": 9.0, "top1_count": 1}
    return {**figures, "kl_by_position": [], "measurable": measurable, "what": "a", "kind": "fp8", **others}


DATA = {"source": "mine", "fingerprint": "12", "documents": 8, "tokens": 4096, "calibration_tokens": 6144}
DATA |= {"layer_documents": 2, "new_tokens": 6, "long_documents": 0, "long_tokens": 0}
ROWS = {"reference": row(0.0, measurable=False), "tensor": row(0.02, passkey=figure(1.0))}
ROWS |= {"attn_head": row(0.01), "only here": row(0.5)}


@pytest.fixture
def report(small_report, tmp_path):
    """Write a report, some of its entries replaced; returns its directory."""

    def write(name, **changes):
        changed = {"model": "org/model", "data": DATA, "variants": ROWS}
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(small_report | changed | changes))
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
    a, head = report("a"), row(0.03, ppl_change=figure(-1e-9), same_tokens=figure(1.0))
    variants = {"reference": row(0.0), "attn_head": head, "channel": row(0.1)}
    done = ran("compare", a, report("b", variants=variants) / "report.json")
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    for cell in ("0.01 [0.009, 0.011]", "0.03 [0.027, 0.033]", "3x", "+1.00%, +0.00%", "95.0%, 95.0%"):
        assert cell in lines["attn_head"]
    assert ", 1 token " in lines["attn_head"]
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


def test_other_conditions_are_warned_of(report, small_report):
    a, suite = report("a"), small_report["suite"] | {"passkey_tokens": [256], "passkey_depths": [0.0, 0.5]}
    longer = suite | {"prompts": 4, "passkey_tokens": [256, 1024]}
    other = {"model": "other", "variants": ROWS | {"reference": row(0.0) | {"ppl": 8.0}}}
    mine, both = "4,096 tokens in 8 samples of mine", "both read 4,096 tokens in 8 samples of mine"
    no, small = "A and B are not comparable: ", "small differences may come from that"
    for number, (change, warning) in enumerate(
        (
            (other, f"{no}A measured the model org/model, B other"),
            ({"attention": "fa3"}, f"{no}A was measured with --attention exact, B with --attention fa3"),
            (DATA | {"source": "b", "fingerprint": "9"}, f"{no}A read {mine}, B {mine[:-4]}b"),
            (DATA | {"fingerprint": "9"}, f"{no}{both}, but not the same ones"),
            (DATA | {"tokens": 99, "documents": 1}, f"{no}A read {mine}, B 99 tokens in 1 sample of mine"),
            (DATA | {"source": "a copy"}, None),
            ({"model": "a copy"}, "A names the model org/model, B a copy; both have the same perplexity, so"),
            (DATA | {"calibration_tokens": 1}, "A derived its scales from 6,144 tokens, B from 1: they may"),
            ({"dtype": "bfloat16"}, f"A was computed in float32, B in bfloat16: {small}"),
            ({"backend": "triton"}, f"with the backend torch, B with the backend triton: {small}"),
            (
                {"suite": suite | {"prompts": 4}},
                "A continued 2 prompts by 6 tokens, B 4 prompts by 6 tokens:",
            ),
            ({"suite": suite | {"prompts": 0, "seq_len": 9, "passkey_tokens": []}}, None),
        )
    ):
        changes = {"data": change} if "source" in change else change
        document = compared(a, b := report(f"b{number}", **changes))
        is_comparable = not (warning or "").startswith(no)
        assert [warning in line for line in document["warnings"]] == [True] * (warning is not None)
        assert document["comparable"] == is_comparable
        verdicts = [row["no_measurable_difference"] for row in document["variants"].values()]
        assert verdicts == [True if is_comparable else None] * 3
        done = fp8kv("compare", a, b)
        assert warning is None or f"warning: {document['warnings'][0]}" in done.stderr
        assert (done.stdout.count("not comparable"), done.stdout.count("no measurable difference")) == (
            (0, 3) if is_comparable else (3, 0)
        )
    at = "tokens at 0%, 50% of them"
    hid = f"A hid passkeys in texts of 256 {at}, B in texts of 256 and 1024 {at}"
    found = compared(report("c", suite=suite), report("d", suite=longer | {"prompts": 2}))["warnings"]
    assert found == [f"{hid}: 'passkeys' is not comparable"]


def test_a_kl_that_is_no_number_differs_from_all_and_has_no_ratio(report):
    lost = dict.fromkeys(("value", "low", "high"))
    tensor = ROWS["tensor"] | {"kl": lost, "ppl_change": lost}
    good, bad = report("a"), report("b", variants=ROWS | {"tensor": tensor})
    for pair in ((good, bad), (bad, good), (bad, bad)):
        (line,) = (line for line in ran("compare", *pair).stdout.splitlines() if " tensor " in line)
        assert "not finite" in line
        assert not re.search(r"(?i)\bnan\b|\binf\b|no measurable difference", line)
        found = compared(*pair)["variants"]["tensor"]
        assert (found["kl_ratio"], found["no_measurable_difference"]) == (None, False)


def test_what_is_no_report_is_refused(report, tmp_path):
    file, good = tmp_path / "bad.json", report("a")
    document = json.loads((good / "report.json").read_text())
    for text, problem in (
        ("[1]", "must hold a JSON object, got list"),
        ('{"a": ' * 100_000, "is nested too deeply"),
        ("\xff\xfe{}", "is not JSON"),
        ('{"schema": 1, "noise_floor": NaN}', "NaN is not JSON"),
        ('{"model": 3}', "is not a report of fp8kv-eval: it has no `schema`"),
        ('{"schema": 2}', "is of schema 2; this version reads 1"),
        ('{"schema": 1}', "is damaged: model: Field required"),
        (json.dumps(document | {"variants": {"x": {}}}), "is damaged: variants.x.kl: "),
        (json.dumps(document | {"variants": {}}), "is damaged: variants: Dictionary should have at lea"),
        *(
            (json.dumps({x: document[x] for x in document if x != key}), f"damaged: {key}: Field required")
            for key in ("noise_floor", "attention", "suite")
        ),
        (json.dumps(document).replace("0.95", '"0.95"'), "top1.value: Input should be a valid num"),
    ):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=re.escape(f"'{file}' ")) as caught:
            load_report(file)
        assert problem in str(caught.value)
    (tmp_path / "loop/report.json").mkdir(parents=True)
    no_report = ("holds no report.json; give what", "; to compare scales, give two directories")
    one_line_error(fp8kv("compare", good, tmp_path / "loop/report.json"), *no_report)
    one_line_error(fp8kv("compare", tmp_path / "gone", good), "cannot read", "No such file")
    one_line_error(fp8kv("compare", tmp_path / "loop", good), "loop/report.json' is not a file")
