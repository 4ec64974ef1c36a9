"""Outputs are whole or absent; sources stay as they are; weights are the source's bit for bit."""

import json
import os
import socket
import subprocess

import pytest
import torch
from engine_fixtures import make_scales
from safetensors import safe_open
from safetensors.torch import save_file

from calib.errors import InputError
from calib.files import atomic
from calib.files import atomic as place
from calib.files.atomic import atomic_directory
from calib.files.model_directory import open_model_directory
from calib.files.names import CALIBRATION_FILE, SCALES_SHARD
from calib.formats import export
from calib.formats.directory import check_output, write_checkpoint


def write(checkpoint, out, *, name="vllm", weights="link"):
    with atomic_directory(out, overwrite=True) as scratch:
        made = export(make_scales(), checkpoint, name)
        write_checkpoint(made, checkpoint, scratch, weights=weights, readme="# Ours\n")
    return out


def tensors(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def snapshot(directory):
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_weights_are_linked_and_the_source_is_untouched(checkpoint, tmp_path):
    before = snapshot(checkpoint.path)
    out = write(checkpoint, tmp_path / "out")
    assert snapshot(checkpoint.path) == before
    linked = out / "model-00001-of-00001.safetensors"
    assert linked.samefile(checkpoint.path / "model.safetensors")


def test_the_shards_of_a_sharded_source_keep_their_names(make_checkpoint, tmp_path):
    source = make_checkpoint().path
    (source / "model.safetensors").rename(source / "part.safetensors")
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
    index = {"weight_map": dict.fromkeys(names, "part.safetensors"), "metadata": {"total_size": 32}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    out = write(open_model_directory(source), tmp_path / "out")
    assert (out / "part.safetensors").samefile(source / "part.safetensors")
    written = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(written["weight_map"].values()) == {"part.safetensors", SCALES_SHARD}
    assert written["metadata"]["total_size"] == 32 + 4 * 4


def test_copy_copies(checkpoint, tmp_path):
    out = write(checkpoint, tmp_path / "out", weights="copy")
    copied, source = out / "model-00001-of-00001.safetensors", checkpoint.path / "model.safetensors"
    assert not copied.samefile(source)
    assert copied.read_bytes() == source.read_bytes()


def test_across_file_systems_links_become_copies(checkpoint, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(place.errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    out = write(checkpoint, tmp_path / "out")
    copied = out / "model-00001-of-00001.safetensors"
    assert copied.read_bytes() == (checkpoint.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("can_clone", [True, False])
def test_where_the_file_system_can_clone_nothing_is_sent(can_clone, checkpoint, tmp_path, monkeypatch):
    source, target, sent = checkpoint.path / "model.safetensors", tmp_path / "copy", []
    send = os.sendfile

    def clone(read, write, count):
        if can_clone:
            return os.write(write, os.read(read, count))
        raise OSError(place.errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", clone)
    monkeypatch.setattr(os, "sendfile", lambda *given: sent.append(send(*given)) or sent[-1])
    place.place_shard(source, target, set(), "copy", lambda *_: None)
    assert sent == ([0] if can_clone else [source.stat().st_size, 0])
    assert target.read_bytes() == source.read_bytes()


def test_copying_reports_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "_CHUNK", 100)
    (tmp_path / "source").write_bytes(bytes(range(250)))
    seen = []
    place.place_shard(
        tmp_path / "source", tmp_path / "target", set(), "copy", lambda *told: seen.append(told)
    )
    assert seen == [("source", more, 250) for more in (100, 100, 50)]
    assert (tmp_path / "target").read_bytes() == bytes(range(250))


def test_weights_none_writes_scales_and_configs_only(checkpoint, tmp_path):
    out = write(checkpoint, tmp_path / "out", weights="none")
    assert [path.name for path in out.glob("*.safetensors")] == [SCALES_SHARD]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors", SCALES_SHARD}


def test_scales_of_an_earlier_calibration_are_replaced(make_checkpoint, tmp_path):
    old = "model.layers.0.self_attn"
    stale = {f"{old}.k_scale": torch.ones(1), f"{old}.k_proj.output_scale": torch.ones(1)}
    weight_scale = {f"{old}.k_proj.weight_scale": torch.ones(1)}
    checkpoint = make_checkpoint(extra={**stale, **weight_scale})
    before = snapshot(checkpoint.path)
    out = write(checkpoint, tmp_path / "out")
    kept = tensors(out / "model-00001-of-00001.safetensors")
    assert f"{old}.k_scale" not in kept
    assert f"{old}.k_proj.output_scale" not in kept
    assert f"{old}.k_proj.weight_scale" in kept
    for name, tensor in kept.items():
        assert torch.equal(tensor, tensors(checkpoint.path / "model.safetensors")[name])
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[f"{old}.k_scale"] == SCALES_SHARD
    assert f"{old}.k_proj.output_scale" not in index
    assert snapshot(checkpoint.path) == before


def test_small_files_travel_and_other_weights_do_not(checkpoint, tmp_path):
    (checkpoint.path / "templates").mkdir()
    (checkpoint.path / "templates" / "tool.jinja").write_text("x")
    (checkpoint.path / "pytorch_model.bin").write_bytes(b"x")
    (checkpoint.path / "consolidated.safetensors").write_bytes(b"x")
    (checkpoint.path / ".cache").mkdir()
    (checkpoint.path / ".cache" / "x").write_text("x")
    out = write(checkpoint, tmp_path / "out")
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {
        "README.md",
        "config.json",
        "fp8kv_source/config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        SCALES_SHARD,
        "templates/tool.jinja",
        "tokenizer.json",
    }


def test_the_models_card_keeps_its_front_matter_first_and_its_text_last(checkpoint, tmp_path):
    (checkpoint.path / "README.md").write_text("---\nlicense: mit\n---\n# The model\n")
    out = write(checkpoint, tmp_path / "out")
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# Ours\n\nBeside engines: ")
    assert card.endswith("installed.\n\n# The model\n")


def test_nothing_is_left_after_a_failure(checkpoint, tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "out") as scratch:
        (scratch / "half").write_text("x")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("suffix", ["partial", "old"])
def test_what_a_killed_process_left_behind_goes_with_the_next(suffix, checkpoint, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    left = tmp_path / f".out.{host}-{ended.pid}.{suffix}"
    running = tmp_path / f".out.{host}-{os.getppid()}.{suffix}"
    for directory in (left, running):
        directory.mkdir()
        (directory / "half").write_text("x")
    write(checkpoint, tmp_path / "out")
    assert not left.exists()
    assert running.exists()


def test_a_directory_is_replaced_where_names_cannot_be_swapped(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    test_overwriting_replaces_the_whole_directory(checkpoint, tmp_path)


def test_a_write_error_is_one_line_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(InputError, match=r"cannot write .*No space left.*nothing was left behind"),
        atomic_directory(tmp_path / "out"),
    ):
        raise OSError(place.errno.ENOSPC, "No space left on device")
    assert not any(tmp_path.iterdir())


def test_overwriting_replaces_the_whole_directory(checkpoint, tmp_path):
    out = write(checkpoint, tmp_path / "out")
    (out / "stale").write_text("x")
    write(checkpoint, out)
    assert not (out / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_where_an_output_may_go(checkpoint, tmp_path):
    out, source = tmp_path / "out", checkpoint.path
    check_output(out, source, overwrite=False)
    out.mkdir()
    check_output(out, source, overwrite=False)
    (out / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="exists; add --overwrite"):
        check_output(out, source, overwrite=False)
    with pytest.raises(InputError, match="was not written by fp8kv"):
        check_output(out, source, overwrite=True)
    (out / CALIBRATION_FILE).write_text("{}")
    check_output(out, source, overwrite=True)
    for near in (source, source / "sub", tmp_path):
        with pytest.raises(InputError, match="would mix with the model"):
            check_output(near, source, overwrite=True)


def test_metadata_says_pt_so_that_transformers_reads_the_shard(checkpoint, tmp_path):
    out = write(checkpoint, tmp_path / "out")
    with safe_open(out / SCALES_SHARD, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_rewritten_shard_keeps_its_metadata(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(extra={"model.layers.0.self_attn.k_scale": torch.ones(1)})
    file = checkpoint.path / "model.safetensors"
    save_file(tensors(file), file, metadata={"format": "pt"})
    out = write(open_model_directory(checkpoint.path), tmp_path / "out")
    with safe_open(out / "model-00001-of-00001.safetensors", framework="pt") as written:
        assert written.metadata() == {"format": "pt"}


def test_a_server_running_as_another_user_can_read_the_scales(checkpoint, tmp_path):
    umask = os.umask(0o022)
    try:
        out = write(checkpoint, tmp_path / "out")
    finally:
        os.umask(umask)
    assert (out / SCALES_SHARD).stat().st_mode & 0o777 == 0o644
