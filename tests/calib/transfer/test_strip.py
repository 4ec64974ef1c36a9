"""`strip` gives back what was there, byte for byte; what an output says of itself is true."""

import json
import shutil
from pathlib import Path

import pytest
from apply_cases import config_of
from command_line import calibrate, fp8kv, one_line_error, ran
from families import save_model, tiny_model
from safetensors import safe_open

from calib.formats import FORMATS

FORMS = tuple(name for name, target in FORMATS.items() if target.with_weights)
INDEX = "model.safetensors.index.json"
GOLDEN = Path(__file__).parents[2] / "golden"
CARD = b"---\nlicense: mit\n---\n\r\n<h1>A model</h1>\xff, in no encoding\n"


def make_source(kind, directory):
    """A model in one file without an index, or in several with one; with files of odd layout."""
    model = tiny_model("llama")
    save_model(model, directory)
    if kind == "several":
        (directory / "model.safetensors").unlink()
        model.save_pretrained(directory, max_shard_size="100KB")
        index = json.loads((directory / INDEX).read_text())
        index["metadata"]["mark"] = "\u00e9"
        (directory / INDEX).write_text(json.dumps(index))
    config = config_of(directory)
    (directory / "config.json").write_text(json.dumps({"zzz": 1e-05, **config}, indent=7) + "\n\n")
    (directory / "README.md").write_bytes(CARD)
    (directory / "LICENSE").write_text("mine")
    (directory / "code").mkdir()
    (directory / "code" / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module", params=["one", "several"])
def source(request, tmp_path_factory):
    return make_source(request.param, tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def calibrated(source, tmp_path_factory):
    """An output in each format, below one directory."""
    out = tmp_path_factory.mktemp("calibrated") / "out"
    flags = [word for name in FORMATS for word in ("--format", name)]
    assert calibrate(source, "-o", out, *flags).exit_code == 0
    return out


def contents(directory):
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def output_of(*command):
    ran(*command)
    return Path(command[command.index("-o") + 1])


def total_size_is_that_of_the_tensors(directory):
    index, total = json.loads((directory / INDEX).read_text()), 0
    for file in set(index["weight_map"].values()):
        with safe_open(directory / file, framework="pt") as shard:
            total += sum(shard.get_tensor(name).nbytes for name in shard.keys())  # noqa: SIM118
    return index["metadata"]["total_size"] == total


def test_strip_gives_back_every_file_also_after_conversions(source, calibrated, tmp_path):
    for name in FORMS:
        assert total_size_is_that_of_the_tensors(calibrated / name), name
        back = output_of("strip", calibrated / name, "-o", tmp_path / name / "back")
        assert contents(back) == contents(source), name
        there = output_of("convert", calibrated / "vllm", "--to", name, "-o", tmp_path / name / "there")
        assert total_size_is_that_of_the_tensors(there), name
        again = output_of("convert", there, "--to", "vllm", "-o", tmp_path / name / "again")
        for step in (there, again):
            back = output_of("strip", step, "-o", tmp_path / name / f"{step.name}-back")
            assert contents(back) == contents(source), name


def test_also_after_a_repair_a_second_calibration_and_in_place(source, calibrated, tmp_path):
    statistics = calibrated / "vllm"
    repaired = output_of("repair", statistics, "--stats", statistics, "-o", tmp_path / "repaired")
    assert contents(output_of("strip", repaired, "-o", tmp_path / "back")) == contents(source)
    assert calibrate(calibrated / "tgi", "-o", tmp_path / "twice").exit_code == 0
    assert contents(output_of("strip", tmp_path / "twice", "-o", tmp_path / "twice-back")) == contents(source)
    own = tmp_path / "own"
    shutil.copytree(source, own)
    for seed in (1, 2):
        assert calibrate(own, "--in-place", "--seed", seed).exit_code == 0
    assert contents(output_of("strip", own, "-o", tmp_path / "own-back")) == contents(source)


def test_a_source_without_a_card_gets_none(model, tmp_path):
    assert calibrate(model, "-o", tmp_path / "out").exit_code == 0
    assert contents(output_of("strip", tmp_path / "out", "-o", tmp_path / "back")) == contents(model)


def test_what_was_edited_since_stays(source, calibrated, tmp_path):
    edited = tmp_path / "edited"
    shutil.copytree(calibrated / "vllm", edited)
    config = config_of(edited)
    (edited / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    back = output_of("strip", edited, "-o", tmp_path / "back")
    original = config_of(source)
    assert config_of(back) == {**original, "rope_theta": 5.0}


def test_a_conversions_card_is_its_own_and_then_the_models(source, calibrated, tmp_path):
    for to in (*FORMS, "json"):
        out = output_of("convert", calibrated / "tgi", "--to", to, "-o", tmp_path / to)
        card = (out / "README.md").read_bytes()
        assert b"Format `%b` for" % to.encode() in card
        assert b"Format `tgi`" not in card or to == "tgi"
        assert str(calibrated).encode() not in card
        assert str(out).encode() in card or not FORMATS[to].serve
        if FORMATS[to].with_weights:
            assert card.startswith(b"---\nlicense: mit\n---\n")
            assert card.count(b"<h1>A model</h1>") == 1
            assert b"The weights are those of the source, bit for bit" in card
        else:
            assert b"No weights are here" in card
            assert b"bit for bit" not in card
    # a conversion is an earlier output of ours
    output_of("convert", calibrated / "tgi", "--to", "json", "-o", tmp_path / "vllm", "--overwrite")


def test_an_output_without_weights_does_not_promise_any(source, calibrated, tmp_path):
    done = calibrate(source, "-o", tmp_path / "out", "--weights", "none", "--format", "tgi")
    assert "put the source's weight files beside these" in done.stdout
    card = (tmp_path / "out" / "README.md").read_text(errors="replace")
    assert "No weights are here: put the source's weight files beside these" in card
    assert "bit for bit" not in card
    for name in ("json", "fp8kv"):
        card = (calibrated / name / "README.md").read_text()
        assert "No weights are here." in card
        assert "bit for bit" not in card


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*-*/*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_the_output_of_another_tool_loses_its_scales_alone(path, tmp_path):
    directory = tmp_path / "theirs"
    shutil.copytree(path, directory)
    (directory / "README.md").write_bytes(CARD)
    back = output_of("strip", directory, "-o", tmp_path / "back")
    one_line_error(fp8kv("inspect", back), "holds no KV-cache scales")
    assert (back / "README.md").read_bytes() == CARD
    assert not (back / INDEX).exists()
    there = output_of("convert", directory, "--to", "vllm", "-o", tmp_path / "there", "--without-q")
    again = contents(output_of("strip", there, "-o", tmp_path / "again"))
    assert again == contents(back)


def test_an_output_of_an_older_version_keeps_no_false_card(source, calibrated, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(calibrated / "tgi", old)
    shutil.rmtree(old / "fp8kv_source")
    assert not (output_of("strip", old, "-o", tmp_path / "back") / "README.md").exists()
    card = (output_of("convert", old, "--to", "vllm", "-o", tmp_path / "new") / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert "Format `tgi`" not in card


def test_what_says_that_weights_are_quantised_stays(tmp_path):
    golden = GOLDEN / "nvidia-modelopt-0.47.0" / "fp8-kv"
    assert fp8kv("strip", golden, "-o", tmp_path / "out").exit_code == 0
    was, now = (
        json.loads((d / "hf_quant_config.json").read_text())["quantization"]
        for d in (golden, tmp_path / "out")
    )
    assert was.pop("kv_cache_quant_algo") == "FP8"
    assert now == was


def test_an_index_that_names_not_every_tensor_comes_back(tmp_path):
    source = make_source("several", tmp_path / "source")
    index = json.loads((source / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (source / INDEX).write_text(json.dumps(index))
    assert calibrate(source, "-o", tmp_path / "out").exit_code == 0
    assert fp8kv("strip", tmp_path / "out", "-o", tmp_path / "back").exit_code == 0
    assert (tmp_path / "back" / INDEX).read_bytes() == (source / INDEX).read_bytes()
