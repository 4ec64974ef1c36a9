"""Packs through a Hub at the other end of a socket: pushed, fetched, refused."""

import pytest
from apply_cases import PACK_FILES, copy, report_of, scales
from command_line import fp8kv, one_line_error, ran
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

    def edit(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.1

    other = copy(model, tmp_path / "edited", edit)
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
        assert scales(out) == scales(measured)
        assert report_of(out)["pack"]["name"] == f"me/scales@{first}"
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


def test_what_is_no_pack(hub, model, pack, tmp_path):
    refuse("me/gone", model, tmp_path, "is neither a directory nor a pack on the Hub")
    hub.put("me/model", {"config.json": b"{}"})
    refuse("me/model", model, tmp_path, "is not a whole pack: it has no fp8kv_pack.json")
    half = files(pack)
    del half["fp8kv_stats.safetensors"]
    hub.put("me/half", half)
    refuse("me/half", model, tmp_path, "it has no fp8kv_stats.safetensors")
    refuse("half", model, tmp_path, "'half' does not exist")
    refuse("me/half@-- x", model, tmp_path, "does not exist")


def test_a_file_whose_size_is_too_large_or_not_given(hub, model, pack, tmp_path):
    hub.put("me/scales", files(pack))
    unknown = "the size of fp8kv_stats.safetensors is not given, so it is not fetched; download the pack"
    for name, size, said in (
        ("fp8kv_pack.json", 1 << 40, "fp8kv_pack.json has more than 1,048,576 bytes"),
        ("fp8kv_stats.safetensors", 1 << 40, "fp8kv_stats.safetensors has more than"),
        ("fp8kv_stats.safetensors", None, unknown),
    ):
        hub.sizes = {name: size}
        refuse("me/scales", model, tmp_path, said)
        assert not any(path.endswith(name) for method, path in hub.requests if method == "GET")


def push(measured, out, *flags):
    return fp8kv("pack", measured, "-o", out, "--push-to-hub", "me/scales", *flags)


def test_a_second_push_is_a_second_commit_and_a_private_pack_stays_so(hub, measured, per_head, tmp_path):
    assert push(measured, tmp_path / "first", "--private").exit_code == 0
    repository = hub.repositories["me/scales"]
    assert repository.private
    assert push(per_head, tmp_path / "second", "--private").exit_code == 0
    assert len(repository.commits) == 3
    assert repository.commits[-1].keys() == PACK_FILES - {"kv_cache_scales.json"} | {".gitattributes"}
    repository.private = False
    one_line_error(push(measured, tmp_path / "third", "--private"), "it is public there; make it private")


def test_a_repository_of_something_else_and_a_name_of_none(hub, measured, tmp_path):
    hub.put("me/scales", {"model.safetensors": b"x"})
    out = tmp_path / "pack"
    one_line_error(push(measured, out), f"the pack is in '{out}'", "holds other files and no pack")
    assert hub.repositories["me/scales"].commits[-1].keys() == {".gitattributes", "model.safetensors"}
    assert (out / "fp8kv_pack.json").exists()
    done = fp8kv("pack", measured, "-o", tmp_path / "no", "--push-to-hub", "../x")
    one_line_error(done, "--push-to-hub '../x' is not an id on the Hub, such as owner/name")
    assert not (tmp_path / "no").exists()
    for name in ("scales", "a/b/c", "/scales", "me/sca les", ""):
        with pytest.raises(InputError, match="is not an id on the Hub"):
            check_hub_id("--push-to-hub", name)


def test_a_hub_that_refuses_or_is_not_there(hub, measured, tmp_path, monkeypatch):
    with on(hub, tmp_path / "cache", monkeypatch, token="hf_wrong"):
        done = push(measured, tmp_path / "pack")
    one_line_error(done, "was not pushed to 'me/scales': ", "401")
    assert "hf_wrong" not in done.stderr
    assert "me/scales" not in hub.repositories
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    one_line_error(push(measured, tmp_path / "another"), "was not pushed to 'me/scales': ")
