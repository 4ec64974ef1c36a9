"""Where the largest values were, read without torch, as `fp8kv inspect` shows it."""

import json
import re

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from families import LATENT, save_model, tiny_model
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.names import STATS_FILE
from calib.scales.places import read_places
from calib.scales.stats_file import load_stats


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("measured")
    model = save_model(tiny_model("llama"), directory / "tiny")
    done = calibrate(model, "-o", directory / "out", "--weights", "none")
    assert done.exit_code == 0, done.stderr
    return directory / "out"


def test_places_are_those_of_the_statistics(measured):
    places, stats = read_places(measured), load_stats(measured)
    assert places == stats.places()
    for found, layer in zip(places, stats.layers.values(), strict=True):
        assert (found.layer, found.read) == (layer.layer_idx, stats.tokens)
        growth = found.k.growth(found.read)
        assert growth[-1] == (stats.tokens, layer.k.amax.max().item())
        assert [at for at, _ in growth[:4]] == [1, 3, 7, 15]
        assert growth == sorted(growth)


def test_of_latents_too(tmp_path):
    model = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "tiny")
    done = calibrate(model, "-o", tmp_path / "out", "--format", "fp8kv")
    assert done.exit_code == 0, done.stderr
    assert read_places(tmp_path / "out") == load_stats(tmp_path / "out").places() != []


def test_inspect_shows_first_tokens(measured):
    found = json.loads(fp8kv("inspect", measured, "--json").stdout)["first_tokens"]
    for shown, layer in zip(found, load_stats(measured).layers.values(), strict=True):
        assert shown["layer"] == layer.layer_idx
        for letter in "kv":
            positions = getattr(layer, letter).positions.amax(0)
            first, second, *rest = positions.tolist()
            assert shown[letter] == {
                "position_0": first,
                "positions_1_2": second,
                "rest": max(rest),
                "scale_without_first": max(second, *rest) / 448,
            }
    printed = fp8kv("inspect", measured).stdout
    assert "amax by position in the sample" in printed
    first = found[0]["k"]
    row = [f"{first[name]:.4g}" for name in first]
    assert re.search(r"0 [│|] +" + r" +[│|] +".join(map(re.escape, row)), printed)


def test_positions_that_no_sample_has_are_no_zeros(tmp_path):
    model = save_model(tiny_model("llama"), tmp_path / "model")
    for skipped, unseen in ((0, ["rest"]), (1, ["position_0", "rest"])):
        out = tmp_path / f"out{skipped}"
        text = ("--dataset", "random", "--samples", 80, "--seq-len", 3, "--device", "cpu")
        text += ("--set", f"data.skip_first={skipped}")
        done = fp8kv("calibrate", model, "-o", out, "--format", "fp8kv", *text)
        assert done.exit_code == 0, done.stderr
        for layer in json.loads(fp8kv("inspect", out, "--json").stdout)["first_tokens"]:
            for letter in "kv":
                assert [key for key, value in layer[letter].items() if value is None] == unseen
                assert all(value != 0 for value in layer[letter].values())
        row = re.search("^.*[│|] +0 +[│|](.*)$", fp8kv("inspect", out).stdout, re.MULTILINE)[1]
        assert [cell.strip() for cell in re.split("[│|]", row)].count("-") == 2 * len(unseen)


def test_the_picture_has_a_second_panel(measured, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in measured.iterdir():
        if file.is_file() and file.name != STATS_FILE:
            (plain / file.name).write_bytes(file.read_bytes())
    for name, panels in ((measured, 2), (plain, 1)):
        picture = tmp_path / f"{panels}.svg"
        assert fp8kv("inspect", name, "--plot", picture).exit_code == 0
        assert len(re.findall('id="axes_[0-9]+"', picture.read_text())) == panels


@pytest.fixture(scope="module")
def statistics_alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("statistics")
    model = save_model(tiny_model("llama"), directory / "tiny")
    done = calibrate(model, "-o", directory / "out", "--format", "fp8kv")
    assert done.exit_code == 0, done.stderr
    return directory / "out"


def test_statistics_without_scales_are_shown(statistics_alone, measured, tmp_path):
    shown, beside = (fp8kv("inspect", each).stdout for each in (statistics_alone, measured))
    assert shown.startswith("statistics, and no scales in the form of an engine\n")
    assert "K scale" not in shown
    title = "amax by position in the sample"
    beside = beside.partition("problem: ")[0]  # there are no weights
    assert shown[shown.index(title) :] == beside[beside.index(title) :]
    said, same = (
        json.loads(fp8kv("inspect", each, "--json").stdout) for each in (statistics_alone, measured)
    )
    assert said["first_tokens"] == same["first_tokens"] != []
    assert said.keys() == same.keys()
    assert (said["strategy"], said["layers"], said["problems"]) == (None, [], [])
    picture = tmp_path / "grown.svg"
    assert fp8kv("inspect", statistics_alone, "--plot", picture).exit_code == 0
    assert len(re.findall('id="axes_[0-9]+"', picture.read_text())) == 1


def test_statistics_without_scales_and_without_places_are_refused(statistics_alone, tmp_path):
    damaged(statistics_alone, tmp_path, {})
    one_line_error(fp8kv("inspect", tmp_path), "holds a calibration and no model")


def test_damaged_statistics_without_scales_are_one_line(statistics_alone, tmp_path):
    damaged(statistics_alone, tmp_path, **DAMAGE["NaN"])
    one_line_error(fp8kv("inspect", tmp_path), STATS_FILE, "is damaged")


DAMAGE = {
    "a short curve": {"curve": torch.ones(2, 3)},
    "NaN": {"curve": torch.full((2, 48), float("nan"))},
    "below zero": {"positions": torch.full((2, 24), -1.0)},
    "no heads": {"positions": torch.ones(0, 24)},
    "flat": {"curve": torch.ones(96)},
    "another amax": {"amax": torch.ones(2, 8)},
    "an amax without channels": {"amax": torch.ones(2, 0)},
    "other positions": {"positions": torch.ones(2, 24)},
}


def damaged(measured, out, facts=None, **changes):
    for file in measured.iterdir():
        if file.is_file():
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(out / STATS_FILE)
    for field, value in changes.items():
        tensors[f"model.layers.1.self_attn.k.{field}"] = value
    modules = {name.rsplit(".", 2)[0]: {"layer_idx": 0, "tokens": 3, "read": 3} for name in tensors}
    facts = json.dumps({"modules": modules} if facts is None else facts)
    (out / STATS_FILE).unlink()
    save_file(tensors, out / STATS_FILE, {"fp8kv_stats": facts})
    return out


@pytest.mark.parametrize("changes", DAMAGE.values(), ids=DAMAGE)
def test_damaged_places_are_one_line_beside_the_scales(changes, measured, tmp_path):
    directory = damaged(measured, tmp_path, **changes)
    with pytest.raises(InputError, match="is damaged"):
        read_places(directory)
    done = fp8kv("inspect", directory)
    assert done.exit_code == 0
    (problem,) = [line for line in done.stdout.splitlines() if STATS_FILE in line]
    assert problem.startswith("problem: ")
    assert "amax by position" not in done.stdout


@pytest.mark.parametrize("facts", [{}, {"modules": []}, {"modules": {"other": {}}}])
def test_statistics_that_name_no_module_with_places_have_none(facts, measured, tmp_path):
    assert read_places(damaged(measured, tmp_path, facts)) == []


@pytest.mark.parametrize(
    "module",
    [
        None,
        [],
        {"layer_idx": 0},
        {"layer_idx": 0, "tokens": 3, "read": "3"},
        {"layer_idx": -1, "tokens": 3, "read": 3},
        {"layer_idx": 0, "tokens": 3, "read": 2},
    ],
)
def test_modules_without_facts_are_refused(module, measured, tmp_path):
    facts = {"modules": {"model.layers.0.self_attn": module}}
    with pytest.raises(InputError, match="is damaged .model.layers.0.self_attn: "):
        read_places(damaged(measured, tmp_path, facts))
