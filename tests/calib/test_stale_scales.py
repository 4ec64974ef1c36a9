"""A stale file with scales beside a checkpoint: the index decides, or every command refuses."""

import json
import shutil

import pytest
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import save_model, tiny_model
from safetensors.torch import load_file, save_file

from calib.evaluate import inputs
from calib.evaluate.report import Suite
from calib.files.stored_scales import read_scales

SCALES, WORD = "model-fp8kv-scales.safetensors", "w5 --max-new-tokens 8 --backend torch --json"
# what takes scales from files
OF_FILES = {
    "convert": "convert DIR --to tgi -o OUT",
    "repair": "repair DIR --stats GOOD -o OUT",
    "compare": "compare GOOD DIR --json",
    "generate": f"generate DIR {WORD}",
    "generate --scales": f"generate MODEL {WORD} --scales DIR",
    "eval --scales": "eval MODEL --scales DIR --variants none --json --dataset random --device cpu",
}
# what takes the statistics beside them, or weights
OF_STATISTICS = {
    "merge": "merge DIR OTHER -o OUT",
    "apply": "apply DIR MODEL -o OUT",
    "pack": "pack DIR -o OUT",
    "bake": "bake MODEL --scales DIR --for fp8 --dtype float32 -o OUT",
    "strip": "strip DIR -o OUT",
    "calibrate": "calibrate DIR -o OUT --dataset random --samples 2 --seq-len 40 --device cpu",
    "apply to it": "apply GOOD DIR -o OUT",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("stale")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    for name, seed in (("good", 1), ("other", 7)):
        succeeded(calibrate(model, "-o", root / name, "--seed", seed))
    return {"MODEL": model, "GOOD": root / "good", "OTHER": root / "other"}


def stale(places, path, file, factor, *, index):
    """A copy of the calibration with all its scales times `factor` in another file too."""
    directory = shutil.copytree(places["GOOD"], path / "scales")
    if not index:  # as a tool leaves it that writes a file of weights and one of scales
        (directory / "model.safetensors.index.json").unlink()
        (directory / "model-00001-of-00001.safetensors").rename(directory / "model.safetensors")
    scales = load_file(directory / SCALES)
    if file != SCALES:
        save_file({name: x * factor for name, x in scales.items()}, directory / file)
    return directory


def run(command, places, directory, out):
    shutil.rmtree(out, ignore_errors=True)
    words = {**places, "DIR": directory, "OUT": out}
    return fp8kv(*(words.get(word, word) for word in command.split()))


def results(command, places, directory, out):
    """What a command said and wrote, without names of directories, times, and its own report."""
    done = succeeded(run(command, places, directory, out))
    said = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    said = {key: said[key] for key in ("fp8", "layers", "variants") if key in said}
    for figure in ("seconds", "tokens_per_second"):
        said.get("fp8", {}).pop(figure, None)
    tensors = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert said or tensors
    return said, {n: {k: t.tolist() for k, t in each.items()} for n, each in tensors.items()}


@pytest.mark.parametrize("command", [*OF_FILES, *OF_STATISTICS])
def test_the_index_decides_or_two_values_are_refused(command, places, tmp_path, monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(4, 2, 24, 1, 2, (), (), 1))
    words, out = (OF_FILES | OF_STATISTICS)[command], tmp_path / "out"
    clean = stale(places, tmp_path / "clean", SCALES, 1, index=True)
    listed = stale(places, tmp_path / "listed", "zz.safetensors", 1 / 400, index=True)
    assert results(words, places, listed, out) == results(words, places, clean, out)
    unlisted = stale(places, tmp_path / "unlisted", "aa.safetensors", 1 / 400, index=False)
    if command in OF_STATISTICS:
        clean = stale(places, tmp_path / "plain", SCALES, 1, index=False)
        assert results(words, places, unlisted, out) == results(words, places, clean, out)
        return
    name, value = "'model.layers.0.self_attn.k_scale'", read_scales(places["GOOD"]).layers[0].k[0]
    own, other = f"{value:.6g} as {name} in {SCALES}", f"{value / 400:.6g} as {name} in aa.safetensors"
    done = run(words, places, unlisted, out)
    one_line_error(done, "two values for the K scale of layer 0 (and of 1 more)", own, other)
    assert not out.exists()


def test_verify_and_inspect_show_the_same_whatever_the_file_is_called(places, tmp_path):
    own = [list(layer.k) for layer in read_scales(places["GOOD"]).layers]
    twice = "4 scales are there twice"
    for file, factor, index, *wanted in (
        ("aa.safetensors", 1 / 400, True, "aa.safetensors holds 4 scales and is not in the index"),
        ("zz.safetensors", 1 / 400, False, "two values for the K scale of layer 0", twice),
        ("aa.safetensors", 1.0, False, twice),
    ):
        directory = stale(places, tmp_path / f"{factor}-{index}", file, factor, index=index)
        verified = json_of("verify", directory, "--engine", "vllm", status=1)
        shown = json_of("inspect", directory)
        for problems in (shown["problems"], verified["problems"]):
            assert all(any(start in line for line in problems) for start in wanted), problems
        # equal ones are the same; of two others the larger is shown, which clips nothing
        assert [layer["k"] for layer in shown["layers"]] == own
    command, out = OF_FILES["convert"], tmp_path / "out"
    expected = results(command, places, places["GOOD"], out)[1][SCALES]
    assert results(command, places, directory, out)[1][SCALES] == expected


def test_statistics_take_no_scales_beside_them_and_apply_no_old_json_file(places, tmp_path):
    given = tmp_path / "fp8kv"
    succeeded(calibrate(places["MODEL"], "-o", given, "--format", "fp8kv"))
    shutil.copyfile(places["GOOD"] / SCALES, given / "zz.safetensors")
    done = run(OF_FILES["generate --scales"], places, given, tmp_path / "out")
    one_line_error(done, "statistics to make scales of, and others in zz.safetensors; take away")
    # an old JSON file is left behind
    model = shutil.copytree(places["MODEL"], tmp_path / "model")
    scales = {"model_type": "llama", "kv_cache": {"scaling_factor": {"0": {"0": 9.0, "1": 9.0}}}}
    (model / "kv_cache_scales.json").write_text(json.dumps(scales))
    kept = [(layer.k, layer.v) for layer in read_scales(places["GOOD"]).layers]
    for flags, made in ((("-o", tmp_path / "out"), tmp_path / "out"), (("--in-place",), model)):
        ran("apply", places["GOOD"], model, *flags)
        assert not (made / "kv_cache_scales.json").exists()
        assert [(layer.k, layer.v) for layer in read_scales(made).layers] == kept


def test_scales_of_the_model_before_it_was_baked_are_refused(places, tmp_path):
    baked, made = tmp_path / "baked", tmp_path / "made"
    succeeded(run(OF_STATISTICS["bake"], places, places["GOOD"], baked))
    succeeded(calibrate(baked, "-o", made))
    ran("verify", made, "--engine", "vllm")
    succeeded(run(OF_FILES["convert"], places, made, tmp_path / "out"))
    save_file({name: x / 16 for name, x in load_file(places["GOOD"] / SCALES).items()}, made / SCALES)
    verified = fp8kv("verify", made, "--engine", "vllm")
    assert verified.exit_code == 1
    assert "its weights are baked for fp8" in " ".join(verified.stdout.split())
    converted = run(OF_FILES["convert"], places, made, tmp_path / "out")
    one_line_error(converted, "baked for fp8, which puts K scales near 1, and these are 0.0")
