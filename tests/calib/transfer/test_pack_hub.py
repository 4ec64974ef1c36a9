"""Packs through a Hub at the other end of a socket: pushed, fetched, refused."""

import json
import os
import shutil
import subprocess

import pytest
from apply_cases import copy, scales
from command_line import CLI, fp8kv, one_line_error
from fake_hub import TOKEN, on, running_hub

FILES = {
    *("README.md", "fp8kv_calibration.json", "fp8kv_pack.json", "fp8kv_stats.safetensors"),
    "kv_cache_scales.json",
}


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
    done = fp8kv("pack", measured, "-o", tmp_path / "pack", "--push-to-hub", "me/scales")
    assert done.exit_code == 0, done.stderr
    repository = hub.repositories["me/scales"]
    assert repository.commits[-1] == {".gitattributes": b"", **files(tmp_path / "pack")}
    assert not repository.private
    assert f"{hub.url}/me/scales at {repository.head}" in done.stdout
    assert "fp8kv apply me/scales" in done.stdout
    done = fp8kv("apply", "me/scales", copy(model, tmp_path / "other"), "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "out") == scales(measured)
    origin = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())["pack"]
    assert origin["name"] == f"me/scales@{repository.head}"
    asked = {path.rpartition("/")[2] for method, path in hub.requests if method == "GET"}
    assert asked & FILES == FILES - {"README.md"}


def test_no_stage_of_what_lies_here(hub, pack, model, tmp_path):
    done = fp8kv("apply", pack, model, "-o", tmp_path / "out")
    assert done.stderr.splitlines() == ["load", "compare weights", "write"]


def test_flags_are_checked_before_anything_is_fetched(hub, pack, model, tmp_path):
    hub.put("me/scales", files(pack))
    refuse("me/scales", model, tmp_path, "--in-place writes into", flags=["--in-place"])
    assert not hub.requests


def test_only_files_of_a_pack_are_fetched(hub, model, pack, tmp_path):
    strange = {
        "model.safetensors": b"x",
        "config.json": b"{}",
        "model.bin": b"pickle",
        "a/fp8kv_pack.json": b"",
    }
    hub.put("me/scales", {**files(pack), **strange})
    done = fp8kv("apply", "me/scales", model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    fetched = {
        path.partition("/resolve/")[2].partition("/")[2] for _, path in hub.requests if "/resolve/" in path
    }
    assert fetched == FILES - {"README.md"}


def test_a_download_that_was_cut_off(hub, model, measured, pack, tmp_path):
    hub.put("me/scales", files(pack))
    hub.sizes["fp8kv_stats.safetensors"] = (pack / "fp8kv_stats.safetensors").stat().st_size + 1
    refuse("me/scales", model, tmp_path, "pack 'me/scales'")
    assert not [*(tmp_path / "cache").rglob("snapshots/*/fp8kv_stats.safetensors")]
    hub.sizes.clear()
    done = fp8kv("apply", "me/scales", model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "out") == scales(measured)


def test_a_branch_that_moves_while_its_files_are_fetched(hub, model, measured, pack, tmp_path, monkeypatch):
    first, answer = hub.put("me/scales", files(pack)).head, hub.answer

    def move(method, path, body, token):
        if method == "GET" and "/resolve/" in path and len(hub.repositories["me/scales"].commits) == 2:
            hub.put("me/scales", {"fp8kv_stats.safetensors": b"large"})
        return answer(method, path, body, token)

    monkeypatch.setattr(hub, "answer", move)
    done = fp8kv("apply", "me/scales", model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "out") == scales(measured)
    origin = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())["pack"]
    assert origin["name"] == f"me/scales@{first}"


def test_a_revision(hub, model, measured, pack, tmp_path):
    first = hub.put("me/scales", files(pack)).head
    hub.put("me/scales", {"fp8kv_pack.json": b"{}"})
    refuse("me/scales", model, tmp_path, "is damaged or changed")
    refuse("me/scales@v9", model, tmp_path, "'me/scales' on the Hub has no revision 'v9'")
    done = fp8kv("apply", f"me/scales@{first}", model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert scales(tmp_path / "out") == scales(measured)


def test_without_a_network_what_was_fetched_is_used(hub, model, pack, tmp_path, monkeypatch):
    from huggingface_hub import constants

    hub.put("me/scales", files(pack))
    assert fp8kv("apply", "me/scales", model, "-o", tmp_path / "first").exit_code == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = fp8kv("apply", "me/scales", model, "-o", tmp_path / "second")
    assert done.exit_code == 0, done.stderr
    refuse("me/other", model, tmp_path, "pack 'me/other'", "the Hub cannot be reached")


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


@pytest.mark.parametrize("name", sorted(FILES - {"README.md"}))
def test_a_changed_file(name, hub, model, pack, tmp_path):
    changed = files(pack)
    content = bytearray(changed[name])
    content[len(content) // 2] ^= 1
    hub.put("me/scales", {**changed, name: bytes(content)})
    refuse("me/scales", model, tmp_path, name)


@pytest.mark.parametrize("name", ["fp8kv_pack.json", "fp8kv_stats.safetensors"])
def test_a_file_that_is_larger_than_it_may_be(name, hub, model, pack, tmp_path):
    hub.put("me/scales", files(pack))
    hub.sizes[name] = 1 << 40
    refuse("me/scales", model, tmp_path, f"{name} has more than")
    assert not any(path.endswith(name) for method, path in hub.requests if method == "GET")


def test_a_file_whose_size_is_not_given(hub, model, pack, tmp_path):
    hub.put("me/scales", files(pack))
    hub.sizes["fp8kv_stats.safetensors"] = None
    said = "the size of fp8kv_stats.safetensors is not given, so it is not fetched; download the pack"
    refuse("me/scales", model, tmp_path, said)
    assert not any(path.endswith("stats.safetensors") for method, path in hub.requests if method == "GET")


def test_another_model(hub, model, pack, tmp_path):
    def edit(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.1

    commit = hub.put("me/scales", files(pack)).head
    other = copy(model, tmp_path / "other", edit)
    refuse("me/scales", other, tmp_path, f"the scales of 'me/scales@{commit}' do not fit")


def test_a_directory_goes_first(hub, model, pack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pack, tmp_path / "me" / "scales")
    done = fp8kv("apply", "me/scales", model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert not hub.requests


def push(measured, out, *flags):
    return fp8kv("pack", measured, "-o", out, "--push-to-hub", "me/scales", *flags)


def test_a_second_push_is_a_second_commit(hub, model, measured, tmp_path):
    from apply_cases import calibrated

    assert push(measured, tmp_path / "first").exit_code == 0
    finer = calibrated(model, tmp_path / "finer", "--strategy", "attn_head")
    done = push(finer, tmp_path / "second")
    assert done.exit_code == 0, done.stderr
    commits = hub.repositories["me/scales"].commits
    assert len(commits) == 3
    assert commits[-1].keys() == FILES - {"kv_cache_scales.json"} | {".gitattributes"}


def test_a_private_pack(hub, measured, tmp_path):
    assert push(measured, tmp_path / "first", "--private").exit_code == 0
    assert hub.repositories["me/scales"].private
    hub.repositories["me/scales"].private = False
    one_line_error(push(measured, tmp_path / "second", "--private"), "it is public there")


def test_a_repository_of_something_else_is_left_alone(hub, measured, tmp_path):
    hub.put("me/scales", {"model.safetensors": b"x"})
    out = tmp_path / "pack"
    one_line_error(push(measured, out), f"the pack is in '{out}'", "holds other files and no pack")
    assert hub.repositories["me/scales"].commits[-1].keys() == {
        ".gitattributes",
        "model.safetensors",
    }
    assert (out / "fp8kv_pack.json").exists()


@pytest.mark.parametrize("name", ["scales", "a/b/c", "/scales", "../x", "me/sca les", ""])
def test_a_name_that_is_none(name, measured, tmp_path):
    done = fp8kv("pack", measured, "-o", tmp_path / "pack", "--push-to-hub", name)
    one_line_error(done, "is not an id on the Hub, such as owner/name")
    assert not (tmp_path / "pack").exists()


def test_a_push_without_a_token(hub, measured, tmp_path, monkeypatch):
    with on(hub, tmp_path / "cache", monkeypatch, token="hf_wrong"):
        done = push(measured, tmp_path / "pack")
    one_line_error(done, "was not pushed to 'me/scales': ", "401")
    assert "hf_wrong" not in done.stderr
    assert "me/scales" not in hub.repositories


def test_a_hub_that_is_not_there(hub, model, measured, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    one_line_error(push(measured, tmp_path / "pack"), "was not pushed to 'me/scales': ")


def test_in_a_process_of_its_own_with_the_usual_settings(measured, model, tmp_path):
    with running_hub() as hub:
        of_the_hub = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        env = {**os.environ, **of_the_hub, "HF_HOME": str(tmp_path / "home")}
        for command in (
            ["pack", measured, "-o", tmp_path / "pack", "--push-to-hub", "me/scales"],
            ["apply", "me/scales", model, "-o", tmp_path / "out"],
        ):
            line = [*CLI, *map(str, command)]
            done = subprocess.run(line, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            stages = ["fetch", "load", "compare weights", "write"] if "apply" in command else []
            assert done.stderr.splitlines() == stages
    assert scales(tmp_path / "out") == scales(measured)
