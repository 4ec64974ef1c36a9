"""Damaged, altered and foreign packs: refused in one line, nothing written."""

import hashlib
import json
import os
import shutil

import pytest
from apply_cases import refused
from command_line import fp8kv, one_line_error, ran
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calib.errors import InputError
from calib.files.pack import read_pack

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


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(CHECKED), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(name, pack, tmp_path, place, flip):
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(pack, broken)
    content = bytearray((broken / name).read_bytes())
    content[int(place * len(content))] ^= flip
    (broken / name).write_bytes(content)
    refuses(broken)


@pytest.mark.parametrize("name", CHECKED)
def test_a_damaged_file_is_refused(name, broken):
    file = broken / name
    content = file.read_bytes()
    for damaged in (content[:-1], b"", content + b"\n"):
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
