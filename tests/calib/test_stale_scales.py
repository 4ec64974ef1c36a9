"""A stale file with scales beside a checkpoint: the index decides, or every command refuses."""

import json
import shutil

import pytest
from command_line import calibrate, fp8kv, one_line_error
from families import save_model, tiny_model
from safetensors.torch import load_file, save_file

from calib.evaluate import inputs
from calib.evaluate.report import Suite
from calib.files.stored_scales import read_scales

INDEX = "model.safetensors.index.json"
SCALES = "model-fp8kv-scales.safetensors"
DATA = ("--dataset", "random", "--samples", "2", "--seq-len", "40", "--device", "cpu")
WORD = "w5 --max-new-tokens 8 --backend torch --json"
# what takes scales from files
OF_FILES = {
    "convert": "convert DIR --to tgi -o OUT",
    "repair": "repair DIR --stats GOOD -o OUT",
    "compare": "compare GOOD DIR --json",
    "compare, first": "compare DIR GOOD --json",
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
    "calibrate": " ".join(["calibrate DIR -o OUT", *DATA]),
    "apply to it": "apply GOOD DIR -o OUT",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model, two calibrations of it, and one whose directory has no index."""
    root = tmp_path_factory.mktemp("stale")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    made = {"MODEL": model, "GOOD": root / "good", "OTHER": root / "other"}
    assert calibrate(model, "-o", made["GOOD"]).exit_code == 0
    assert calibrate(model, "-o", made["OTHER"], "--seed", "7").exit_code == 0
    return made


def without_index(directory):
    """As a tool leaves it that writes a file of weights and one of scales."""
    (directory / INDEX).unlink()
    (directory / "model-00001-of-00001.safetensors").rename(directory / "model.safetensors")


def stale(places, tmp_path, file, factor, *, index):
    """A copy of the calibration with all its scales times `factor` in another file too."""
    directory = shutil.copytree(places["GOOD"], tmp_path / "scales")
    if not index:
        without_index(directory)
    scales = {name: x * factor for name, x in load_file(directory / SCALES).items()}
    save_file(scales, directory / file)
    return directory


def run(command, places, directory, out):
    shutil.rmtree(out, ignore_errors=True)
    words = {**places, "DIR": directory, "OUT": out}
    return fp8kv(*(words.get(word, word) for word in command.split()))


def results(done, out):
    """What a command said and wrote, without names of directories, times, and its own report."""
    assert done.exit_code == 0, done.stderr
    kept = ("fp8", "layers", "variants")
    said = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    said = {key: said[key] for key in kept if key in said}
    said.get("fp8", {}).pop("seconds", None)
    said.get("fp8", {}).pop("tokens_per_second", None)
    written = {file.name: file for file in out.glob("*.safetensors")}
    tensors = {name: load_file(file) for name, file in written.items()}
    values = {n: {k: t.tolist() for k, t in each.items()} for n, each in tensors.items()}
    assert said or written
    return said, values


@pytest.fixture(scope="module", autouse=True)
def small_suite():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(inputs.SUITES, "quick", Suite(4, 2, 24, 1, 2, (), (), 1))
        yield


@pytest.mark.parametrize("command", [*OF_FILES, *OF_STATISTICS])
def test_the_index_decides_or_two_values_are_refused(command, places, tmp_path):
    words = (OF_FILES | OF_STATISTICS)[command]
    out, clean = tmp_path / "out", shutil.copytree(places["GOOD"], tmp_path / "clean" / "scales")
    listed = stale(places, tmp_path / "listed", "zz.safetensors", 1 / 400, index=True)
    expected = results(run(words, places, clean, out), out)
    assert results(run(words, places, listed, out), out) == expected
    unlisted = stale(places, tmp_path / "unlisted", "aa.safetensors", 1 / 400, index=False)
    done = run(words, places, unlisted, out)
    if command in OF_STATISTICS:
        without_index(clean)
        assert results(done, out) == results(run(words, places, clean, out), out)
        return
    name, value = "'model.layers.0.self_attn.k_scale'", read_scales(places["GOOD"]).layers[0].k[0]
    own, other = f"{value:.6g} as {name} in {SCALES}", f"{value / 400:.6g} as {name} in aa.safetensors"
    one_line_error(done, "two values for the K scale of layer 0 (and of 1 more)", own, other)
    assert not out.exists()


@pytest.mark.parametrize(
    ("file", "factor", "index"),
    [("aa.safetensors", 1 / 400, True), ("zz.safetensors", 1 / 400, False), ("aa.safetensors", 1.0, False)],
)
def test_verify_and_inspect_show_the_same_whatever_the_file_is_called(file, factor, index, places, tmp_path):
    directory = stale(places, tmp_path, file, factor, index=index)
    verified = fp8kv("verify", directory, "--engine", "vllm", "--json")
    inspected = fp8kv("inspect", directory, "--json")
    assert (verified.exit_code, inspected.exit_code) == (1, 0)
    wanted = [f"{file} holds 4 scales and is not in the index"]
    if not index:
        wanted = ["two values for the K scale of layer 0"] if factor != 1 else []
        wanted.append("4 scales are there twice")
    shown = json.loads(inspected.stdout)
    for problems in (shown["problems"], json.loads(verified.stdout)["problems"]):
        assert all(any(start in line for line in problems) for start in wanted), problems
    own = [list(layer.k) for layer in read_scales(places["GOOD"]).layers]
    # equal ones are the same; of two others the larger is shown, which clips nothing
    assert [layer["k"] for layer in shown["layers"]] == own
    if factor == 1:
        out = tmp_path / "out"
        _, expected = results(run(OF_FILES["convert"], places, places["GOOD"], out), out)
        _, found = results(run(OF_FILES["convert"], places, directory, out), out)
        assert found[SCALES] == expected[SCALES]


def test_statistics_take_no_scales_beside_them(places, tmp_path):
    given = tmp_path / "fp8kv"
    assert calibrate(places["MODEL"], "-o", given, "--format", "fp8kv").exit_code == 0
    shutil.copyfile(places["GOOD"] / SCALES, given / "zz.safetensors")
    done = run(OF_FILES["generate --scales"], places, given, tmp_path / "out")
    one_line_error(done, "statistics to make scales of, and others in zz.safetensors; take away")


def test_an_old_json_file_is_left_behind(places, tmp_path):
    model = shutil.copytree(places["MODEL"], tmp_path / "model")
    scales = {"model_type": "llama", "kv_cache": {"scaling_factor": {"0": {"0": 9.0, "1": 9.0}}}}
    (model / "kv_cache_scales.json").write_text(json.dumps(scales))
    kept = [(layer.k, layer.v) for layer in read_scales(places["GOOD"]).layers]
    for flags, made in ((("-o", tmp_path / "out"), tmp_path / "out"), (("--in-place",), model)):
        assert fp8kv("apply", places["GOOD"], model, *flags).exit_code == 0
        assert not (made / "kv_cache_scales.json").exists()
        assert [(layer.k, layer.v) for layer in read_scales(made).layers] == kept


def test_scales_beside_a_single_file_of_weights_are_the_models(places, tmp_path):
    model = shutil.copytree(places["MODEL"], tmp_path / "model")
    shutil.copyfile(places["GOOD"] / SCALES, model / "zz.safetensors")
    for command in ("bake MODEL --scales GOOD --for fp8 -o OUT", "stress MODEL -o OUT"):
        done = run(command, {**places, "MODEL": model}, model, tmp_path / "out")
        one_line_error(done, "has KV scales ('model.layers.0.self_attn.k_scale'), which would not fit")


@pytest.mark.parametrize("offload", ["none", "layerwise"])
def test_weights_that_the_index_does_not_list_are_not_measured(offload, places, tmp_path):
    model = shutil.copytree(places["GOOD"], tmp_path / "model")
    weights = load_file(model / "model-00001-of-00001.safetensors")
    for file in ("aa.safetensors", "zz.safetensors"):
        save_file({name: 3 * x for name, x in weights.items()}, model / file, {"format": "pt"})
    assert calibrate(model, "-o", tmp_path / "out", "--offload", offload).exit_code == 0
    own, wanted = load_file(tmp_path / "out" / SCALES), load_file(places["GOOD"] / SCALES)
    assert own == wanted


def test_scales_of_the_model_before_it_was_baked_are_refused(places, tmp_path):
    baked, made = tmp_path / "baked", tmp_path / "made"
    assert run(OF_STATISTICS["bake"], places, places["GOOD"], baked).exit_code == 0
    assert calibrate(baked, "-o", made).exit_code == 0
    assert fp8kv("verify", made, "--engine", "vllm").exit_code == 0
    assert run(OF_FILES["convert"], places, made, tmp_path / "out").exit_code == 0
    before = {name: x / 16 for name, x in load_file(places["GOOD"] / SCALES).items()}
    save_file(before, made / SCALES)
    verified = fp8kv("verify", made, "--engine", "vllm")
    assert verified.exit_code == 1
    assert "its weights are baked for fp8" in " ".join(verified.stdout.split())
    converted = run(OF_FILES["convert"], places, made, tmp_path / "out")
    one_line_error(converted, "baked for fp8, which puts K scales near 1, and these are 0.0")
