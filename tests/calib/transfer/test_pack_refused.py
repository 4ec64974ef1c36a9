"""Damaged, altered and foreign packs: refused in one line, nothing written."""

import hashlib
import json
import shutil

import pytest
from apply_cases import refused
from command_line import fp8kv, one_line_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calib.errors import InputError
from calib.files.pack import read_pack

CHECKED = (
    *("fp8kv_pack.json", "fp8kv_calibration.json", "fp8kv_stats.safetensors"),
    "kv_cache_scales.json",
)


MANIFEST_GONE = ("fp8kv_pack.json", "missing")


@pytest.fixture
def broken(pack, tmp_path):
    return shutil.copytree(pack, tmp_path / "broken")


def rewrite(pack, edit):
    """Change the manifest as somebody would who knows how it is made."""
    file = pack / "fp8kv_pack.json"
    document = json.loads(file.read_text())
    edit(document)
    document.pop("sha256", None)
    dump = lambda: json.dumps(document, indent=2) + "\n"  # noqa: E731
    document["sha256"] = hashlib.sha256(dump().encode()).hexdigest()
    file.write_text(dump())


@pytest.mark.parametrize("name", CHECKED)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(name, pack, tmp_path, place, flip):
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(pack, broken)
    content = bytearray((broken / name).read_bytes())
    content[int(place * len(content))] ^= flip
    (broken / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_pack(broken)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "longer", "one bit", "directory"])
def test_a_damaged_file_is_refused_by_every_command(name, how, broken, model, measured, tmp_path):
    file = broken / name
    content = file.read_bytes()
    file.unlink()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    if how == "directory":
        file.mkdir()
    elif how != "missing":
        file.write_bytes(
            {"truncated": content[:-1], "empty": b"", "longer": content + b"\n"}.get(how, changed)
        )
    refused(broken, model, tmp_path / "out", str(broken))
    for command in (
        # which reads the statistics alone, and without a manifest these are no pack's
        *([("verify", measured, "--against", broken)] if (name, how) != MANIFEST_GONE else []),
        ("merge", measured, broken, "-o", tmp_path / "out"),
        ("pack", broken, "-o", tmp_path / "out"),
    ):
        one_line_error(fp8kv(*command), str(broken))
    assert not (tmp_path / "out").exists()


def test_inspect_refuses_scales_that_were_changed(broken):
    file = broken / "kv_cache_scales.json"
    file.write_text(file.read_text().replace("0.", "1.", 1))
    one_line_error(fp8kv("inspect", broken), "kv_cache_scales.json' is damaged or changed")


@pytest.mark.parametrize(
    ("edit", "phrase"),
    [
        (lambda d: d.update(fp8kv_pack=2), "is of a newer version of packs than this fp8kv reads"),
        (lambda d: d.update(fp8kv_pack=True), "fp8kv_pack: "),
        (lambda d: d.update(fp8kv_pack=0), "fp8kv_pack: "),
        (lambda d: d.pop("fp8kv_pack"), "fp8kv_pack: "),
        (lambda d: d.update(more=1), "more: "),
        (lambda d: d["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}), "'../x' is no"),
        (lambda d: d["files"].update({"/etc/passwd": {}}), "files./etc/passwd"),
        (lambda d: d["files"].update({"x.bin": {"size": 1, "sha256": "0" * 64}}), "'x.bin' is no"),
        (lambda d: d["files"].pop("fp8kv_stats.safetensors"), "safetensors is missing"),
        (lambda d: d["files"].pop("kv_cache_scales.json"), "fp8kv_pack.json does not name it"),
        (lambda d: d["files"]["kv_cache_scales.json"].update(size=1 << 40), "size: "),
        (lambda d: d["files"]["kv_cache_scales.json"].update(size=-1), "size: "),
        (lambda d: d["files"]["kv_cache_scales.json"].update(size=1.0), "size: "),
        (lambda d: d["files"]["kv_cache_scales.json"].update(sha256="0" * 63), "sha256: "),
        (lambda d: d["files"]["kv_cache_scales.json"].update(sha256="0" * 64), "checksum differs"),
        (lambda d: d.update(files=[]), "files: "),
        (lambda d: d.update(base_model=7), "base_model: "),
    ],
)
def test_a_manifest_by_a_stranger(edit, phrase, broken, model, tmp_path):
    rewrite(broken, edit)
    refused(broken, model, tmp_path / "out", phrase)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (b"", "is not JSON"),
        (b"[]", "must hold a JSON object"),
        (b"{}", "is not as fp8kv pack wrote it"),
        (b'{"fp8kv_pack": 1, "fp8kv_pack": 1}', "is there twice"),
        (b'{"fp8kv_pack": ' + b"9" * 4000 + b"}", "is of a newer version"),
        (b'{"fp8kv_pack": 1, "x": "\\ud800"}', "is not as fp8kv pack wrote it"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
        (b"\xff", "is not JSON"),
        (b" " * (1 << 20) + b"{}", "no pack has"),
    ],
)
def test_a_manifest_that_is_none(text, phrase, broken, model, tmp_path):
    (broken / "fp8kv_pack.json").write_bytes(text)
    refused(broken, model, tmp_path / "out", phrase)


def test_what_nobody_reads_may_change(broken, model, tmp_path):
    (broken / "README.md").write_text("# mine")
    (broken / "notes.txt").write_text("mine")
    (broken / ".git").mkdir()
    done = fp8kv("apply", broken, model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr


def test_a_pipe_is_no_file(broken, model, tmp_path):
    import os

    (broken / "fp8kv_stats.safetensors").unlink()
    os.mkfifo(broken / "fp8kv_stats.safetensors")
    refused(broken, model, tmp_path / "out", "is not a file")


@pytest.fixture
def with_weights(broken, measured):
    """A pack into which somebody put scales, and a config, that its manifest does not name."""
    from safetensors.torch import load_file, save_file

    found = load_file(measured / "model-fp8kv-scales.safetensors")
    save_file({name: scale * 2 for name, scale in found.items()}, broken / "model.safetensors")
    shutil.copyfile(measured / "config.json", broken / "config.json")
    return broken


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "PACK"),
        ("verify", "PACK"),
        ("compare", "PACK", "MEASURED"),
        ("compare", "MEASURED", "PACK"),
        ("convert", "PACK", "--to", "json", "-o", "OUT"),
    ],
    ids=" ".join,
)
def test_scales_that_the_manifest_does_not_name(command, with_weights, measured, tmp_path):
    names = {"PACK": with_weights, "MEASURED": measured, "OUT": tmp_path / "out"}
    done = fp8kv(*(names.get(word, word) for word in command))
    one_line_error(done, f"is not a file of a pack; move it out of '{with_weights}'")
    assert not (tmp_path / "out").exists()


def test_weights_alone(with_weights):
    (with_weights / "config.json").unlink()
    (with_weights / "model.safetensors").rename(with_weights / "x.safetensors")
    one_line_error(fp8kv("inspect", with_weights), "x.safetensors' is not a file of a pack")


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_what_only_models_have(name, broken):
    (broken / name).write_text("{}")
    one_line_error(fp8kv("inspect", broken), f"{name}' is not a file of a pack")


def test_a_config_in_a_pack_is_not_read_by_apply(broken, model, tmp_path):
    (broken / "config.json").write_text('{"model_type": "another"}')
    done = fp8kv("apply", broken, model, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
