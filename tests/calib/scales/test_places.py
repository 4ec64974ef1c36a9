"""Where the largest values were: buckets of tokens, runs one after the other, and `fp8kv inspect`."""

import json
import random
import re
import shutil

import pytest
import torch
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import LATENT, save_model, tiny_model
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.names import STATS_FILE
from calib.scales.places import BUCKETS, POSITION_BUCKETS, bucket_of, first_of, middle_of, read_places
from calib.scales.plot import draw_growth
from calib.scales.stats import KVStats, LayerStats, TensorStats, bucket_indices
from calib.scales.stats_file import load_stats


def test_buckets_are_powers_of_two():
    for bucket, tokens in {0: [0], 1: [1, 2], 2: [3, 4, 5, 6], 5: [*range(31, 63)]}.items():
        assert [i for i in range(100) if bucket_of(i) == bucket] == tokens
        assert first_of(bucket) == tokens[0]
    edges = [2**b - 1 + d for b in range(1, BUCKETS) for d in (-1, 0, 1)]  # exact to the last of many tokens
    assert bucket_indices(torch.tensor(edges)).tolist() == [bucket_of(i) for i in edges]
    for read in (1024, 1400, 1500, 2047, 2048, 3000, 10**6, 3 * 10**9):
        assert 0.29 < first_of(middle_of(read)) / read < 0.71, read  # nearest of powers of two: 1 / sqrt(8)


def run(values, read=None):
    """Statistics of one layer of one head that saw `values`, token by token."""
    curve, positions = torch.zeros(1, BUCKETS), torch.zeros(1, POSITION_BUCKETS)
    for i, value in enumerate(values):
        curve[0, bucket_of(i)] = max(value, curve[0, bucket_of(i)])
    positions[0, 0] = max(values)
    k = TensorStats(torch.tensor([[max(values)]]), curve=curve, positions=positions)
    tokens = len(values)
    return KVStats({"a": LayerStats(0, tokens, k, k, TensorStats(k.amax), read=read or tokens)})


def reached(stats):
    return stats.layers["a"].k.curve[0].cummax(0).values.tolist()


def test_a_second_run_comes_after_the_first():
    joined = run([1.0] * 5).join(run([2.0, 1.0, 3.0]))
    # tokens 5; 6 and 7: of the last two nobody knows which was the largest
    assert reached(joined)[:5] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert (joined.tokens, joined.layers["a"].tokens_read) == (8, 8)
    assert reached(run([2.0, 1.0, 3.0]).join(run([1.0] * 5)))[:4] == [2.0, 3.0, 3.0, 3.0]
    # tokens that no statistic counts were read nevertheless
    joined = run([1.0] * 5, read=100).join(run([2.0]))
    assert joined.layers["a"].k.curve[0].nonzero().flatten().tolist() == [0, 1, 2, bucket_of(100)]
    assert (joined.tokens, joined.layers["a"].tokens_read) == (6, 101)
    rng = random.Random(0)  # a joined curve is never above that of one run, and ends with it
    for _ in range(5):
        one, two = ([float(rng.randint(1, 9999)) for _ in range(rng.randint(1, 300))] for _ in "ab")
        joined, whole = reached(run(one).join(run(two))), reached(run(one + two))
        assert all(x <= y for x, y in zip(joined, whole, strict=True))
        assert joined[bucket_of(len(one + two) - 1)] == joined[-1] == whole[-1]
    with pytest.raises(InputError, match="of different models"):
        run([1.0]).join(KVStats({"b": run([1.0]).layers["a"]}))


def test_parts_of_one_run_and_of_a_latent_keep_their_places_if_both_know_them():
    merged = run([5.0, 1.0, 2.0]).merge(run([1.0, 7.0, 1.0, 9.0]))
    assert merged.layers["a"].k.curve[0, :3].tolist() == [5.0, 7.0, 9.0]
    one, other = (run(values).layers["a"].k for values in ([3.0, 1.0], [2.0, 5.0]))
    both = LayerStats(0, 2, one, other, one, latent=True).join_latent()
    assert (both.curve[0, :2].tolist(), both.positions[0, 0]) == ([3.0, 5.0], 5.0)
    plain = TensorStats(torch.tensor([[2.0]]))
    old = KVStats({"a": LayerStats(0, 3, plain, plain, plain)})
    for combined in (run([1.0]).join(old), old.join(run([1.0])), old.merge(run([1.0]))):
        layer = combined.layers["a"]
        assert layer.k.curve is layer.v.positions is None
        assert (layer.tokens, layer.tokens_read, layer.k.amax.item()) == (4, 4, 2.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("measured")
    model = save_model(tiny_model("llama", num_hidden_layers=2), directory / "tiny")
    for name, flags in {"out": ("--weights", "none"), "alone": ("--format", "fp8kv")}.items():
        succeeded(calibrate(model, "-o", directory / name, *flags))
    return directory / "out"


def panels(directory, picture):
    assert fp8kv("inspect", directory, "--plot", picture).exit_code == 0
    return len(re.findall('id="axes_[0-9]+"', picture.read_text()))


def test_places_are_those_of_the_statistics(measured, tmp_path):
    places, stats = read_places(measured), load_stats(measured)
    assert places == stats.places()
    for found, layer in zip(places, stats.layers.values(), strict=True):
        assert (found.layer, found.read) == (layer.layer_idx, stats.tokens)
        growth = found.k.growth(found.read)
        assert growth[-1] == (stats.tokens, layer.k.amax.max().item())
        assert [at for at, _ in growth[:4]] == [1, 3, 7, 15]
        assert growth == sorted(growth)
    latent = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "latent")
    succeeded(calibrate(latent, "-o", tmp_path / "out", "--format", "fp8kv"))
    assert read_places(tmp_path / "out") == load_stats(tmp_path / "out").places() != []


def test_inspect_shows_first_tokens_and_growth(measured, tmp_path):
    found = json_of("inspect", measured)["first_tokens"]
    for shown, layer in zip(found, load_stats(measured).layers.values(), strict=True):
        assert shown["layer"] == layer.layer_idx
        for letter in "kv":
            first, second, *rest = getattr(layer, letter).positions.amax(0).tolist()
            largest = {"position_0": first, "positions_1_2": second, "rest": max(rest)}
            assert shown[letter] == largest | {"scale_without_first": max(second, *rest) / 448}
    printed = fp8kv("inspect", measured).stdout
    assert "amax by position in the sample" in printed
    row = [f"{figure:.4g}" for figure in found[0]["k"].values()]
    assert re.search(r"0 [│|] +" + r" +[│|] +".join(map(re.escape, row)), printed)
    plain = shutil.copytree(measured, tmp_path / "plain", ignore=shutil.ignore_patterns(STATS_FILE))
    assert (panels(measured, tmp_path / "2.svg"), panels(plain, tmp_path / "1.svg")) == (2, 1)
    # growth is drawn as a share of the last, with the median
    axes, zeros = Figure().subplots(), [(1, 0.0), (3, 0.0)]
    draw_growth(axes, {"k": [[(1, 2.0), (3, 4.0)], [(1, 1.0), (3, 4.0)], zeros]}, {"k": "C0"})
    assert [[*line.get_ydata()] for line in axes.lines] == [[0.5, 1], [0.25, 1], [0.375, 1]]
    assert [[*line.get_xdata()] for line in axes.lines] == [[1, 3]] * 3


def test_positions_that_no_sample_has_are_no_zeros(measured, tmp_path):
    for skipped, unseen in ((0, ["rest"]), (1, ["position_0", "rest"])):
        out = tmp_path / f"out{skipped}"
        text = ("--dataset", "random", "--samples", 80, "--seq-len", 3, "--device", "cpu")
        text += ("--set", f"data.skip_first={skipped}", "--format", "fp8kv")
        ran("calibrate", measured.with_name("tiny"), "-o", out, *text)
        for layer in json_of("inspect", out)["first_tokens"]:
            for letter in "kv":
                assert [key for key, value in layer[letter].items() if value is None] == unseen
                assert all(value != 0 for value in layer[letter].values())
        row = re.search("^.*[│|] +0 +[│|](.*)$", fp8kv("inspect", out).stdout, re.MULTILINE)[1]
        assert [cell.strip() for cell in re.split("[│|]", row)].count("-") == 2 * len(unseen)


def test_statistics_without_scales_are_shown(measured, tmp_path):
    alone = measured.with_name("alone")
    shown, beside = (fp8kv("inspect", each).stdout for each in (alone, measured))
    assert shown.startswith("statistics, and no scales in the form of an engine\n")
    assert "K scale" not in shown
    beside = beside.partition("problem: ")[0]  # there are no weights
    assert shown.partition("amax by")[2] == beside.partition("amax by")[2] != ""
    said, same = (json_of("inspect", each) for each in (alone, measured))
    assert said["first_tokens"] == same["first_tokens"] != []
    assert said.keys() == same.keys()
    assert (said["strategy"], said["layers"], said["problems"]) == (None, [], [])
    assert panels(alone, tmp_path / "grown.svg") == 1
    nan = damaged(alone, tmp_path / "nan", **DAMAGE["NaN"])
    one_line_error(fp8kv("inspect", nan), STATS_FILE, "is damaged")
    none = damaged(alone, tmp_path / "none", {})
    one_line_error(fp8kv("inspect", none), "of a version that this fp8kv reads")


DAMAGE = {
    "a short curve": {"curve": torch.ones(2, 3)},
    "NaN": {"curve": torch.full((2, 48), float("nan"))},
    "below zero": {"positions": torch.full((2, 24), -1.0)},
    "flat": {"curve": torch.ones(96)},
    "another amax": {"amax": torch.ones(2, 8)},
}


def damaged(measured, out, facts=None, **changes):
    shutil.copytree(measured, out)
    tensors = load_file(out / STATS_FILE)
    tensors |= {f"model.layers.1.self_attn.k.{field}": value for field, value in changes.items()}
    modules = {name.rsplit(".", 2)[0]: {"layer_idx": 0, "tokens": 3, "read": 3} for name in tensors}
    facts = json.dumps({"modules": modules} if facts is None else facts)
    (out / STATS_FILE).unlink()
    save_file(tensors, out / STATS_FILE, {"fp8kv_stats": facts})
    return out


@pytest.mark.parametrize("changes", DAMAGE.values(), ids=DAMAGE)
def test_damaged_places_are_one_line_beside_the_scales(changes, measured, tmp_path):
    directory = damaged(measured, tmp_path / "out", **changes)
    with pytest.raises(InputError, match="is damaged"):
        read_places(directory)
    done = ran("inspect", directory)
    (problem,) = [line for line in done.stdout.splitlines() if STATS_FILE in line]
    assert problem.startswith("problem: ")
    assert "amax by position" not in done.stdout


def test_modules_need_their_facts_to_have_places(measured, tmp_path):
    for i, facts in enumerate(({}, {"modules": []}, {"modules": {"other": {}}})):
        assert read_places(damaged(measured, tmp_path / f"none-{i}", facts)) == []
    for i, module in enumerate((None, {"layer_idx": 0}, {"layer_idx": 0, "tokens": 3, "read": 2})):
        facts = {"modules": {"model.layers.0.self_attn": module}}
        with pytest.raises(InputError, match="is damaged .model.layers.0.self_attn: "):
            read_places(damaged(measured, tmp_path / f"{i}", facts))
