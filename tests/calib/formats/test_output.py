"""The job and its output: all or nothing, in place too, by one run at a time; what is refused early."""

import errno
import json
import os
import shutil
import socket
import subprocess
from itertools import product
from pathlib import Path
from stat import S_IMODE
from unittest.mock import Mock

import pytest
from apply_cases import contents
from command_line import fp8kv, one_line_error
from engine_fixtures import make_scales
from families import save_model, tiny_model, tiny_vision_language_model

from calib.commands.calibrate import result_blocks
from calib.errors import Fp8kvError, InputError
from calib.files import atomic
from calib.files.names import SCALES_SHARD, STATS_FILE
from calib.formats import output
from calib.job import default_output, run
from calib.progress import Progress
from calib.recipe import load_recipe

SMALL = {"data.dataset": "random", "data.samples": 4, "data.seq_len": 16, "device": "cpu"}
PLACED = "model-00001-of-00001.safetensors"


def calibrate(model, out=None, *, at=None, then=lambda: None, changes=(), **options):
    """Calibrate, and call `then` when the stage `at` begins."""
    progress = Progress()
    progress.stage = lambda name, *_: then() if name == at else None
    return run(str(model), load_recipe(None, SMALL | dict(changes)), out, progress=progress, **options)


def seed_of(out):
    return json.loads((out / "fp8kv_calibration.json").read_text())["recipe"]["data"]["seed"]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def model(tiny_directory):
    """With a file in a hidden directory, and one that no output of ours would have."""
    for name in (".git/HEAD", "pytorch_model.bin"):
        (tiny_directory / name).parent.mkdir(exist_ok=True)
        (tiny_directory / name).write_text("x")
    return tiny_directory


@pytest.mark.parametrize(("weight", "place"), [("lm_head", "logits"), ("model.norm", "last hidden state")])
def test_a_model_that_computes_nan_behind_its_last_cache_gets_a_warning(weight, place, tmp_path):
    broken = tiny_model("llama", tie_word_embeddings=False)
    broken.get_submodule(weight).weight.data[3] = float("nan")
    result = calibrate(save_model(broken, tmp_path / "broken"), tmp_path / "out")
    assert any(line.startswith(f"NaN or Inf in the model's {place}: it gene") for line in result.warnings)


def test_scales_are_those_of_an_output_elsewhere_and_what_is_replaced_is_kept(model, tmp_path):
    calibrate(model, tmp_path / "out")
    before, weights = contents(model), (model / "model.safetensors").stat().st_ino
    first = calibrate(model, in_place=True)
    after, kept = contents(model), contents(first.backup)
    assert after[SCALES_SHARD] == contents(tmp_path / "out")[SCALES_SHARD]
    index = json.loads(after["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) == {PLACED, SCALES_SHARD}
    assert first.backup == model.parent / f"{model.name}.before-fp8kv"
    assert kept == {name: before[name] for name in ("config.json", "model.safetensors")}
    added = {"README.md", SCALES_SHARD, STATS_FILE, "fp8kv_calibration.json", "fp8kv_source/config.json"}
    added |= {"model.safetensors.index.json", PLACED}
    assert after.keys() == before.keys() - {"model.safetensors"} | added
    assert {name: after[name] for name in before.keys() - kept.keys()}.items() <= before.items()
    assert (model / PLACED).stat().st_ino == weights
    assert names(tmp_path) == sorted(["out", model.name, first.backup.name])
    second = calibrate(model, in_place=True, changes={"data.seed": 7})  # a second time keeps both backups
    where = f"the files that were replaced are in {first.backup}"
    assert where in result_blocks(first)
    where += "-2; each file's original is in the first backup that has it"
    assert where in result_blocks(second)
    assert second.backup == model.parent / f"{model.name}.before-fp8kv-2"
    assert "quantization_config" not in json.loads((first.backup / "config.json").read_text())
    assert "fp8kv_calibration.json" in contents(second.backup)
    shutil.rmtree(first.backup)  # what it held is not in the next one, which must not look like the first
    third = calibrate(model, in_place=True, changes={"data.seed": 8})
    assert third.backup == model.parent / f"{model.name}.before-fp8kv-3"


def test_what_the_scales_do_not_change_stays_what_it_is(model, tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    (model / "linked.txt").symlink_to("../secret.txt")
    (model / "nowhere").symlink_to("../nothing")
    (model / "empty").mkdir(0o700)
    os.mkfifo(model / "pipe")
    model.chmod(0o700)
    kept = ("linked.txt", "nowhere", "pipe", "tokenizer.json")
    before = {name: (model / name).lstat().st_ino for name in kept}
    abandoned = tmp_path / f".{model.name}.{socket.gethostname()}-{ended_process()}.backup"
    abandoned.mkdir()  # by a run that was killed
    backup = calibrate(model, in_place=True).backup
    assert {name: (model / name).lstat().st_ino for name in kept} == before
    assert os.readlink(model / "linked.txt") == "../secret.txt"
    assert (model / "empty").is_dir()
    assert {S_IMODE(path.stat().st_mode) for path in (model, backup, model / "empty")} == {0o700}
    assert not abandoned.exists()


def ended_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_linked_shard_stays_a_link(model, tmp_path):
    stored = tmp_path / "stored.safetensors"
    (model / "model.safetensors").rename(stored)
    (model / "model.safetensors").symlink_to("../stored.safetensors")
    calibrate(model, in_place=True)
    placed = model / PLACED
    assert placed.is_symlink()
    assert placed.samefile(stored)


def test_a_failure_changes_nothing(model, monkeypatch):
    before = contents(model.parent)
    monkeypatch.setattr(output, "back_up", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="No space left on device; nothing was left behind"):
        calibrate(model, in_place=True)
    assert contents(model.parent) == before


def test_what_cannot_be_in_place_is_refused(model):
    formats, weights = "export.formats", "export.weights"
    for source, out, changes, message in (
        (model, None, {formats: ["vllm", "modelopt"]}, "one format that is a checkpoint, not vllm, mo"),
        (model, None, {formats: ["json"]}, "one format that is a checkpoint, not json"),
        (model, None, {weights: "none"}, "leaves the weights where they are; 'none' needs -o"),
        (model, Path("elsewhere"), {}, "leave -o, --overwrite away"),
        ("builtin:smollm2", None, {}, "which 'builtin:smollm2' is not; use -o"),
    ):
        with pytest.raises(InputError, match=message):
            calibrate(source, out, in_place=True, changes=changes)
    with pytest.raises(InputError, match="has a control character, which no printed command can hold"):
        calibrate(model.rename(model.with_name("a\nb")), in_place=True)


@pytest.fixture
def no_locks(monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))


@pytest.mark.parametrize("how", ["", "overwrite", "in_place"])
def test_the_second_run_is_refused_before_it_measures(how, tiny_directory, tmp_path):
    out, options = tmp_path / "out", {how: True} if how else {}
    if how == "overwrite":
        calibrate(tiny_directory, out)
    place = None if how == "in_place" else out

    def second():
        said = f"another run is writing '{place or tiny_directory}'; wait for it"
        with pytest.raises(InputError, match=said):
            calibrate(tiny_directory, place, changes={"data.seed": 2}, **options)

    calibrate(tiny_directory, place, at="calibrate", then=second, changes={"data.seed": 1}, **options)
    assert seed_of(place or tiny_directory) == 1
    assert names(tmp_path) == sorted(["tiny-llama", "out" if place else "tiny-llama.before-fp8kv"])


def test_the_progress_of_the_first_run_stays(tiny_directory, tmp_path):
    saved = tmp_path / ".out.rank0.progress"

    def second(_tokens):
        before = saved.exists() and saved.read_bytes()
        with pytest.raises(InputError, match="another run is writing"):
            calibrate(tiny_directory, tmp_path / "out", changes={"data.seed": 2})
        seen.append(before == (saved.exists() and saved.read_bytes()) and bool(before))

    seen, recipe = [], load_recipe(None, {**SMALL, "data.batch_size": 2, "save_minutes": 0})
    progress = Progress()
    progress.advance = second
    run(str(tiny_directory), recipe, tmp_path / "out", progress=progress)
    assert seen[-1]


def test_what_appears_meanwhile_is_left_as_it_is(no_locks, tiny_directory, tmp_path):
    out = tmp_path / "out"

    def another():
        out.mkdir()
        (out / "thesis.txt").write_text("x")

    with pytest.raises(InputError, match=f"'{out}' was written by another program"):
        calibrate(tiny_directory, out, at="write", then=another)
    assert (names(out), names(tmp_path)) == (["thesis.txt"], ["out", "tiny-llama"])


@pytest.mark.parametrize("swaps", [True, False])
def test_overwriting_replaces_what_it_was_asked_to_and_nothing_newer(
    swaps, no_locks, tiny_directory, tmp_path, monkeypatch
):
    if not swaps:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    out = tmp_path / "out"
    calibrate(tiny_directory, out, changes={"data.seed": 7})

    def second():
        calibrate(tiny_directory, out, changes={"data.seed": 2}, overwrite=True)

    with pytest.raises(InputError, match="was written by another program"):
        calibrate(tiny_directory, out, at="calibrate", then=second, overwrite=True)
    assert (seed_of(out), names(tmp_path)) == (2, ["out", "tiny-llama"])


def test_every_command_knows_at_once_where_it_cannot_write(tiny_directory, tmp_path, monkeypatch):
    for module in ("job", "evaluate.run", "rescale.proof"):
        monkeypatch.setattr(f"calib.{module}.load_model", lambda *_: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("gone")
    monkeypatch.setattr("calib.transfer.convert.existing_scales", lambda *_: (make_scales(), ()))
    commands = "calibrate -o, eval -o, stress -o, convert --to json -o, strip -o, recommend --write"
    said = {"file/out": "file' is not a folder", "dangling": "it is a file, or a link to nothing"}
    for command, (name, problem) in product(commands.split(", "), said.items()):
        done = fp8kv(*command.replace(" ", f" {tiny_directory} ", 1).split(), out := tmp_path / name)
        one_line_error(done, f"cannot write '{out}': ", f"{problem}; choose another output")
    assert names(tmp_path) == ["dangling", "file", "tiny-llama"]
    one_line_error(fp8kv("calibrate", tiny_directory, "--format", "json", "--tp-size", "3"), "evenly over 3")


def test_a_package_that_an_engines_environment_lacks_has_no_version(monkeypatch):
    monkeypatch.setattr(output, "_LIBRARIES", ("torch", "no-such-package"))
    assert output.versions().keys() == {"python", "fp8kv", "torch"}


def recipe(**changes):
    longer = {"data.samples": 6, "data.seq_len": 32}
    return load_recipe(None, SMALL | longer | {k.replace("__", "."): v for k, v in changes.items()})


def test_the_card_of_a_format_has_no_warning_of_another(model, tmp_path):
    result = run(str(model), recipe(export__formats=["tgi", "json"]), tmp_path / "out")
    for name, directory in result.directories.items():
        assert ("one number a layer" in (directory / "README.md").read_text()) == (name == "json")


def test_an_output_holds_what_the_design_says_and_its_recipe_reproduces_it(model, tmp_path):
    asked = recipe(strategy="attn_head", observer__name="mse", targets="qkv")
    result = run(str(model), asked, tmp_path / "out")
    names = "README.md config.json fp8kv_calibration.json fp8kv_source generation_config.json tokenizer.json "
    names += "model-00001-of-00001.safetensors model.safetensors.index.json tokenizer_config.json"
    assert {path.name for path in result.output.iterdir()} == {*names.split(), SCALES_SHARD, STATS_FILE}
    report = json.loads((result.output / "fp8kv_calibration.json").read_text())
    assert (report["recipe"], report["recipe"]["dtype"]) == (result.recipe.model_dump(mode="json"), "float32")
    assert report["recipe"]["data"]["batch_size"] == 4096 // 32
    assert report["dataset"]["tokens"] == result.tokens == 6 * 32
    assert len(report["dataset"]["fingerprint"]) == 64
    assert f"vllm serve {result.output}" in (result.output / "README.md").read_text()
    again = run(str(model), load_recipe(str(result.output / "fp8kv_calibration.json")), tmp_path / "again")
    for name in (SCALES_SHARD, STATS_FILE):
        assert (result.output / name).read_bytes() == (again.output / name).read_bytes()
    other = run(str(model), recipe(observer__name="mse", data__seed=1), tmp_path / "other")
    assert (result.output / STATS_FILE).read_bytes() != (other.output / STATS_FILE).read_bytes()


def test_what_must_fail_fails_before_it_takes_long(tmp_path, monkeypatch):
    model = save_model(tiny_model("gpt_neox"), tmp_path / "neox")
    for step, changes, message in (
        ("capture.resume.calibrate", {"export__formats": ["trtllm"]}, "--format trtllm: engines read k_proj"),
        (
            "capture.resume.calibrate",
            {"headroom": "auto"},
            "192 tokens, without repeated text, are too few to tell what others may",
        ),
        ("job.load_model", {"strategy": "attn_head", "export__formats": ["tgi"]}, "--reduce"),
        ("job.load_model", {"data__dataset": "./gone.jsonl"}, "gone.jsonl"),
        ("job.load_model", {"data__seq_len": 257}, "--seq-len 257 is longer than the model's 256 positions"),
    ):
        monkeypatch.setattr(f"calib.{step}", lambda *_, **__: pytest.fail("it was called"))
        with pytest.raises(Fp8kvError, match=message):
            run(str(model), recipe(**changes), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_default_length_is_cut_to_the_models_positions_and_the_output_named_after_it(model, tmp_path):
    for name in ("builtin:smollm2", "HuggingFaceTB/smollm2", "./models/smollm2/"):
        assert str(default_output(name, "tensor")) == "smollm2-fp8kv-tensor"
    short = {"data.dataset": "random", "data.samples": 2, "device": "cpu"}
    result = run(str(model), load_recipe(None, short), tmp_path / "out")
    assert result.tokens == 2 * 256
    assert "samples are cut to the model's 256 positions; the default is 2048 tokens" in result.warnings[0]
    saved = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())
    assert saved["recipe"]["data"]["seq_len"] == 256
    assert result.warnings[0] in saved["warnings"]
    assert run(str(model), load_recipe(None, short | {"data.seq_len": 256}), tmp_path / "all").tokens == 512


def test_a_calibration_of_paligemma_says_what_vllm_caches(tmp_path):
    model = save_model(tiny_vision_language_model("paligemma"), tmp_path / "model")
    (said,) = (each for each in run(str(model), recipe(), tmp_path / "out").warnings if "PaliGemma" in each)
    assert "positions from 1" in said
    assert "vLLM does neither" in said
