"""Damaged calibrations are one sentence, from every command that reads one; few tokens are said."""

import json
import shutil

import pytest
from command_line import SMALL, fp8kv, one_line_error, ran
from families import save_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.scales.stats_file import open_calibration

STATS, REPORT = "fp8kv_stats.safetensors", "fp8kv_calibration.json"
K = "model.layers.1.self_attn.k."
NAN = "model.layers.1.self_attn K: NaN or Inf was seen"
NOT_SUMMED_UP = f"are not those that its {REPORT} sums up"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, two calibrations of it, and one of eight tokens."""
    root = tmp_path_factory.mktemp("made")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    short = ("--samples", "1", "--seq-len", "8", "--allow-few-tokens")
    for name, flags in {"one": (), "other": ("--seed", "7"), "few": short}.items():
        ran("calibrate", model, "-o", root / name, *SMALL, *flags)
    return root


def commands(made, stats, out):
    """Each command that reads statistics, with those in `stats`."""
    return {
        "verify": ("verify", made / "one", "--against", stats),
        "repair": ("repair", made / "one", "--stats", stats, "-o", out),
        "apply": ("apply", stats, made / "model", "-o", out),
        "pack": ("pack", stats, "-o", out),
        "merge": ("merge", stats, made / "other", "-o", out),
        "bake": ("bake", made / "model", "--scales", stats, "--for", "fp8", "-o", out),
        "eval": (
            *("eval", made / "model", "--scales", stats, "-o", out, "--dataset", "random"),
            *("--samples", "2", "--seq-len", "32", "--device", "cpu"),
        ),
    }


def without_metadata(directory):
    save_file(load_file(directory / STATS), directory / STATS)


def of_another_run(directory):
    shutil.copy(directory.parent / "other" / STATS, directory / STATS)


def channel(value, *more):
    """Put `value` into a channel of K, in its amax and wherever that is repeated."""

    def damage(directory):
        with safe_open(directory / STATS, "pt") as file:
            facts = file.metadata()
        tensors = load_file(directory / STATS)
        for field in ("amax", "curve", "tail", *more):
            tensor = tensors[f"{K}{field}"]
            tensor[0, tensor[0].argmax()] = value
        save_file(tensors, directory / STATS, facts)

    return damage


def report(change):
    def damage(directory):
        file = directory / REPORT
        file.write_text(change(file.read_text()))

    return damage


DAMAGE = {
    "no metadata": (without_metadata, "is not a fp8kv_stats.safetensors of a version"),
    "a channel is negative": (channel(-1.0), "amax is below zero"),
    "an infinite channel": (channel(float("inf"), "positions"), NAN),
    "NaN": (channel(float("nan"), "positions"), NAN),
    "of another run": (of_another_run, NOT_SUMMED_UP),
    "a truncated report": (report(lambda text: text[:200]), "is not JSON"),
    "a report in a list": (report(lambda text: f"[{text}]"), "must hold a JSON object"),
    "a report of nothing": (report(lambda text: "{}"), "is not of this version"),
    "layers of strings": (
        report(lambda text: json.dumps(json.loads(text) | {"layers": ["a"]})),
        "does not say what was calibrated",
    ),
}


@pytest.fixture
def stats(made, tmp_path):
    shutil.copytree(made / "other", tmp_path / "other")
    return shutil.copytree(made / "one", tmp_path / "stats")


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_calibration_is_one_sentence(damage, message, stats):
    damage(stats)
    with pytest.raises(InputError, match=message) as caught:
        assert open_calibration(stats).stats
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["verify", "repair", "apply", "pack", "merge", "bake", "eval"])
def test_every_command_refuses_it(name, made, stats, tmp_path):
    for damage in ("of another run", "NaN"):
        change, message = DAMAGE[damage]
        change(stats)
        done = fp8kv(*commands(made, stats, tmp_path / "out")[name])
        one_line_error(done, message)
        assert not (tmp_path / "out").exists()
        shutil.copy(made / "one" / STATS, stats)
    (stats / REPORT).write_text("")
    one_line_error(fp8kv(*commands(made, stats, tmp_path / "out")[name]), "is not JSON")


@pytest.mark.parametrize("name", ["verify", "repair", "apply", "merge", "bake"])
def test_few_tokens_are_said(name, made, tmp_path):
    done = fp8kv(*commands(made, made / "few", tmp_path / "out")[name])
    said = " ".join((done.stdout + done.stderr).split())
    assert "different tokens occur among the" in said or name == "merge"
    assert f"only {8 + 128 * (name == 'merge')} tokens were read, too few to tell" in said
    assert done.exit_code in (0, 1)
