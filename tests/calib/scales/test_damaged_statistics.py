"""Commands that read statistics refuse damaged ones in one sentence, and say of few tokens."""

import json
import shutil

import pytest
from command_line import SMALL, fp8kv, one_line_error
from families import save_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

STATS, REPORT = "fp8kv_stats.safetensors", "fp8kv_calibration.json"
K = "model.layers.1.self_attn.k."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, two calibrations of it, and one of eight tokens."""
    root = tmp_path_factory.mktemp("made")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    short = ("--samples", "1", "--seq-len", "8", "--allow-few-tokens")
    for name, flags in {"one": (), "other": ("--seed", "7"), "few": short}.items():
        done = fp8kv("calibrate", model, "-o", root / name, *SMALL, *flags)
        assert done.exit_code == 0, done.stderr
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


def with_tensor(change):
    def damage(directory):
        with safe_open(directory / STATS, "pt") as file:
            facts = file.metadata()
        tensors = load_file(directory / STATS)
        save_file(tensors | change(tensors), directory / STATS, facts)

    return damage


def without_metadata(directory):
    save_file(load_file(directory / STATS), directory / STATS)


def with_report(change):
    def damage(directory):
        file = directory / REPORT
        file.write_text(change(file.read_text()))

    return damage


def one_value(value):
    """A channel of K of one head, in its amax and wherever that is repeated."""

    def change(tensors):
        found = {name: tensors[name].clone() for name in (f"{K}amax", f"{K}curve", f"{K}tail")}
        for tensor in found.values():
            tensor[0, tensor[0].argmax()] = value
        return found

    return change


DAMAGE = {
    "no metadata": (without_metadata, "is not a fp8kv_stats.safetensors of a version"),
    "negative": (with_tensor(lambda t: {f"{K}amax": -t[f"{K}amax"]}), "amax is below zero"),
    "a channel is negative": (with_tensor(one_value(-1.0)), "amax is below zero"),
    "of another run": (
        lambda directory: shutil.copy(directory.parent / "other" / STATS, directory / STATS),
        f"are not those that its {REPORT} sums up",
    ),
    "another amax": (
        with_tensor(lambda t: {f"{K}amax": 2 * t[f"{K}amax"]}),
        "the largest of curve is not the amax of its head",
    ),
    "a truncated report": (with_report(lambda text: text[:200]), "is not JSON"),
    "an empty report": (with_report(lambda text: ""), "is not JSON"),
    "a report in a list": (with_report(lambda text: f"[{text}]"), "must hold a JSON object"),
    "a report of nothing": (with_report(lambda text: "{}"), "is not of this version"),
    "layers of strings": (
        with_report(lambda text: json.dumps(json.loads(text) | {"layers": ["a"]})),
        "does not say what was calibrated",
    ),
}  # fmt: skip
NAMES = ["verify", "repair", "apply", "pack", "merge", "bake", "eval"]


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_damaged_statistics_are_one_sentence(name, damage, message, made, tmp_path):
    shutil.copytree(made / "other", tmp_path / "other")
    stats = shutil.copytree(made / "one", tmp_path / "stats")
    damage(stats)
    done = fp8kv(*commands(made, stats, tmp_path / "out")[name])
    one_line_error(done, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_nan_is_one_sentence(name, value, made, tmp_path):
    stats = shutil.copytree(made / "one", tmp_path / "stats")
    tensors = load_file(stats / STATS)
    for field in ("amax", "curve", "positions", "tail"):
        each = tensors[f"{K}{field}"]
        each[0, each[0].argmax()] = value
    with safe_open(stats / STATS, "pt") as file:
        facts = file.metadata()
    save_file(tensors, stats / STATS, facts)
    done = fp8kv(*commands(made, stats, tmp_path / "out")[name])
    one_line_error(done, "model.layers.1.self_attn K: NaN or Inf was seen")


@pytest.mark.parametrize("name", ["verify", "repair", "apply", "merge", "bake"])
def test_few_tokens_are_said(name, made, tmp_path):
    done = fp8kv(*commands(made, made / "few", tmp_path / "out")[name])
    said = " ".join((done.stdout + done.stderr).split())
    assert "different tokens occur among the" in said or name == "merge"
    assert f"only {8 + 128 * (name == 'merge')} tokens were read, too few to tell" in said
    assert done.exit_code in (0, 1)
