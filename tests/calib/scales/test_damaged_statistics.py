"""Damaged calibrations are one sentence, from every command that reads one."""

import shutil

import pytest
from command_line import SMALL, fp8kv, one_line_error, ran
from families import edit_json, save_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.scales.stats_file import open_calibration

STATS, REPORT, K = "fp8kv_stats.safetensors", "fp8kv_calibration.json", "model.layers.1.self_attn.k."
NAN = "model.layers.1.self_attn K: NaN or Inf was seen"
NOT_SUMMED_UP = f"are not those that its {REPORT} sums up"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    for name, seed in {"one": 0, "other": 7}.items():
        ran("calibrate", model, "-o", root / name, *SMALL, "--seed", seed)
    return root


def channel(value):
    """Put `value` into a channel of K, in its amax and wherever that is repeated."""

    def damage(directory):
        with safe_open(directory / STATS, "pt") as file:
            facts = file.metadata()
        tensors = load_file(directory / STATS)
        for field in ("amax", "curve", "tail", "positions"):
            tensor = tensors[f"{K}{field}"]
            tensor[0, tensor[0].argmax()] = value
        save_file(tensors, directory / STATS, facts)

    return damage


def report(text):
    return lambda directory: (directory / REPORT).write_text(text)


def edited(**changes):
    return lambda directory: edit_json(directory / REPORT, **changes)


DAMAGE = {
    "an infinite channel": (channel(float("inf")), NAN),
    "NaN": (channel(float("nan")), NAN),
    "of another run": (lambda path: shutil.copy(path.parent / "other" / STATS, path), NOT_SUMMED_UP),
    "no report": (report(""), "is not JSON"),
    "a report in a list": (report("[{}]"), "must hold a JSON object"),
    "a report of nothing": (report("{}"), "is not of this version"),
    "layers of strings": (edited(layers=["a"]), "does not say what was calibrated"),
    "another version": (edited(fp8kv_calibration=2), "not of this version of fp8kv"),
    "no checkpoint": (edited(measured_on={"model": "m"}), r"calibrated \(measured_on.checkpoint: "),
    "one warning": (edited(warnings="none"), r"what was calibrated \(warnings: "),
    "no source": (edited(dataset={}), r"what was calibrated \(dataset.source: "),
}


@pytest.fixture
def stats(made, tmp_path):
    shutil.copytree(made / "other", tmp_path / "other")
    return shutil.copytree(made / "one", tmp_path / "stats")


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_calibration_is_one_sentence(damage, message, stats):
    damage(stats)
    with pytest.raises(InputError, match=message):
        assert open_calibration(stats).stats


def test_every_command_refuses_it(made, stats, tmp_path):
    for command in (
        "verify ONE --against STATS",
        "repair ONE --stats STATS -o OUT",
        "apply STATS MODEL -o OUT",
        "pack STATS -o OUT",
        "merge STATS OTHER -o OUT",
        "bake MODEL --scales STATS --for fp8 -o OUT",
        "eval MODEL --scales STATS -o OUT --dataset random --samples 2 --seq-len 32 --device cpu",
    ):
        places = {"STATS": stats, "OUT": tmp_path / "out"}
        places |= {name.upper(): made / name for name in ("one", "other", "model")}
        for name in ("of another run", "NaN", "no report"):
            damage, message = DAMAGE[name]
            damage(stats)
            one_line_error(fp8kv(*[places.get(word, word) for word in command.split()]), message)
            assert not (tmp_path / "out").exists()
            shutil.copytree(made / "one", stats, dirs_exist_ok=True)
