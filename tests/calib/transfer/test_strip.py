"""`strip` gives back what was there, byte for byte; what an output says of itself is true."""

import json
import shutil
from pathlib import Path

import apply_cases
import pytest
from apply_cases import config_of, contents
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from families import edit_json, save_model, tiny_model

from calib.formats import FORMATS

FORMS = tuple(name for name, target in FORMATS.items() if target.with_weights)
INDEX, GOLDEN = "model.safetensors.index.json", Path(__file__).parents[2] / "golden"
CARD = b"---\nlicense: mit\n---\n\r\n<h1>A model</h1>\xff, in no encoding\n"


@pytest.fixture(scope="module", params=["one", "several"])
def source(request, tmp_path_factory):
    """A model in one file without an index, or in several with one; with files of odd layout."""
    model, directory = tiny_model("llama"), tmp_path_factory.mktemp("source") / "tiny"
    save_model(model, directory)
    if request.param == "several":
        (directory / "model.safetensors").unlink()
        model.save_pretrained(directory, max_shard_size="100KB")
        index = json.loads((directory / INDEX).read_text())
        index["metadata"]["mark"] = "\u00e9"
        del index["weight_map"]["model.norm.weight"]  # the tensor is in its file all the same
        (directory / INDEX).write_text(json.dumps(index))
    config = config_of(directory)
    (directory / "config.json").write_text(json.dumps({"zzz": 1e-05, **config}, indent=7) + "\n\n")
    (directory / "README.md").write_bytes(CARD)
    (directory / "code").mkdir()
    (directory / "code" / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def in_formats(source, tmp_path_factory):
    """An output in each format, below one directory."""
    out = tmp_path_factory.mktemp("calibrated") / "out"
    return apply_cases.calibrated(source, out, *(f"--format={name}" for name in FORMATS))


def output_of(*command):
    ran(*command)
    return Path(command[command.index("-o") + 1])


def test_strip_gives_back_every_file_also_after_other_commands_and_in_place(source, in_formats, tmp_path):
    for name in FORMS:
        back = output_of("strip", in_formats / name, "-o", tmp_path / name / "back")
        assert contents(back) == contents(source), name
        there = output_of("convert", in_formats / "vllm", "--to", name, "-o", tmp_path / name / "there")
        again = output_of("convert", there, "--to", "vllm", "-o", tmp_path / name / "again")
        for step in (there, again):
            back = output_of("strip", step, "-o", tmp_path / name / f"{step.name}-back")
            assert contents(back) == contents(source), name
    statistics, own = in_formats / "vllm", shutil.copytree(source, tmp_path / "own")
    repaired = output_of("repair", statistics, "--stats", statistics, "-o", tmp_path / "repaired")
    twice = apply_cases.calibrated(in_formats / "tgi", tmp_path / "twice")
    for seed in (1, 2):
        succeeded(calibrate(own, "--in-place", "--seed", seed))
    for out in (repaired, twice, own):
        assert contents(output_of("strip", out, "-o", tmp_path / f"{out.name}-back")) == contents(source)


def test_what_was_edited_since_stays_and_an_older_version_keeps_no_false_card(source, in_formats, tmp_path):
    edited, old = (shutil.copytree(in_formats / name, tmp_path / name) for name in ("vllm", "tgi"))
    edit_json(edited / "config.json", rope_theta=5.0)
    back = output_of("strip", edited, "-o", tmp_path / "back")
    assert config_of(back) == {**config_of(source), "rope_theta": 5.0}
    shutil.rmtree(old / "fp8kv_source")
    assert not (output_of("strip", old, "-o", tmp_path / "old-back") / "README.md").exists()
    card = (output_of("convert", old, "--to", "vllm", "-o", tmp_path / "new") / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert "Format `tgi`" not in card


def test_a_conversions_card_is_its_own_and_then_the_models(source, in_formats, tmp_path):
    for to in (*FORMS, "json"):
        out = output_of("convert", in_formats / "tgi", "--to", to, "-o", tmp_path / to)
        card = (out / "README.md").read_bytes()
        assert b"Format `%b` for" % to.encode() in card
        assert b"Format `tgi`" not in card or to == "tgi"
        assert str(in_formats).encode() not in card
        assert str(out).encode() in card or not FORMATS[to].serve
        with_weights = FORMATS[to].with_weights
        assert card.startswith(b"---\nlicense: mit\n---\n") == with_weights
        assert card.count(b"<h1>A model</h1>") == with_weights
        assert (b"The weights are those of the source, bit for bit" in card) == with_weights
        assert (b"No weights are here" in card) == (b"bit for bit" not in card) == (not with_weights)
    # a conversion is an earlier output of ours
    output_of("convert", in_formats / "tgi", "--to", "json", "-o", tmp_path / "vllm", "--overwrite")
    done = calibrate(source, "-o", tmp_path / "bare", "--weights", "none", "--format", "tgi")
    promise = "put the source's weight files beside these"
    assert promise in done.stdout
    for output, said in ((tmp_path / "bare", promise), (in_formats / "json", ""), (in_formats / "fp8kv", "")):
        card = (output / "README.md").read_text(errors="replace")
        assert "No weights are here" in card
        assert said in card
        assert "bit for bit" not in card


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*-*/*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_the_output_of_another_tool_loses_its_scales_alone(path, tmp_path):
    directory = shutil.copytree(path, tmp_path / "theirs")
    (directory / "README.md").write_bytes(CARD)
    back = output_of("strip", directory, "-o", tmp_path / "back")
    one_line_error(fp8kv("inspect", back), "holds no KV-cache scales")
    assert (back / "README.md").read_bytes() == CARD
    assert not (back / INDEX).exists()
    if "llmcompressor" in path.parent.name:
        assert "quantization_config" not in config_of(back)
    if path.match("nvidia-modelopt-*/fp8-kv"):  # what says that weights are quantised stays
        was, now = (json.loads((d / "hf_quant_config.json").read_text()) for d in (path, back))
        assert was["quantization"].pop("kv_cache_quant_algo") == "FP8"
        assert now == was
    there = output_of("convert", directory, "--to", "vllm", "-o", tmp_path / "there", "--without-q")
    assert contents(output_of("strip", there, "-o", tmp_path / "again")) == contents(back)
