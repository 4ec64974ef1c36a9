"""`fp8kv pack`: what is in a pack and what every reader makes of it; on the Hub; a damaged one is refused."""

import hashlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from apply_cases import (
    PACK_FILES,
    applied,
    calibrated,
    contents,
    copy,
    edited,
    manifest,
    packed,
    refused,
    report_of,
    rescale_values,
    scales,
)
from command_line import fp8kv, json_of, one_line_error, ran, succeeded
from fake_hub import on, running_hub
from families import edit_json
from huggingface_hub import constants

from calib.errors import InputError
from calib.files.atomic import claimed
from calib.files.pack import read_pack
from calib.scales.stats_file import load_stats
from calib.transfer.hidden_paths import hide_paths
from calib.transfer.hub import check_hub_id
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
    assert any(f"(pack {pack})" in note for note in origin["expected"])
    assert not any("measured on" in warning for warning in origin["warnings"])
    again = applied(out, model, tmp_path / "again")
    assert report_of(again)["pack"] == origin["pack"]
    assert "packed" not in report_of(again)
    other = copy(model, tmp_path / "edited", rescale_values)
    refused(pack, other, tmp_path / "no", f"the scales of '{pack}' do not fit '{other}'")
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
    dataset = report_of(given)["dataset"] | {"source": "\x1b[2J<script>|x|"}
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
    no(measured, "bears no mark of fp8kv", at=mine, flags=("--overwrite",))
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
        (other / "config.json", "is not a report of fp8kv-eval: it has no `schema`; give what"),
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
def test_where_things_lie_stays_at_home(model_path, data, is_gone, model, tmp_path, monkeypatch):
    monkeypatch.chdir(here := tmp_path)
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


def test_paths_of_an_evaluation_and_of_merged_data_but_not_of_the_hub(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(here := tmp_path)
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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub() as hub, on(hub, tmp_path / "cache", monkeypatch):
        yield hub


def test_there_and_back(hub, model, measured, tmp_path):
    done = ran("pack", measured, "-o", tmp_path / "pack", "--push-to-hub", "me/scales")
    repository = hub.repositories["me/scales"]
    assert repository.commits[-1] == {".gitattributes": b"", **contents(tmp_path / "pack")}
    assert not repository.private
    assert f"{hub.url}/me/scales at {repository.head}" in done.stdout
    assert "fp8kv apply me/scales" in done.stdout
    flags = ("-o", tmp_path / "out", "--progress", "json")
    done = ran("apply", "me/scales", copy(model, tmp_path / "other"), *flags)
    stages = re.findall('"begin", "stage": "(.*?)"', done.stderr)
    assert stages == ["fetch", "load", "compare weights", "write"]
    assert scales(tmp_path / "out") == scales(measured)
    assert report_of(tmp_path / "out")["pack"]["name"] == f"me/scales@{repository.head}"
    other = copy(model, tmp_path / "edited", rescale_values)
    refused("me/scales", other, tmp_path / "no", f"scales of 'me/scales@{repository.head}' do not fit")


def test_only_files_of_a_pack_are_fetched_once_flags_are_checked(hub, model, pack, tmp_path, monkeypatch):
    strange = ("model.safetensors", "config.json", "model.bin", "a/fp8kv_pack.json")
    hub.put("me/scales", {**contents(pack), **dict.fromkeys(strange, b"{}")})
    refused("me/scales", model, tmp_path / "out", "--in-place writes into", flags=["--in-place"])
    assert not hub.requests
    ran("apply", "me/scales", model, "-o", tmp_path / "out")
    fetched = [path.partition("/resolve/")[2].partition("/")[2] for _, path in hub.requests]
    assert {*fetched} - {""} == PACK_FILES - {"README.md"}
    # without a network what was fetched is used
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ran("apply", "me/scales", model, "-o", tmp_path / "offline")
    refused("me/other", model, tmp_path / "no", "pack 'me/other'", "the Hub cannot be reached")


def test_a_revision_also_of_a_branch_that_moves(hub, model, measured, pack, tmp_path, monkeypatch):
    first, answer = hub.put("me/scales", contents(pack)).head, hub.answer

    def move(method, path, body, token):
        if method == "GET" and "/resolve/" in path and len(hub.repositories["me/scales"].commits) == 2:
            hub.put("me/scales", {"fp8kv_pack.json": b"{}"})
        return answer(method, path, body, token)

    monkeypatch.setattr(hub, "answer", move)
    for out, name in ((tmp_path / "while", "me/scales"), (tmp_path / "after", f"me/scales@{first}")):
        ran("apply", name, model, "-o", out)
        assert (scales(out), report_of(out)["pack"]["name"]) == (scales(measured), f"me/scales@{first}")
    refused("me/scales", model, tmp_path / "out", "is damaged or changed")
    refused("me/scales@v9", model, tmp_path / "out", "'me/scales' on the Hub has no revision 'v9'")


def test_a_download_that_was_cut_off(hub, model, measured, pack, tmp_path, monkeypatch):
    # before it tries again
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.put("me/scales", contents(pack))
    hub.sizes["fp8kv_stats.safetensors"] = (pack / "fp8kv_stats.safetensors").stat().st_size + 1
    refused("me/scales", model, tmp_path / "out", "pack 'me/scales'")
    assert not [*(tmp_path / "cache").rglob("snapshots/*/fp8kv_stats.safetensors")]
    hub.sizes.clear()
    ran("apply", "me/scales", model, "-o", tmp_path / "out")
    assert scales(tmp_path / "out") == scales(measured)


def test_what_is_no_pack_or_too_large(hub, model, pack, tmp_path):
    half = {name: content for name, content in contents(pack).items() if name != STATS}
    hub.put("me/model", {"config.json": b"{}"})
    hub.put("me/half", half)
    hub.put("me/scales", contents(pack))
    for name, said in (
        ("me/gone", "is neither a directory nor a pack on the Hub"),
        ("me/model", "is not a whole pack: it has no fp8kv_pack.json"),
        ("me/half", f"it has no {STATS}"),
        ("half", "'half' does not exist"),
        ("me/half@-- x", "does not exist"),
    ):
        refused(name, model, tmp_path / "out", said)
    hub.requests.clear()
    for name, size, said in (
        ("fp8kv_pack.json", 1 << 40, "fp8kv_pack.json has more than 1,048,576 bytes"),
        (STATS, 1 << 40, f"{STATS} has more than"),
        (STATS, None, f"the size of {STATS} is not given, so it is not fetched; download the pack"),
    ):
        hub.sizes = {name: size}
        refused("me/scales", model, tmp_path / "out", said)
        assert not any(path.endswith(name) for method, path in hub.requests if method == "GET")


def push(measured, out, *flags):
    return fp8kv("pack", measured, "-o", out, "--push-to-hub", "me/scales", *flags)


def test_a_second_push_is_a_second_commit_and_a_private_pack_stays_so(hub, measured, per_head, tmp_path):
    for i, source in enumerate((measured, per_head)):
        succeeded(push(source, tmp_path / f"{i}", "--private"))
    repository = hub.repositories["me/scales"]
    assert repository.private
    assert len(repository.commits) == 3
    assert repository.commits[-1].keys() == PACK_FILES - {"kv_cache_scales.json"} | {".gitattributes"}
    repository.private = False
    one_line_error(push(measured, tmp_path / "third", "--private"), "it is public there; make it private")


def test_a_repository_of_something_else_a_name_of_none_and_a_refusal(hub, measured, tmp_path, monkeypatch):
    for name in ("scales", "a/b/c", "/scales", "me/sca les", ""):
        with pytest.raises(InputError, match="is not an id on the Hub"):
            check_hub_id("--push-to-hub", name)
    out = tmp_path / "pack"
    done = fp8kv("pack", measured, "-o", out, "--push-to-hub", "../x")
    one_line_error(done, "--push-to-hub '../x' is not an id on the Hub, such as owner/name")
    assert not out.exists()
    with on(hub, tmp_path / "cache", monkeypatch, token="hf_wrong"):
        done = push(measured, tmp_path / "refused")
    one_line_error(done, "was not pushed to 'me/scales': ", "401")
    assert "hf_wrong" not in done.stderr
    assert "me/scales" not in hub.repositories
    hub.put("me/scales", {"model.safetensors": b"x"})
    one_line_error(push(measured, out), f"the pack is in '{out}'", "holds other files and no pack")
    assert hub.repositories["me/scales"].commits[-1].keys() == {".gitattributes", "model.safetensors"}
    assert (out / "fp8kv_pack.json").exists()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    one_line_error(push(measured, tmp_path / "another"), "was not pushed to 'me/scales': ")


STATS, JSON, MANIFEST = "fp8kv_stats.safetensors", "kv_cache_scales.json", "fp8kv_pack.json"


@pytest.fixture
def broken(pack, tmp_path):
    return shutil.copytree(pack, tmp_path / "broken")


def refuses(broken, *phrases):
    with pytest.raises(InputError) as found:
        read_pack(broken)
    for phrase in phrases:
        assert phrase in str(found.value)


def rewrite(pack, edit):
    """Change the manifest as somebody would who knows how it is made."""
    document = json.loads((pack / MANIFEST).read_text())
    edit(document)
    del document["sha256"]
    text = json.dumps(document, indent=2) + "\n"
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (pack / MANIFEST).write_text(json.dumps(document, indent=2) + "\n")


@pytest.mark.parametrize("name", [MANIFEST, "fp8kv_calibration.json", STATS, JSON])
def test_a_damaged_file_or_a_byte_that_was_changed_is_refused(name, broken):
    file = broken / name
    content = file.read_bytes()
    places = range(0, len(content), len(content) // 20)
    flipped = (content[:i] + bytes([content[i] ^ 1 + i % 255]) + content[i + 1 :] for i in places)
    for damaged in (content[:-1], b"", content + b"\n", *flipped):
        file.write_bytes(damaged)
        refuses(broken, str(file))
    file.unlink()
    if name != MANIFEST:  # without which these are no pack's
        refuses(broken, str(file))
    file.mkdir()
    refuses(broken, str(file), "is not a file")
    file.rmdir()
    os.mkfifo(file)
    refuses(broken, str(file), "is not a file")


def test_every_command_refuses_a_damaged_pack(broken, model, measured, tmp_path):
    content = (broken / STATS).read_bytes()
    (broken / STATS).write_bytes(content[:-1])
    said = f"{STATS}' is damaged or changed ({len(content) - 1:,} bytes instead of {len(content):,}); get the"
    for command in (
        ("apply", broken, model, "-o", tmp_path / "out"),
        ("verify", measured, "--against", broken),
        ("merge", measured, broken, "-o", tmp_path / "out"),
        ("pack", broken, "-o", tmp_path / "out"),
        ("inspect", broken),
    ):
        one_line_error(fp8kv(*command), said)
    (broken / MANIFEST).unlink()
    refused(broken, model, tmp_path / "out", str(broken))


@pytest.mark.parametrize(
    ("edit", "phrase"),
    [
        (lambda d: d.update(fp8kv_pack=2), "of a newer version of packs than this fp8kv reads, 1; install"),
        (lambda d: d.update(fp8kv_pack=True), "fp8kv_pack: "),
        (lambda d: d.update(more=1), "more: "),
        (lambda d: d["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}), "'../x' is no"),
        (lambda d: d["files"].pop(STATS), "safetensors is missing"),
        (lambda d: d["files"].pop(JSON), "fp8kv_pack.json does not name it"),
        (lambda d: d["files"][JSON].update(size=1 << 40), "size: "),
        (lambda d: d["files"][JSON].update(sha256="0" * 63), "sha256: "),
        (lambda d: d.update(base_model=7), "base_model: "),
        (b"", "is not JSON"),
        (b"{}", "is not as fp8kv pack wrote it"),
        (b'{"fp8kv_pack": ' + b"9" * 4000 + b"}", "is of a newer version"),
        (b'{"fp8kv_pack": 1, "x": "\\ud800"}', "is not as fp8kv pack wrote it"),
        (b" " * (1 << 20) + b"{}", "no pack has"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_by_a_stranger(edit, phrase, broken):
    if isinstance(edit, bytes):
        (broken / MANIFEST).write_bytes(edit)
    else:
        rewrite(broken, edit)
    refuses(broken, phrase)


def test_scales_that_the_manifest_does_not_name(broken, model, measured, tmp_path):
    for name in ("README.md", "notes.txt"):
        (broken / name).write_text("mine")
    ran("apply", broken, model, "-o", tmp_path / "applied")  # nobody reads these
    for name in ("hf_quant_config.json", "model.safetensors.index.json", "config.json"):
        (broken / name).write_text("{}")
        one_line_error(fp8kv("inspect", broken), f"{name}' is not a file of a pack")
        (broken / name).unlink()
    shutil.copyfile(measured / "model-fp8kv-scales.safetensors", broken / "model.safetensors")
    shutil.copyfile(measured / "config.json", broken / "config.json")
    for command in (
        ("verify", broken),
        ("compare", broken, measured),
        ("compare", measured, broken),
        ("convert", broken, "--to", "json", "-o", tmp_path / "out"),
    ):
        one_line_error(fp8kv(*command), f"is not a file of a pack; move it out of '{broken}'")
    assert not (tmp_path / "out").exists()
    (broken / "config.json").unlink()
    (broken / "model.safetensors").rename(broken / "x.safetensors")
    one_line_error(fp8kv("inspect", broken), "x.safetensors' is not a file of a pack")
