"""Packs through a Hub at the other end of a socket; damaged, altered and foreign packs refused in a line."""

import hashlib
import json
import os
import shutil

import pytest
from apply_cases import PACK_FILES, copy, refused, report_of, rescale_values, scales
from command_line import fp8kv, one_line_error, ran, succeeded
from fake_hub import on, running_hub
from huggingface_hub import constants

from calib.errors import InputError
from calib.files.pack import read_pack
from calib.transfer.hub import check_hub_id


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with running_hub() as hub, on(hub, tmp_path / "cache", monkeypatch):
        yield hub


def files(pack):
    return {file.name: file.read_bytes() for file in pack.iterdir()}


def refuse(name, model, tmp_path, *phrases, flags=()):
    one_line_error(fp8kv("apply", name, model, "-o", tmp_path / "out", *flags), *phrases)
    assert not (tmp_path / "out").exists()


def test_there_and_back(hub, model, measured, tmp_path):
    done = ran("pack", measured, "-o", tmp_path / "pack", "--push-to-hub", "me/scales")
    repository = hub.repositories["me/scales"]
    assert repository.commits[-1] == {".gitattributes": b"", **files(tmp_path / "pack")}
    assert not repository.private
    assert f"{hub.url}/me/scales at {repository.head}" in done.stdout
    assert "fp8kv apply me/scales" in done.stdout
    done = ran("apply", "me/scales", copy(model, tmp_path / "other"), "-o", tmp_path / "out")
    assert done.stderr.splitlines() == ["fetch", "load", "compare weights", "write"]
    assert scales(tmp_path / "out") == scales(measured)
    assert report_of(tmp_path / "out")["pack"]["name"] == f"me/scales@{repository.head}"
    other = copy(model, tmp_path / "edited", rescale_values)
    refuse("me/scales", other, tmp_path / "no", f"scales of 'me/scales@{repository.head}' do not fit")


def test_only_files_of_a_pack_are_fetched_once_flags_are_checked(hub, model, pack, tmp_path, monkeypatch):
    strange = ("model.safetensors", "config.json", "model.bin", "a/fp8kv_pack.json")
    hub.put("me/scales", {**files(pack), **dict.fromkeys(strange, b"{}")})
    refuse("me/scales", model, tmp_path, "--in-place writes into", flags=["--in-place"])
    assert not hub.requests
    ran("apply", "me/scales", model, "-o", tmp_path / "out")
    fetched = [path.partition("/resolve/")[2].partition("/")[2] for _, path in hub.requests]
    assert {*fetched} - {""} == PACK_FILES - {"README.md"}
    # without a network what was fetched is used
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ran("apply", "me/scales", model, "-o", tmp_path / "offline")
    refuse("me/other", model, tmp_path / "no", "pack 'me/other'", "the Hub cannot be reached")


def test_a_revision_also_of_a_branch_that_moves(hub, model, measured, pack, tmp_path, monkeypatch):
    first, answer = hub.put("me/scales", files(pack)).head, hub.answer

    def move(method, path, body, token):
        if method == "GET" and "/resolve/" in path and len(hub.repositories["me/scales"].commits) == 2:
            hub.put("me/scales", {"fp8kv_pack.json": b"{}"})
        return answer(method, path, body, token)

    monkeypatch.setattr(hub, "answer", move)
    for out, name in ((tmp_path / "while", "me/scales"), (tmp_path / "after", f"me/scales@{first}")):
        ran("apply", name, model, "-o", out)
        assert (scales(out), report_of(out)["pack"]["name"]) == (scales(measured), f"me/scales@{first}")
    refuse("me/scales", model, tmp_path, "is damaged or changed")
    refuse("me/scales@v9", model, tmp_path, "'me/scales' on the Hub has no revision 'v9'")


def test_a_download_that_was_cut_off(hub, model, measured, pack, tmp_path, monkeypatch):
    # before it tries again
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.put("me/scales", files(pack))
    hub.sizes["fp8kv_stats.safetensors"] = (pack / "fp8kv_stats.safetensors").stat().st_size + 1
    refuse("me/scales", model, tmp_path, "pack 'me/scales'")
    assert not [*(tmp_path / "cache").rglob("snapshots/*/fp8kv_stats.safetensors")]
    hub.sizes.clear()
    ran("apply", "me/scales", model, "-o", tmp_path / "out")
    assert scales(tmp_path / "out") == scales(measured)


def test_what_is_no_pack_or_too_large(hub, model, pack, tmp_path):
    stats = "fp8kv_stats.safetensors"
    half = {name: content for name, content in files(pack).items() if name != stats}
    for name, held in {"me/model": {"config.json": b"{}"}, "me/half": half, "me/scales": files(pack)}.items():
        hub.put(name, held)
    for name, said in (
        ("me/gone", "is neither a directory nor a pack on the Hub"),
        ("me/model", "is not a whole pack: it has no fp8kv_pack.json"),
        ("me/half", f"it has no {stats}"),
        ("half", "'half' does not exist"),
        ("me/half@-- x", "does not exist"),
    ):
        refuse(name, model, tmp_path, said)
    hub.requests.clear()
    for name, size, said in (
        ("fp8kv_pack.json", 1 << 40, "fp8kv_pack.json has more than 1,048,576 bytes"),
        (stats, 1 << 40, f"{stats} has more than"),
        (stats, None, f"the size of {stats} is not given, so it is not fetched; download the pack"),
    ):
        hub.sizes = {name: size}
        refuse("me/scales", model, tmp_path, said)
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
CHECKED = (MANIFEST, "fp8kv_calibration.json", STATS, JSON)


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


@pytest.mark.parametrize("name", CHECKED)
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
        (lambda d: d["files"][JSON].update(sha256="0" * 64), "checksum differs"),
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
