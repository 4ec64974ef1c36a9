"""Statistics on disk: what is saved is loaded, damage is one sentence; where the largest values were."""

import json
import random
import re
import shutil
import string
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from command_line import SMALL, calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import LATENT, edit_json, save_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file

from calib.errors import InputError
from calib.files.names import STATS_FILE as STATS
from calib.files.names import WATCH_FILE
from calib.scales.observers import NUM_BINS
from calib.scales.places import BUCKETS, POSITION_BUCKETS, bucket_of, first_of, middle_of, read_places
from calib.scales.plot import draw_growth
from calib.scales.scales import SharedAttention
from calib.scales.stats import KVStats, LayerStats, TensorStats, bucket_indices
from calib.scales.stats_file import _digest, load_progress, load_stats, open_calibration, save_stats
from calib.scales.tail import TAIL
from calib.scales.text_summary import TextSummary

MODULE = {"layer_idx": 0, "tokens": 10, "read": 12}
FACTS = {"version": 2, "modules": {"a": MODULE}, "shared": {}, "progress": None}
OWNER = {"layer_idx": 1, "owner": "a"}
PLACES = {"curve": BUCKETS, "positions": POSITION_BUCKETS, "tail": TAIL}


ONE_EACH = torch.tensor([[0x3F80, 1]] * 2)  # ties: the bits of 1.0 in bfloat16, and one token of each head


def in_bucket(bucket, count, value=1.0, heads=2):
    """Nothing but `value`, in one bucket of every head."""
    held = torch.zeros(heads, count)
    held[:, bucket] = value
    return held


def tensors():
    """What one module has: K and V of two heads, Q of four, three channels."""
    found = {}
    for which, heads in (("k", 2), ("v", 2), ("q", 4)):
        for field in ("amax", "low", "high"):
            found[f"a.{which}.{field}"] = torch.ones(heads, 3)
        found[f"a.{which}.histogram"] = torch.ones(heads, NUM_BINS, dtype=torch.int64)
        found[f"a.{which}.total"] = torch.ones(heads, 3, dtype=torch.float64)
    for which in "kv":
        for bucket, (field, count) in zip((3, 1, 0), PLACES.items(), strict=True):
            found[f"a.{which}.{field}"] = in_bucket(bucket, count)
        found[f"a.{which}.ties"] = ONE_EACH.clone()
    return found


def load(path, facts=FACTS, changes=None):
    """Save a file with some tensors changed (None: missing) and load it."""
    held = tensors() | (changes or {})
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    text = facts if isinstance(facts, str) else json.dumps({"sha256": _digest(held)} | facts)
    save_file(held, path / STATS, {"fp8kv_stats": text})
    return load_progress(path / STATS)


def test_a_file_gives_back_what_was_saved(tmp_path):
    stats, progress = load(tmp_path, {**FACTS, "shared": {"b": OWNER}, "progress": {"run": {}, "batches": 3}})
    assert progress == {"run": {}, "batches": 3}
    save_stats(stats, tmp_path / STATS)
    loaded = load_stats(tmp_path)
    assert (loaded.tokens, loaded.layers["a"].tokens_read) == (10, 12)
    assert loaded.shared == {"b": SharedAttention(1, "a")}
    assert loaded.layers["a"].k.total.dtype == torch.float64
    assert loaded.layers["a"].k.curve.nonzero().tolist() == [[0, 3], [1, 3]]
    saved, found = stats.tensors(), loaded.tensors()
    assert (len(found), saved.keys()) == (len(tensors()), found.keys())
    assert all(torch.equal(tensor, found[place]) for place, tensor in saved.items())


def test_a_file_that_holds_no_statistics_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read statistics"):
        load_stats(tmp_path)
    with pytest.raises(InputError, match="does not exist; give a calibration's output$"):
        load_stats(tmp_path / "gone")
    stats, _ = load(tmp_path)
    file, whole = tmp_path / STATS, (tmp_path / STATS).read_bytes()
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    save_file(NOT_FINITE, file, {"fp8kv_stats": json.dumps(FACTS | {"sha256": _digest(NOT_FINITE)})})
    not_finite = file.read_bytes()
    for advice in ("calibrate again", "watch the engine again"):
        for content, said in (
            (b"junk", "is damaged or incomplete: it has 4 bytes, too few"),
            (whole[:20], "is damaged or incomplete: it has 20 bytes, and its header alone should have"),
            (whole[:-1], f"is cut short: it has {len(whole) - 1:,} of {len(whole):,} bytes"),
            (whole.replace(b'"F32"', b'"F33"'), "the header of .* is damaged: unknown type 'F33'"),
            (changed, "is damaged .a.v.tail is not in descending order."),
            (not_finite, "a K: NaN or Inf was seen"),
        ):
            file.write_bytes(content)
            with pytest.raises(InputError, match=f"{said}.*; {advice}$"):
                load_stats(tmp_path)
        (tmp_path / WATCH_FILE).touch()  # from here on these are an engine's traffic
    for place in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(InputError, match="it is a folder, or its folder is not there"):
            save_stats(stats, place)


def with_module(**changes):
    return {**FACTS, "modules": {"a": {**MODULE, **changes}}}


METADATA = {
    "deep nesting": "[" * 100_000,
    "another version": {**FACTS, "version": 1},
    "a version that only equals 1": {**FACTS, "version": True},
    "no module": {**FACTS, "modules": {}},
    "layer_idx true": with_module(layer_idx=True),
    "layer_idx negative": with_module(layer_idx=-1),
    "no tokens": with_module(tokens=0),
    "more tokens than count": with_module(tokens=2**47, read=None),
    "fewer tokens read than counted": with_module(read=9),
    "more tokens than two runs have buckets": with_module(read=2**47),
    "a name of two lines": {**FACTS, "modules": {"a\nb": None}},
    "no checksum": {**FACTS, "sha256": None},
    "another checksum": {**FACTS, "sha256": "0" * 64},
    "no number of tokens read": with_module(read=None),
    "an unknown owner": {**FACTS, "shared": {"b": {**OWNER, "owner": "c"}}},
    "batches negative": {**FACTS, "progress": {"run": {}, "batches": -1}},
    "a module without tensors": {**FACTS, "modules": {"a": MODULE, "b": MODULE}},
}
PLAIN = {"a.k.amax": torch.ones(2, 3), "a.v.amax": torch.ones(2, 3), "a.q.amax": torch.ones(4, 3)}
NOT_FINITE = PLAIN | {"a.k.amax": torch.full((2, 3), torch.nan)}
TENSORS = {
    "float64": {"a.v.amax": torch.ones(2, 3, dtype=torch.float64)},
    "flat": {"a.q.amax": torch.ones(12)},
    "no head": {"a.k.amax": torch.ones(0, 3)},
    "heads differ": dict.fromkeys(tensors()) | PLAIN | {"a.v.amax": torch.ones(4, 3)},
    "amax below zero": {"a.q.amax": -torch.ones(4, 3)},
    "a few bins": {"a.k.histogram": torch.ones(2, 3, dtype=torch.int64)},
    "extremes of more heads": {"a.k.low": torch.ones(4, 3)},
    "no lowest": {"a.k.low": None},
    "a curve of float64": {"a.k.curve": in_bucket(3, BUCKETS).double()},
    "a curve below zero": {"a.k.curve": in_bucket(3, BUCKETS) - in_bucket(2, BUCKETS)},
    "a curve above amax": {"a.k.curve": in_bucket(3, BUCKETS, 2.0)},
    "a curve that is NaN": {"a.v.curve": in_bucket(3, BUCKETS, float("nan"))},
    "no positions": {"a.v.positions": None},
    "a tail below amax": {"a.k.tail": in_bucket(0, TAIL, 0.5)},
    "a tail in ascending order": {"a.k.tail": in_bucket(TAIL - 1, TAIL)},
    "least above amax": {"a.k.least": torch.full((2, 1), 1.5)},
    "least below zero": {"a.v.least": -torch.ones(2, 1)},
    "ties of another value": {"a.k.ties": ONE_EACH + torch.tensor([1, 0])},
    "ties of no token": {"a.k.ties": ONE_EACH - torch.tensor([0, 1])},
    "ties of more tokens than were counted": {"a.v.ties": ONE_EACH + torch.tensor([0, 10])},
    "ties of int32": {"a.v.ties": ONE_EACH.int()},
    "places of K alone": {f"a.v.{field}": None for field in PLACES},
    "places of Q": {f"a.q.{field}": in_bucket(0, count, heads=4) for field, count in PLACES.items()},
    "a tensor of no module": {"c.k.amax": torch.ones(2, 3)},
    "a latent of two heads": dict.fromkeys(tensors())
    | {name.replace(".k.", ".latent.").replace(".v.", ".k_pe."): x for name, x in PLAIN.items()},
}
DAMAGE = {name: (facts, None) for name, facts in METADATA.items()}
DAMAGE |= {name: (FACTS, changes) for name, changes in TENSORS.items()}


@pytest.mark.parametrize(("facts", "changes"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_statistics_are_one_clear_error(facts, changes, tmp_path):
    with pytest.raises(InputError) as caught:
        load(tmp_path, facts, changes)
    message = str(caught.value)
    assert str(tmp_path / STATS) in message
    assert len(message) < 600


KEYS = st.sampled_from([*FACTS, *OWNER, "tokens", "a", "b", "run", "batches"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=3)
    | st.sampled_from(["a", MODULE, OWNER]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(KEYS, VALUES).map(lambda changes: {**FACTS, **changes}))
@settings(max_examples=150, deadline=None)
def test_any_metadata_is_statistics_or_one_clear_error(tmp_path_factory, facts):
    with suppress(InputError):
        stats, _ = load(tmp_path_factory.mktemp("fuzz"), facts)
        assert type(stats.layers["a"].layer_idx) is int


REPORT = "fp8kv_calibration.json"
NAN = "model.layers.1.self_attn K: NaN or Inf was seen"
NOT_SUMMED_UP = f"are not those that its {REPORT} sums up"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    model = save_model(tiny_model("llama", num_hidden_layers=2), root / "model")
    for name, *flags in (("one",), ("other", "--seed", 7), ("alone", "--format", "fp8kv")):
        ran("calibrate", model, "-o", root / name, *SMALL, *flags)
    return root


def channel(value):
    """Put `value` into a channel of K, in its amax and wherever that is repeated."""

    def damage(directory):
        stats, _ = load_progress(directory / STATS)
        for field in ("amax", "curve", "tail", "positions"):
            tensor = stats.tensors()["model.layers.1.self_attn", "k", field]
            tensor[0, tensor[0].argmax()] = value
        save_stats(stats, directory / STATS)

    return damage


def report(text):
    return lambda directory: (directory / REPORT).write_text(text)


def edited(**changes):
    return lambda directory: edit_json(directory / REPORT, **changes)


DAMAGED = {
    "an infinite channel": (channel(float("inf")), NAN),
    "NaN": (channel(float("nan")), NAN),
    "of another run": (lambda path: shutil.copy(path.parent / "other" / STATS, path), NOT_SUMMED_UP),
    "no report": (report(""), "is not JSON"),
    "a report in a list": (report("[{}]"), "must hold a JSON object"),
    "a report of nothing": (report("{}"), "is not of this version"),
    "layers of strings": (edited(layers=["a"]), "does not say what was calibrated"),
    "another version": (edited(fp8kv_calibration=2), "not of this version of fp8kv"),
    "no checkpoint": (edited(measured_on={"model": "m"}), r"calibrated \(measured_on.checkpoint: "),
    "no weights": (edited(measured_on={"model": "m", "checkpoint": "c"}), r"\(measured_on.weights: "),
    "threads in words": (edited(threads="two"), r"what was calibrated \(threads: "),
    "one warning": (edited(warnings="none"), r"what was calibrated \(warnings: "),
    "no source": (edited(dataset={}), r"what was calibrated \(dataset.source: "),
}


@pytest.fixture
def stats(made, tmp_path):
    shutil.copytree(made / "other", tmp_path / "other")
    return shutil.copytree(made / "one", tmp_path / "stats")


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
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
            damage, message = DAMAGED[name]
            damage(stats)
            one_line_error(fp8kv(*[places.get(word, word) for word in command.split()]), message)
            assert not (tmp_path / "out").exists()
            shutil.copytree(made / "one", stats, dirs_exist_ok=True)


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
    one, other, third = (replace(run([float(i)]), text=TextSummary.of([range(i, 99)])) for i in range(1, 4))
    joined, unknown = one.join(other), run([1.0, 2.0])
    for same in ((joined, one), (other, joined), (one.join(third), joined), (unknown, unknown)):
        with pytest.raises(InputError, match="of one text, which counts once"):
            same[0].join(same[1])
    assert joined.join(third).tokens == unknown.join(run([2.0, 2.0])).tokens - 1 == 3
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
def measured(made):
    return made / "one"


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
    assert printed.endswith(
        f"note: fp8kv verify {measured} compares the scales with the statistics beside them\n"
    )
    row = [f"{figure:.4g}" for figure in found[0]["k"].values()]
    assert re.search(r"0 [│|] +" + r" +[│|] +".join(map(re.escape, row)), printed)
    config = json.loads((shutil.copytree(measured, tmp_path / "fnuz") / "config.json").read_text())
    dtype = {"kv_cache_torch_dtype": "float8_e4m3fnuz"}
    (tmp_path / "fnuz" / "config.json").write_text(json.dumps(config | dtype))
    scale = json_of("inspect", tmp_path / "fnuz")["first_tokens"][0]["k"]["scale_without_first"]
    assert scale * 240 == pytest.approx(found[0]["k"]["scale_without_first"] * 448)
    assert "/ 448 without 0" in printed
    assert "/ 240 without 0" in fp8kv("inspect", tmp_path / "fnuz").stdout
    plain = shutil.copytree(measured, tmp_path / "plain", ignore=shutil.ignore_patterns(STATS))
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
        ran("calibrate", measured.with_name("model"), "-o", out, *text)
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
    beside = beside.partition("note: ")[0]
    assert shown.partition("amax by")[2] == beside.partition("amax by")[2] != ""
    said, same = (json_of("inspect", each) for each in (alone, measured))
    assert said["first_tokens"] == same["first_tokens"] != []
    assert said.keys() == same.keys()
    assert (said["strategy"], said["layers"], said["problems"]) == (None, [], [])
    assert panels(alone, tmp_path / "grown.svg") == 1
    nan = damaged(alone, tmp_path / "nan", **PLACES_DAMAGED["NaN"])
    one_line_error(fp8kv("inspect", nan), STATS, "is damaged")
    none = damaged(alone, tmp_path / "none", {})
    one_line_error(fp8kv("inspect", none), "of a version that this fp8kv reads")


PLACES_DAMAGED = {
    "a short curve": {"curve": torch.ones(2, 3)},
    "NaN": {"curve": torch.full((2, 48), float("nan"))},
    "below zero": {"positions": torch.full((2, 24), -1.0)},
    "flat": {"curve": torch.ones(96)},
    "another amax": {"amax": torch.ones(2, 8)},
}


def damaged(measured, out, facts=None, **changes):
    shutil.copytree(measured, out)
    tensors = load_file(out / STATS)
    tensors |= {f"model.layers.1.self_attn.k.{field}": value for field, value in changes.items()}
    modules = {name.rsplit(".", 2)[0]: {"layer_idx": 0, "tokens": 3, "read": 3} for name in tensors}
    facts = json.dumps({"modules": modules} if facts is None else facts)
    (out / STATS).unlink()
    save_file(tensors, out / STATS, {"fp8kv_stats": facts})
    return out


@pytest.mark.parametrize("changes", PLACES_DAMAGED.values(), ids=PLACES_DAMAGED)
def test_damaged_places_are_one_line_beside_the_scales(changes, measured, tmp_path):
    directory = damaged(measured, tmp_path / "out", **changes)
    with pytest.raises(InputError, match="is damaged"):
        read_places(directory)
    done = ran("inspect", directory)
    (problem,) = [line for line in done.stdout.splitlines() if STATS in line]
    assert problem.startswith("problem: ")
    assert "amax by position" not in done.stdout


def test_modules_need_their_facts_to_have_places(measured, tmp_path):
    for i, facts in enumerate(({}, {"modules": []}, {"modules": {"other": {}}})):
        assert read_places(damaged(measured, tmp_path / f"none-{i}", facts)) == []
    for i, module in enumerate((None, {"layer_idx": 0}, {"layer_idx": 0, "tokens": 3, "read": 2})):
        facts = {"modules": {"model.layers.0.self_attn": module}}
        with pytest.raises(InputError, match="is damaged .model.layers.0.self_attn: "):
            read_places(damaged(measured, tmp_path / f"{i}", facts))
