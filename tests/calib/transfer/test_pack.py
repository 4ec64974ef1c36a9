"""`fp8kv pack`: what is in a pack, what is not, and what every reader makes of it."""

import json
import re
import shlex
import shutil
from pathlib import Path

import apply_cases
import pytest
import yaml
from apply_cases import PACK_FILES, applied, calibrated, copy, edited, manifest, packed, report_of, scales
from command_line import fp8kv, json_of, one_line_error, ran
from families import edit_json

from calib.files.atomic import claimed
from calib.scales.stats_file import load_stats
from calib.transfer.hidden_paths import hide_paths
from calib.transfer.pack import license_of


def test_a_pack_holds_all_but_weights(model, measured, pack, tmp_path):
    assert {file.name for file in pack.iterdir()} == PACK_FILES
    same = ("checkpoint", "dataset", "versions", "recipe", "layers", "marks", "warnings")
    assert [report_of(pack)[key] for key in same] == [report_of(measured)[key] for key in same]
    mine, theirs = load_stats(pack).tensors(), load_stats(measured).tensors()
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in mine)
    for layer in report_of(pack)["layers"]:
        larger = max(layer["k_scale"], layer["v_scale"])
        factors = json.loads((pack / "kv_cache_scales.json").read_text())["kv_cache"]
        assert factors["scaling_factor"]["0"][str(layer["layer_idx"])] == larger
    written = calibrated(model, tmp_path / "json", "--format", "json") / "kv_cache_scales.json"
    assert (pack / "kv_cache_scales.json").read_text() == written.read_text()


def test_what_is_printed_and_written_anew_but_not_by_two_runs_at_once(measured, tmp_path):
    out = tmp_path / "a pack"
    done = fp8kv("pack", measured, "-o", out)
    sizes = {file.name: file.stat().st_size for file in out.iterdir()}
    for name, size in sizes.items():
        assert re.search(rf"{size:,} bytes +{re.escape(name)}\n", done.stdout)
    assert f"written to {out}: {sum(sizes.values()):,} bytes, without weights" in done.stdout
    assert shlex.split(done.stdout.splitlines()[-1]) == ["fp8kv", "apply", str(out), "MODEL"]
    before = manifest(out)
    (out / "kv_cache_scales.json").unlink()
    printed = json_of("pack", measured, "-o", out, "--overwrite")
    assert (printed["files"], printed["pushed"], manifest(out)) == (sizes, None, before)
    with claimed(tmp_path / "claimed"):
        one_line_error(fp8kv("pack", measured, "-o", tmp_path / "claimed"), "another run is writing")
    assert not (tmp_path / "claimed").exists()


def test_scales_from_a_pack_are_those_of_the_calibration_for_all_readers(model, measured, pack, tmp_path):
    out = applied(pack, model, tmp_path / "out")
    assert scales(out) == scales(measured)
    origin = report_of(out)
    assert origin["pack"] == {"name": str(pack), "sha256": manifest(pack)["sha256"]}
    assert any(f"(pack {pack})" in warning for warning in origin["warnings"])
    again = applied(out, model, tmp_path / "again")
    assert report_of(again)["pack"] == origin["pack"]
    assert "packed" not in report_of(again)
    other = copy(model, tmp_path / "edited", apply_cases.rescale_values)
    apply_cases.refused(pack, other, tmp_path / "no", f"the scales of '{pack}' do not fit '{other}'")
    one_line_error(fp8kv("apply", pack, pack, "-o", tmp_path / "no"), "is a pack and not a model")
    assert scales(applied(pack / "fp8kv_stats.safetensors", model, tmp_path / "alone")) == scales(measured)
    shown, same = (json_of("inspect", each) for each in (measured, pack))
    assert shown["first_tokens"] == same["first_tokens"]
    assert "100%" in ran("verify", measured, "--engine", "vllm", "--against", pack).stdout
    other = calibrated(model, tmp_path / "other", "--seed", "7")
    ran("merge", packed(other, tmp_path / "second"), pack, "-o", tmp_path / "m", "--model", model)
    ran("merge", other, measured, "-o", tmp_path / "expected")
    assert scales(tmp_path / "m") == scales(tmp_path / "expected")


@pytest.mark.parametrize(
    "flags", [("--strategy", "attn_head"), ("--targets", "qkv"), ("--fp8-dtype", "e5m2", "--format", "fp8kv")]
)
def test_finer_scales_have_no_json(flags, model, tmp_path):
    made = packed(calibrated(model, tmp_path / "given", *flags), tmp_path / "pack")
    assert {file.name for file in made.iterdir()} == PACK_FILES - {"kv_cache_scales.json"}
    applied(made, model, tmp_path / "out", *flags[2:])


def test_the_card_is_one_of_the_hub(model, pack, tmp_path):
    described = copy(model, tmp_path / "with-card")
    (described / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- x\n---\n# A model\n")
    given = calibrated(described, tmp_path / "given")
    card = (packed(given, tmp_path / "pack", "--base-model", "owner/model") / "README.md").read_text()
    front, text = re.fullmatch(r"---\n(.*?)---\n(.*)", card, re.DOTALL).groups()
    named = {"base_model": "owner/model", "license": "apache-2.0"}
    assert yaml.safe_load(front) == named | {"library_name": "fp8kv", "tags": ["fp8", "kv-cache", "fp8kv"]}
    assert "# FP8 KV-cache scales for owner/model" in text
    for layer in report_of(given)["layers"]:
        assert f"| {layer['k_amax']:.4g} | {layer['v_amax']:.4g} |" in text
    plain = (pack / "README.md").read_text()
    assert "license" not in plain
    assert "base_model" not in plain
    # it steers no terminal, and holds no markup
    dataset = {"source": "\x1b[2J<script>|x|", "samples": 1, "tokens": 1}
    edit_json(given / "fp8kv_calibration.json", warnings=["\x1b[3J\n# no"], dataset=dataset)
    card = (packed(given, tmp_path / "hostile") / "README.md").read_text()
    assert "\x1b" not in card
    assert "<script>" not in card.replace("\\<", "")
    assert "\n# no" not in card


def test_the_commit_of_a_model_on_the_hub(model, tmp_path):
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    given = calibrated(copy(model, snapshot), tmp_path / "given")
    found = manifest(packed(given, tmp_path / "pack"))
    assert (found["base_model"], found["revision"]) == ("owner/name", commit)
    assert found["fingerprint"] == report_of(given)["checkpoint"]
    other = manifest(packed(given, tmp_path / "other", "--base-model", "a/b"))
    assert (other["base_model"], other["revision"]) == ("a/b", None)
    fits_none = fp8kv("pack", given, "-o", tmp_path / "no", "--base-model", "not an id")
    one_line_error(fits_none, "--base-model 'not an id' is not an id on the Hub")


def test_what_is_not_packed(model, measured, pack, tmp_path):
    def no(given, *phrases, at=tmp_path / "no", flags=()):
        one_line_error(fp8kv("pack", given, "-o", at, *flags), *phrases)

    no(pack, "is a pack already")
    no(model, "has no fp8kv_stats.safetensors")
    no(tmp_path / "gone", "does not exist")
    no(applied(measured, model, tmp_path / "applied"), "were applied, and not measured there")
    no(edited(measured, tmp_path / "old", marks=None), "keeps no marks")
    no(measured, "would mix with the calibration in", at=measured / "pack")
    no(measured, "exists; add --overwrite", at=pack)
    mine = tmp_path / "mine"
    (mine / "thesis").mkdir(parents=True)
    no(measured, "was not written by fp8kv", at=mine, flags=("--overwrite",))
    no(measured, "cannot write", at="/proc/pack")
    no(measured, "--private is for --push-to-hub", flags=("--private",))
    assert not (tmp_path / "no").exists()


def test_the_license_is_that_in_the_head_of_the_models_card(tmp_path):
    for card, license in (
        ("---\nlicense: 'apache-2.0' # as agreed\ntags:\n- x\n---\n# A model\n", "apache-2.0"),
        ("---\ntags: [x]\n---\n\n---\nlicense: mit\n---\n", None),
        ("---\nabout: |\n  x\n  license: mit\n---\n", None),
        ("---\nlicense: [mit, x]\n---\n", None),
        ('---\nlicense: "mit\\ntags: x"\n---\n', None),
        ("---\nlicense: 2001-99-99\n---\n", None),
        ("---\n- license: mit\n---\n", None),
        ("license: mit\n", None),
    ):
        (tmp_path / "README.md").write_text(card)
        assert license_of(tmp_path) == license, card


@pytest.fixture(scope="module")
def evaluated(model, measured, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "report"
    flags = ["--dataset", "random", "--samples", "3", "--seq-len", "24", "--variants", "none"]
    ran("eval", model, "--scales", measured, *flags, "--device", "cpu", "-o", out)
    return out


def test_figures_of_an_evaluation(evaluated, model, measured, tmp_path, monkeypatch):
    pack = packed(measured, tmp_path / "pack", "--report", evaluated)
    report = json.loads((evaluated / "report.json").read_text())
    rows, found = report["variants"], manifest(pack)["evaluation"]["variants"]
    for mine, theirs in {"these scales": measured.name, "scale 1.0": "none"}.items():
        assert found[mine] == {key: rows[theirs][key] for key in ("kl", "ppl_change", "top1")}
    card = (pack / "README.md").read_text()
    assert f"| these scales | {rows[measured.name]['kl']['value']:.2g} [" in card
    # taken by themselves where they lie beside the calibration, and not where they lie beside another
    given = shutil.copytree(measured, tmp_path / "given")
    shutil.copytree(evaluated, tmp_path / "evaluation")
    assert manifest(packed(given, tmp_path / "none"))["evaluation"] is None
    shutil.copytree(evaluated, given / "evaluation")
    assert manifest(packed(given, tmp_path / "taken"))["evaluation"]["variants"] == found
    # or beside the formats of one
    several = calibrated(model, tmp_path / "several", "--format", "vllm", "--format", "tgi")
    shutil.copytree(evaluated, several / "evaluation")
    edit_json(several / "evaluation" / "report.json", data=report["data"] | {"source": "acme/rows.jsonl"})
    monkeypatch.chdir(several / "tgi")
    pack = packed(".", tmp_path / "here")
    assert manifest(pack)["evaluation"]["data"] == "rows.jsonl"  # whose place is hidden
    assert "acme" not in (pack / "README.md").read_text()


def test_figures_of_other_scales(evaluated, model, tmp_path):
    other, out = calibrated(model, tmp_path / "other", "--headroom", "2"), tmp_path / "pack"
    for report, said in (
        (evaluated, "has no figures of these scales; measure them: fp8kv-eval"),
        (other / "config.json", "is not a report of this version of fp8kv-eval"),
    ):
        one_line_error(fp8kv("pack", other, "-o", out, "--report", report), said)
    # beside the calibration they are a warning
    shutil.copytree(evaluated, other / "evaluation")
    report = other / "evaluation" / "report.json"
    for text in (report.read_text(), "{}", "not JSON"):
        report.write_text(text)
        (warning,) = json_of("pack", other, "-o", out, "--overwrite")["warnings"]
        assert warning.startswith("packed without figures of an evaluation: ")
        assert str(report) in warning
        assert manifest(out)["evaluation"] is None
    assert ran("pack", other, "-o", out, "--overwrite").stderr.splitlines() == [f"warning: {warning}"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def says_nothing_of(pack, *words):
    for file in pack.iterdir():
        content = file.read_bytes()
        assert not [word for word in words if word.encode() in content], file


@pytest.mark.parametrize(
    ("model_path", "data", "is_gone"),
    [
        ("secret place/tiny", "{}/secret place/rows.jsonl", False),
        ("acme/tiny", "./data//acme/rows.jsonl", False),
        ("acme/tiny", "data/acme/", True),
    ],
)
def test_where_things_lie_stays_at_home(model_path, data, is_gone, model, here, monkeypatch):
    file = here / data.format(here)
    file = file if file.suffix else file / "rows.jsonl"
    file.parent.mkdir(parents=True)
    words = " ".join(f"w{i}" for i in range(3, 30))
    file.write_text("\n".join(map(json.dumps, [*[{"text": words}] * 4, {"text": 1}])))
    copy(model, here / model_path)
    flags = ("--samples", "9", "--seq-len", "16", "--device", "cpu", "--dataset", data.format(here))
    ran("calibrate", model_path, "-o", here / "given", *flags)
    assert "9 samples were asked for" in str(report_of(here / "given")["warnings"])
    if is_gone:
        monkeypatch.chdir("/")
    pack = packed(here / "given", here / "pack")
    says_nothing_of(pack, "secret", model_path, "data/", str(here))
    report, card = report_of(pack), (pack / "README.md").read_text()
    assert report["dataset"]["source"] == report["recipe"]["data"]["dataset"] == Path(data).name
    assert report["model"] == "tiny"
    assert "# FP8 KV-cache scales for tiny\n" in card
    row = "rows.jsonl, line 5: " if is_gone else "(such as rows.jsonl, line 5: "
    assert row in card
    assert any(row in warning for warning in report["warnings"])


def test_paths_of_an_evaluation_and_of_merged_data_but_not_of_the_hub(measured, here):
    for directory in ("owner/name", "held/out"):
        (here / directory).mkdir(parents=True)
    (here / "held" / "out" / "rows.jsonl").touch()
    source = "HuggingFaceH4/ultrachat_200k [train_sft] + acme/first + acme/second.txt"
    report = report_of(measured)
    report["recipe"]["evaluation"] |= {
        "dataset": "held/out/rows.jsonl",
        "tasks": ["gsm8k", "acme/tasks/sums.yaml"],
        "also": ["held/out", "HuggingFaceH4/ultrachat_200k", "builtin:python-docs"],
    }
    changes = {"recipe": report["recipe"], "dataset": report["dataset"] | {"source": source}}
    changes |= {"hub": {"model": "owner/name", "revision": "0123456789" * 4}, "model": "owner/name"}
    warnings = ["nothing in acme/first, row 1: none", "see https://huggingface.co/a/b and </s>"]
    pack = packed(edited(measured, here / "given", warnings=warnings, **changes), here / "pack")
    says_nothing_of(pack, "acme", "held/")
    found = report_of(pack)
    assert found["dataset"]["source"] == "HuggingFaceH4/ultrachat_200k [train_sft] + first + second.txt"
    asked = found["recipe"]["evaluation"]
    assert (asked["dataset"], asked["tasks"]) == ("rows.jsonl", ["gsm8k", "sums.yaml"])
    assert asked["also"] == ["out", "HuggingFaceH4/ultrachat_200k", "builtin:python-docs"]
    assert found["model"] == "owner/name"
    assert found["warnings"] == ["nothing in first, row 1: none", warnings[1]]


def test_paths_within_a_text(monkeypatch):
    for text, expected in (
        ("(such as /home/me/rows.jsonl, line 5: no)", "(such as rows.jsonl, line 5: no)"),
        ("in ../a/b/x.txt and ~/c/y.txt", "in x.txt and y.txt"),
        ("'/home/my own/x.txt' is large", "'x.txt' is large"),
        ("K/V of 1 / 2 layers, 3/4 of ~5 %", "K/V of 1 / 2 layers, 3/4 of ~5 %"),
        ("see https://huggingface.co/a/b", "see https://huggingface.co/a/b"),
        ("file:///home/me/x", "file:x"),
        ("my own/data/x.txt", "data/x.txt"),
        ("my own/data-2", "my own/data-2"),
    ):
        assert hide_paths([{"x": text}], ["my own/data"]) == [{"x": expected}]
    monkeypatch.setenv("HOME", "/home/my own")  # which is known by both its spellings
    assert hide_paths("of /home/my own/data/x.txt, row 1", ["~/data/x.txt"]) == "of x.txt, row 1"
