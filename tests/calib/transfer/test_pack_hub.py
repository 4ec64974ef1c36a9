"""Packs through a Hub at the other end of a socket: pushed, fetched, refused."""

import pytest
from apply_cases import PACK_FILES, copy, report_of, rescale_values, scales
from command_line import fp8kv, one_line_error, ran, succeeded
from fake_hub import on, running_hub
from huggingface_hub import constants

from calib.errors import InputError
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
    for i, given in enumerate((measured, per_head)):
        succeeded(push(given, tmp_path / f"{i}", "--private"))
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
