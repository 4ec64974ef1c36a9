"""What statistics contradict is mended by them, or it is said that it was not; merged runs are one run."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from apply_cases import ATTENTION, calibrated, config_of, copy, damage, edited, report_of, scales
from command_line import fp8kv, json_of, one_line_error, ran
from families import SHARED_KV, edit_json, save_model, tiny_model
from safetensors.torch import load_file

from calib.files.names import INDEX_FILE, STATS_FILE
from calib.scales.observers import AbsMax
from calib.scales.stats import PER_TOKEN, KVStats, TensorStats, shift_curve
from calib.scales.stats_file import load_records, load_stats, save_stats

LAYERS, SCALES, NAN = range(3), "model-fp8kv-scales.safetensors", float("nan")


def name(layer, letter):
    return f"model.layers.{layer}.self_attn.{letter}_scale"


def changed(source, out, change):
    """A copy of an output whose scales, by layer and letter, are those that `change` returns."""
    tensors = load_file(source / SCALES)
    before = {(i, x): tensors[name(i, x)] for i in LAYERS for x in "kvq" if name(i, x) in tensors}
    damage(source, out, {name(*at): torch.as_tensor(each) for at, each in change(before).items()})
    (out / STATS_FILE).unlink()  # which would say that scales were changed
    return out


def every(change):
    return lambda before: {at: change(scale) for at, scale in before.items()}


def some(**factors):
    """Multiply the scales of some layers: k1=0.5."""
    factors = {(int(at[1]), at[0]): torch.tensor(factor) for at, factor in factors.items()}
    return lambda before: {at: before[at].flatten() * factor for at, factor in factors.items()}


def repaired(broken, statistics, out, *flags):
    """Run `repair` and then `verify --against`; return what was replaced, and what was printed."""
    done = fp8kv("repair", broken, "--stats", statistics, "-o", out, *flags)
    assert done.exit_code in (0, 1), done.stderr
    found = re.findall(r"replaced: model\.layers\.(\d)\.self_attn (\w): ", done.stdout)
    verified = fp8kv("verify", out, "--against", statistics, "--engine", "vllm")
    assert verified.exit_code == done.exit_code, verified.stdout
    return {(int(layer), letter) for layer, letter in found}, done


ALL, QUERIES = [(i, x) for i in LAYERS for x in "kv"], [(i, "q") for i in LAYERS]
DAMAGE = {  # the change, and which scales are replaced
    "all 1.0": (every(torch.ones_like), ALL),
    "K and V are swapped": (lambda b: {(i, x): b[i, {"k": "v", "v": "k"}[x]] for i, x in b}, ALL),
    "1/scale": (every(lambda scale: 1 / scale), ALL),
    "halved": (every(lambda scale: scale / 2), ALL),
    "all far too large": (every(lambda scale: scale * 100), ALL),
    "a layer is far too small": (some(k1=1e-3), [(1, "k")]),
    "a layer is far too large": (some(v2=30.0), [(2, "v")]),
    "a layer becomes zeros": (some(v0=1e6), [(0, "v")]),
    "a layer is NaN": (some(k2=NAN), [(2, "k")]),
    "a layer is memory that nobody wrote": (some(k0=1e32), [(0, "k")]),
    "a layer is per head": (some(k1=[1.0, 1.0]), [(1, "k")]),
    "nothing": (lambda before: {}, []),
    "headroom": (every(lambda scale: scale * 1.5), []),
}
HEADS = {
    "a layer is per layer": (lambda b: {(1, "k"): b[1, "k"].amax()[None]}, [(1, "k")]),
    "a layer has other heads": (lambda b: {(2, "v"): b[2, "v"].flatten().repeat(2)}, [(2, "v")]),
    "a head is far too small": (some(k0=[1, 1e-3]), [(0, "k")]),
    "a head is far too large": (some(v0=[1e3, 1]), [(0, "v")]),
    "Q is 1/scale": (lambda b: {at: 1 / s for at, s in b.items() if at[1] == "q"}, QUERIES),
    "Q of a layer is zero": (some(q1=0.0), [(1, "q")]),
    "Q of a layer is per layer": (lambda b: {(1, "q"): b[1, "q"].amax()[None]}, [(1, "q")]),
    "all heads are 1.0": (every(torch.ones_like), [*ALL, *QUERIES]),
}


@pytest.mark.parametrize("damage", [*DAMAGE, *HEADS])
def test_what_contradicts_the_statistics_is_replaced_and_nothing_else(damage, measured, per_head, tmp_path):
    change, replaced = (DAMAGE | HEADS)[damage]
    good, out = per_head if damage in HEADS else measured, tmp_path / "out"
    broken = changed(good, tmp_path / "broken", change)
    was_good = fp8kv("verify", broken, "--against", good, "--engine", "vllm").exit_code == 0
    found, done = repaired(broken, good, out)
    assert done.exit_code == 0, done.stdout
    assert found == set(replaced)
    assert damage in HEADS or was_good <= (not replaced or replaced == [(2, "v")])  # < 1/16 is a warning
    for before, after, right in zip(*map(scales, (broken, out, good)), strict=True):
        for i, letter in enumerate("kvq", 1):
            assert after[i] == (right if (before[0], letter) in found else before)[i]


def test_scales_that_the_statistics_beside_them_refute_are_replaced(measured, tmp_path):
    broken = damage(measured, tmp_path / "broken", {name(0, "k"): scales(measured)[0][1][0] * 8})
    assert repaired(broken, measured, tmp_path / "out")[0] == {(0, "k")}
    assert scales(tmp_path / "out") == scales(measured)


def test_a_layer_that_shares_anothers_cache_is_judged_by_that(tmp_path):
    model = save_model(tiny_model("gemma3n_text", **SHARED_KV), tmp_path / "model")
    good = calibrated(model, tmp_path / "good", "--observer", "mse")
    ran("verify", good, "--against", good, "--engine", "vllm")
    assert repaired(good, good, tmp_path / "out")[0] == set()
    good = calibrated(model, tmp_path / "good", "--overwrite")
    broken = changed(good, tmp_path / "broken", some(k2=1e-3))
    assert repaired(broken, good, tmp_path / "mended")[0] == {(2, "k")}
    assert scales(tmp_path / "mended") == scales(good)


@pytest.mark.parametrize(("strategy", "observer"), [("tensor", "mse"), ("attn_head", "percentile")])
def test_what_an_observer_clips_on_purpose_is_kept(observer, strategy, model, tmp_path):
    flags = ("--strategy", strategy, "--observer", observer, "--set", "observer.percentile=99")
    good = calibrated(model, tmp_path / "good", *flags)
    found, done = repaired(good, good, tmp_path / "out")
    assert (done.exit_code, found) == (0, set()), done.stdout
    assert scales(tmp_path / "out") == scales(good)
    told = fp8kv("verify", good, "--against", good, "--engine", "vllm", "--json")
    clip = [text for text in json.loads(told.stdout)["warnings"] if "clip what was" in text]
    assert [text.partition("; ")[2] for text in clip] == ["the calibration's observer chose so"]
    found, done = repaired(changed(good, tmp_path / "broken", some(k1=1 / 1.1)), good, tmp_path / "mended")
    assert (done.exit_code, found) == (0, {(1, "k")}), done.stdout


def test_old_and_new_values_are_listed(model, measured, tmp_path):
    gone = {name(2, "k"): None, name(2, "v"): None}  # with strategy tensor nothing is left of this layer
    broken = damage(measured, tmp_path / "broken", {name(1, "k"): 1e-5, **gone})
    index = "model.safetensors.index.json"  # which may name them still
    shutil.copyfile(measured / index, broken / index)
    _, done = repaired(broken, measured, tmp_path / "out")
    assert json.loads((tmp_path / "out" / index).read_text()) == json.loads((measured / index).read_text())
    (_, (new,), _, _), (_, k, v, _) = scales(measured)[1:]
    assert done.stdout.startswith(
        f"replaced: model.layers.1.self_attn k: 1e-05, now {new:.4g}\n"
        f"replaced: model.layers.2.self_attn k: missing, now {k[0]:.4g}\n"
        f"replaced: model.layers.2.self_attn v: missing, now {v[0]:.4g}\n"
    )
    assert scales(tmp_path / "out") == scales(measured)
    (broken / SCALES).unlink()
    assert repaired(broken, measured, tmp_path / "all")[0] == {*ALL}
    assert scales(tmp_path / "all") == scales(measured)
    _, done = repaired(measured, measured, tmp_path / "same")
    assert done.stdout.startswith("replaced: nothing\n")
    # and scales for FNUZ are repaired for FNUZ
    good = calibrated(model, tmp_path / "good", "--format", "tgi", "--fp8-dtype", "e4m3fnuz")
    broken = damage(good, tmp_path / "fnuz", {name(0, "k"): 0.0, name(1, "v"): NAN})
    ran("repair", broken, "--stats", good, "--to", "tgi", "-o", tmp_path / "repaired")
    assert scales(tmp_path / "repaired") == scales(good)
    assert config_of(tmp_path / "repaired")["kv_cache_torch_dtype"] == "float8_e4m3fnuz"


def test_a_scale_that_comes_out_as_it_was_is_new_too_and_not_listed(measured, tmp_path):
    stats = load_stats(measured)
    module, layer = next(iter(stats.layers.items()))
    k, v = TensorStats(layer.k.amax * (448 / layer.k.amax.max())), TensorStats(layer.v.amax)
    edited = stats.layers | {module: replace(layer, k=k, v=v, q=None)}
    save_stats(replace(stats, layers=edited), tmp_path / "stats.safetensors")
    broken = changed(measured, tmp_path / "broken", every(torch.ones_like))
    assert load_records(broken) == (None,)
    found, _ = repaired(broken, tmp_path / "stats.safetensors", tmp_path / "out")
    assert found == {*ALL} - {(0, "k")}
    assert scales(tmp_path / "out")[0][1] == (1.0,)
    # all are of the text behind the statistics: what the broken ones read is out
    assert load_records(tmp_path / "out") == stats.records


SPELLINGS = {  # of the K scale of layer 1 -> what is said of it
    "model.layers.1.self_attn.k_scales": "removed: '{}' is not a name that an engine looks for",
    "model.layer1.self_attn.k_scale": "removed: '{}' is not a name that an engine looks for",
    "model.layers.99.self_attn.k_scale": "removed: '{}' is of no layer of the model",
    "model.layer.1.self_attn.k_scale": "renamed: '{}' is now a scale of model.layers.1.self_attn",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_scale_with_a_misspelt_name_is_mended_and_named(spelling, measured, tmp_path):
    scale = load_file(measured / SCALES)[name(1, "k")]
    broken = damage(measured, tmp_path / "broken", {name(1, "k"): None, spelling: scale})
    found, done = repaired(broken, measured, tmp_path / "out")
    assert (done.exit_code, found) == (0, set() if "renamed" in SPELLINGS[spelling] else {(1, "k")})
    assert SPELLINGS[spelling].format(spelling) in done.stdout.splitlines()
    for file in (SCALES, INDEX_FILE):
        assert (tmp_path / "out" / file).read_bytes() == (measured / file).read_bytes()


def test_a_misspelt_scale_among_weights_is_named(model, measured, tmp_path):
    misspelt = name(1, "k") + "s"
    broken = copy(model, tmp_path / "broken", lambda tensors: tensors.update({misspelt: torch.ones(1)}))
    done = fp8kv("repair", broken, "--stats", measured, "-o", tmp_path / "out")
    one_line_error(done, f"; give statistics of this model, or rename the misspelt scale '{misspelt}'")


def test_without_stats_those_that_are_there_are_named(model, measured, tmp_path):
    for directory, way in ((measured, measured / STATS_FILE), (model, "OUTPUT, an output of calibrate")):
        one_line_error(fp8kv("repair", directory, "-o", tmp_path / "out"), f"add --stats {way}")


def test_a_missing_file_of_scales_per_head_is_made_per_head(per_head, tmp_path):
    broken = shutil.copytree(per_head, tmp_path / "broken")
    (broken / SCALES).unlink()
    ran("repair", broken, "--stats", per_head, "-o", tmp_path / "out")
    assert [layer[:3] for layer in scales(tmp_path / "out")] == [layer[:3] for layer in scales(per_head)]


def with_amax(directory, out, heads, factor):
    """The statistics of a calibration, in which K of layer 0 was `factor` times as large in some heads."""
    stats = load_stats(directory)
    tensors = stats.tensors()
    tensors["model.layers.0.self_attn", "k", "amax"][heads] *= factor
    # as in files of version 1, since they would be of another amax
    tensors = {at: x for at, x in tensors.items() if at[2] not in PER_TOKEN}
    save_stats(stats.replace_tensors(tensors, stats.counts()), out)
    return out


def test_what_is_not_mended_is_said_with_status_1(measured, tmp_path):
    """kv_cache_scales.json has one number for K and V, at which a K this small is all zeros."""
    statistics = with_amax(measured, tmp_path / "stats.safetensors", slice(None), 1e-7)
    done = fp8kv("repair", measured, "--stats", statistics, "--to", "json", "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert "\nnot mended: K becomes all zeros in layer 0: " in done.stdout
    verified = fp8kv("verify", tmp_path / "out", "--against", statistics)
    assert "problem: K becomes all zeros in layer 0: " in " ".join(verified.stdout.split())


def test_a_dead_head_is_covered_as_derivation_does_and_a_dead_layer_has_no_scale(per_head, tmp_path):
    broken = damage(per_head, tmp_path / "broken", {name(0, "k"): 0.0})
    statistics = with_amax(per_head, tmp_path / "stats.safetensors", 1, 0.0)
    ran("repair", broken, "--stats", statistics, "-o", tmp_path / "repaired")
    derived = load_stats(statistics).scales(strategy="attn_head", observer=AbsMax())
    expected = derived.layers["model.layers.0.self_attn"].k.tolist()
    assert [*scales(tmp_path / "repaired")[0][1]] == expected
    assert expected[1] == max(expected)
    assert scales(tmp_path / "repaired")[1:] == scales(per_head)[1:]
    dead = with_amax(per_head, tmp_path / "dead.safetensors", slice(None), 0.0)
    done = fp8kv("repair", broken, "--stats", dead, "-o", tmp_path / "out")
    one_line_error(done, "model.layers.0.self_attn K: only zeros were seen")
    assert not (tmp_path / "out").exists()
    # a layer that needs no repair needs no statistics
    other = damage(per_head, tmp_path / "other", {name(1, "k"): 0.0})
    ran("repair", other, "--stats", dead, "-o", tmp_path / "out")
    assert scales(tmp_path / "out") == scales(per_head)


def test_statistics_of_another_model_repair_nothing(measured, per_head, tmp_path):
    broken = damage(measured, tmp_path / "broken", {name(0, "v"): None})
    for i, (options, scaled, bare, said) in enumerate(
        [
            ({"num_hidden_layers": 2}, measured, False, "it has 2 layers"),
            ({"num_key_value_heads": 4}, per_head, False, "its config says num_key_value_heads"),
            ({"num_key_value_heads": 4}, per_head, True, "layer 0 has K heads 4, and 2 in"),
            ({"head_dim": 8}, broken, True, "layer 0 has K channels 16, and 32 in"),
        ]
    ):
        other = save_model(tiny_model("llama", **options), tmp_path / f"other-{i}")
        statistics = calibrated(other, tmp_path / f"{i}", "--format", "fp8kv", "--strategy", "attn_head")
        if bare:  # without the report
            statistics = shutil.copyfile(statistics / STATS_FILE, tmp_path / f"{i}.safetensors")
        done = fp8kv("repair", scaled, "--stats", statistics, "-o", tmp_path / "out")
        one_line_error(done, f"'{statistics}' is of another model: {said}")
        assert not (tmp_path / "out").exists()


def traffic_of(calibration, out, model):
    """What an engine that serves `model` writes, without marks of its weights."""
    out.mkdir()
    shutil.copy(calibration / STATS_FILE, out)
    head = {"tokens": [500], "clipped": [0], "saturated": [0], "zero": [0]}
    layers = [{"layer": 0, "tokens": 500, "channels": 16, "edge": 432.0, "k": head, "v": head}]
    facts = dict.fromkeys(("engine", "fingerprint", "since"), "7") | {"model": str(model)}
    facts |= {"written": "2026-11-27T12:00:00+00:00"}
    facts |= {"fp8kv_watch": 1, "tokens": 500, "layers": layers}
    (out / "fp8kv_watch.json").write_text(json.dumps(facts))
    return out


def rescale(tensors, factor):
    for i in LAYERS:
        tensors[ATTENTION.format(i, "k")] *= factor
        tensors[ATTENTION.format(i, "v")] /= factor


def test_traffic_of_another_model_of_the_same_shapes_is_refused(model, measured, tmp_path):
    """Its scales would be written to a model whose K they are 200 times too large for."""
    other = copy(model, tmp_path / "other", lambda tensors: rescale(tensors, 200.0))
    taken = calibrated(other, tmp_path / "taken")
    bare = shutil.copytree(measured, tmp_path / "bare")
    (bare / STATS_FILE).unlink()
    here = traffic_of(taken, tmp_path / "here", taken)
    for scaled in (measured, bare):
        for command in (
            ("repair", scaled, "-o", tmp_path / "out", "--stats"),
            ("verify", scaled, "--against"),
        ):
            refusal = f"'{here}' is traffic of '{taken}', whose weights are others; give that of this"
            one_line_error(fp8kv(*command, here), refusal)
    part = next(iter(load_stats(taken).layers.values())).k.amax
    head = {
        x: len(part) * y
        for x, y in json.loads((here / "fp8kv_watch.json").read_text())["layers"][0]["k"].items()
    }
    rows = [
        {"layer": i, "tokens": 500, "channels": part.shape[1], "edge": 432.0, "k": head, "v": head}
        for i in LAYERS
    ]
    edit_json(here / "fp8kv_watch.json", layers=rows)
    refusal = f"the engine serves '{taken}', whose weights are others; give --model its own calibration"
    one_line_error(fp8kv("watch", here, "--model", measured), refusal)
    for own in (taken, shutil.copytree(taken, tmp_path / "copy of it")):
        assert "the limit alone" not in ran("watch", here, "--model", own).stdout
    away = traffic_of(taken, tmp_path / "away", "not/here")
    for statistics in (away, away / STATS_FILE):
        done = fp8kv("repair", measured, "--stats", statistics, "-o", tmp_path / "out")
        one_line_error(done, f"'{statistics}' is of another model: most K and V differ by more than 4")
    assert not (tmp_path / "out").exists()
    doubt = f"warning: most scales are more than 4 times off what '{away}' measured; see that it is of this"
    assert doubt in ran("repair", bare, "--stats", away, "-o", tmp_path / "out").stderr
    # a text of the model itself, and scales of another kind that its own statistics refute
    own, factor = traffic_of(measured, tmp_path / "own", model), {name(i, "k"): 1 / 9 for i in LAYERS}
    wrong = damage(measured, tmp_path / "wrong", factor)
    for i, scaled in enumerate((measured, bare, wrong)):
        assert "more than 4" not in ran("repair", scaled, "--stats", own, "-o", tmp_path / f"{i}").stderr


@pytest.mark.parametrize("served", ["damaged", "/\0"])
def test_a_model_that_was_served_and_cannot_be_read_or_is_not_named_in_full_is_not_compared(
    served, model, measured, tmp_path, monkeypatch
):
    """A relative path names one of the working directory, here a model of other weights and sizes."""
    other = save_model(tiny_model("llama", num_key_value_heads=4), tmp_path / "other")
    monkeypatch.chdir(other)
    if served == "damaged":
        served = tmp_path / "served"
        served.mkdir()
        (served / "config.json").write_text("{")
    traffic = traffic_of(measured, tmp_path / "traffic", served)
    ran("repair", measured, "--stats", traffic, "-o", tmp_path / "out")
    ran("verify", measured, "--against", traffic)


def test_clipped_tokens_that_the_calibration_expects_have_no_larger_values(measured, tmp_path):
    """In the first layer V depends on the token alone: each of the largest ones looks clipped."""
    stats = load_stats(measured)
    name, layer = next(iter(stats.layers.items()))
    tail, heads = layer.v.tail, len(layer.v.amax)
    expected = int((tail >= 0.965 * tail.max()).sum(-1).max())
    for share, is_clipped in ((1, False), (20, True)):
        traffic = traffic_of(measured, tmp_path / f"traffic-{share}", "not/here")
        counts = {"tokens": [layer.tokens] * heads, "saturated": [0] * heads, "zero": [0] * heads}
        counts = {x: counts | {"clipped": [n] * heads} for x, n in (("k", 0), ("v", share * expected))}
        row = {"tokens": layer.tokens, "channels": layer.v.amax.shape[1], "edge": 432.0, **counts}
        edit_json(traffic / "fp8kv_watch.json", layers=[{"layer": i, **row} for i in LAYERS])
        least = layer.v.amax.amax(1, keepdim=True) * (2 if is_clipped else 0.25)
        k, v = TensorStats(layer.k.amax), TensorStats(layer.v.amax * 2, least=least)
        larger = replace(layer, k=k, v=v, q=None, latent=None, estimated=("v",))
        save_stats(replace(stats, layers=stats.layers | {name: larger}), traffic / STATS_FILE)
        done = fp8kv("verify", measured, "--against", traffic)
        assert done.exit_code == is_clipped, done.stderr
        taken = (
            f"layer 0's V: {share * expected / layer.tokens:.2%} of the tokens are at the end of the range"
        )
        assert (f"note: {taken}" in done.stdout) != is_clipped
        told = json_of("verify", measured, "--against", traffic, status=is_clipped)
        assert told["against"][0]["sure"] == told["against"][0]["used"]
        assert [x.startswith(taken) for x in told["notes"]] == ([] if is_clipped else [True])
        assert told["against"][0]["estimated"] == (["v"] if is_clipped else [])
        done = ran("repair", measured, "--stats", traffic, "-o", tmp_path / f"out-{share}")
        assert (taken in done.stdout + done.stderr) != is_clipped
        assert ("replaced: model.layers.0.self_attn v" in done.stdout) == is_clipped
        assert (scales(tmp_path / f"out-{share}") != scales(measured)) == is_clipped
        # the calibration holds for the model, also where a scale beside it was changed
        edited = damage(measured, tmp_path / f"edited-{share}", {"model.layers.1.self_attn.v_scale": 9.0})
        done = ran("repair", edited, "--stats", traffic, "-o", tmp_path / f"again-{share}")
        assert ("replaced: model.layers.0.self_attn v" in done.stdout) == is_clipped
    # what a cache of a far too small scale, or less text, has seen is no reason to hold less than before
    v = TensorStats(layer.v.amax / 8)
    layers = stats.layers | {name: replace(larger, v=v)}
    save_stats(replace(stats, layers=layers), traffic / STATS_FILE)
    small = damage(measured, tmp_path / "small", {"model.layers.0.self_attn.v_scale": 1e-5})
    ran("repair", small, "--stats", traffic, "-o", tmp_path / "mended")
    assert scales(tmp_path / "mended") == scales(measured)
    # the traffic of several engines is traffic
    second = shutil.copytree(traffic, tmp_path / "second")
    for path, factor in ((traffic, 1), (second, 0.5)):
        lower = replace(larger, k=TensorStats(layer.k.amax * factor), v=v)
        save_stats(KVStats(layers | {name: lower}, stats.shared), path / STATS_FILE)
    ran("merge", traffic, second, "-o", tmp_path / "all")
    watched = json_of("watch", tmp_path / "all", status=1)
    assert [watched["tokens"], watched["layers"][0]["tokens"]] == [1000, 2 * layer.tokens]
    assert watched["layers"][1]["clipped"] == pytest.approx(min(1, 20 * expected / layer.tokens))
    ran("repair", small, "--stats", tmp_path / "all", "-o", tmp_path / "mended all")
    assert scales(tmp_path / "mended all") == scales(measured)


@pytest.mark.parametrize("clipped", [1, 3])
def test_what_a_cache_clipped_too_much_to_tell_is_not_made_a_scale(clipped, measured, tmp_path):
    """A cache for V that ends at a hundredth: right scales stay, and nothing is guessed."""
    stats, traffic = load_stats(measured), traffic_of(measured, tmp_path / "traffic", "not/here")
    layers, rows, low = dict(stats.layers), [], {}
    for name in [*layers][:clipped]:
        layer = layers[name]
        ends, tokens = layer.v.amax.amax(1, keepdim=True) / 100, [layer.tokens] * len(layer.v.amax)
        none = [0] * len(tokens)
        counts = {x: {"tokens": tokens, "saturated": none, "zero": none, "clipped": none} for x in "kv"}
        counts["v"] |= {"clipped": tokens, "limit": (ends * 432 / 448).flatten().tolist()}
        facts = {"layer": layer.layer_idx, "tokens": layer.tokens, "channels": layer.v.amax.shape[1]}
        rows.append(facts | counts | {"edge": 432.0})
        v = TensorStats(layer.v.amax.clamp(max=ends), least=ends)
        marks = {"estimated": ("v",), "unbounded": ("v",)}
        layers[name] = replace(layer, k=TensorStats(layer.k.amax), v=v, q=None, **marks)
        low[f"{name}.v_scale"] = float(ends.max() / 448)
    rows += [rows[0] | {"layer": i} for i in LAYERS[clipped:]]
    edit_json(traffic / "fp8kv_watch.json", layers=rows)
    save_stats(replace(stats, layers=layers), traffic / STATS_FILE)
    assert [x.unbounded for x in load_stats(traffic).layers.values()] == [("v",)] * clipped + [()] * (
        3 - clipped
    )
    # without a calibration beside the scales nothing tells more
    bare = shutil.copytree(measured, tmp_path / "bare")
    for file in (STATS_FILE, "fp8kv_calibration.json"):
        (bare / file).unlink()
    small = damage(bare, tmp_path / "small", low)
    where = "layer 0" if clipped == 1 else "layers 0, 1, 2"
    said = f"the cache that was watched clipped so much of V of {where} that the largest values are not known"
    for directory in (bare, small):
        done = fp8kv("repair", directory, "--stats", traffic, "-o", tmp_path / "new")
        one_line_error(done, f"cannot repair: {said}: calibrate the model, or watch a cache of 16")
        assert not (tmp_path / "new").exists()
        told = json_of("verify", directory, "--against", traffic, status=1)
        assert [x.startswith(said) for x in told["problems"]] == [True]
        assert ["v" in fit["used"] for fit in told["against"]] == [False] * clipped + [True] * (3 - clipped)
    (problem,) = re.findall("^problem: .*", fp8kv("inspect", traffic).stdout, re.MULTILINE)
    assert problem.startswith(f"problem: {said}")
    # the calibration's own values do
    note = f"V of {where}: the calibration's largest values, beyond the range of the watched cache, are taken"
    assert f"note: {note}" in ran("verify", measured, "--against", traffic).stdout
    fit = json_of("verify", measured, "--against", traffic)["against"][0]
    assert (fit["used"]["v"], fit["estimated"]) == (pytest.approx(1), [])
    halved = damage(measured, tmp_path / "halved", {"model.layers.0.self_attn.v_scale": 1e-5})
    done = ran("repair", halved, "--stats", traffic, "-o", tmp_path / "mended")
    assert note in done.stdout + done.stderr
    assert ("as a cache clipped every layer; see that it is of this" in done.stderr) == (clipped == 3)
    assert scales(tmp_path / "mended") == scales(measured)


@pytest.mark.parametrize("clipped", [2, 3])
def test_traffic_of_a_cache_that_clipped_is_of_the_model_whose_scales_were_too_small(
    clipped, measured, tmp_path
):
    """Its absmax is at most 4 times the range of a cache, here a fifth of what is in the model."""
    traffic = traffic_of(measured, tmp_path / "traffic", "not/here")
    stats = load_stats(traffic)
    layers = {name: replace(layer, q=None) for name, layer in stats.layers.items()}
    for name in [*layers][:clipped]:
        k, v = (TensorStats(part.amax / 5) for part in (layers[name].k, layers[name].v))
        layers[name] = replace(layers[name], k=k, v=v, estimated=("k", "v"))
    save_stats(replace(stats, layers=layers), traffic / STATS_FILE)
    done = ran("repair", measured, "--stats", traffic, "-o", tmp_path / "out")
    assert ("as a cache clipped every layer; see that it is of this model" in done.stderr) == (clipped == 3)
    rows = ran("verify", measured, "--against", traffic).stdout.partition("Measured absmax")[2].splitlines()
    counts = [line.count("about ") for line in rows if re.match(r"│ +\d", line)]
    assert counts == [2] * clipped + [0] * (3 - clipped)
    if clipped == 3:
        lines = ran("inspect", traffic).stdout.splitlines()[-3:]
        note = "is estimated, as its cache clipped it"
        assert lines[:2] == [f"note: {letter} of layers 0, 1, 2 {note}" for letter in "KV"]
        assert lines[2] == f"note: fp8kv verify DIR --against {traffic} compares the scales in DIR with it"
    name, own = next(iter(stats.layers.items()))
    k, v = TensorStats(2 * own.k.amax), TensorStats(own.v.amax)
    layers[name] = replace(own, q=None, k=k, v=v, estimated=("k",))
    save_stats(replace(stats, layers=layers), traffic / STATS_FILE)
    done = fp8kv("verify", measured, "--against", traffic)
    assert "its K is 2.00 times what its scale can hold, by an estimate" in done.stdout


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    lines = [" ".join(f"w{3 + (7 * i + j * j) % 97}" for j in range(24)) for i in range(10)]
    for name, part in (("a", lines[:4]), ("b", lines[4:]), ("all", lines)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in part))
    return directory


def collected(model, dataset, out, *options):
    flags = ("--seq-len", 24, "--batch-size", 1, "--device", "cpu")
    flags += ("--observer", "mse", "--targets", "qkv", "--set", "means=true", *options)
    ran("calibrate", model, "--dataset", dataset, "-o", out, *flags)
    return out


@pytest.fixture(scope="module")
def halves(model, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return [collected(model, texts / f"{name}.jsonl", out / name) for name in "ab"]


def test_two_runs_are_one(model, texts, halves, tmp_path):
    collected(model, texts / "all.jsonl", tmp_path / "whole")
    assert "statistics of 240 tokens" in ran("merge", *halves, "-o", tmp_path / "merged").stdout
    for file in ("fp8kv_stats.safetensors", "model-fp8kv-scales.safetensors"):
        expected, found = (load_file(tmp_path / name / file) for name in ("whole", "merged"))
        assert expected.keys() == found.keys()
        others = [name for name in expected if not name.endswith(".curve")]
        assert all(torch.equal(found[name], expected[name]) for name in others)
    # the second run's tokens come after the first's, and the last amax is that of both
    first, second, joined = (load_stats(run).layers.values() for run in (*halves, tmp_path / "merged"))
    for a, b, both in zip(first, second, joined, strict=True):
        assert torch.equal(both.k.curve, torch.maximum(a.k.curve, shift_curve(b.k.curve, 96, 144)))
        assert torch.equal(both.k.curve.amax(1), both.k.amax.amax(1))
    report = report_of(tmp_path / "merged")
    assert (report["dataset"]["samples"], report["dataset"]["tokens"]) == (10, 240)
    # a merged output merges again
    third = collected(model, texts / "a.jsonl", tmp_path / "third", "--seq-len", 23)
    again = json_of("merge", tmp_path / "merged", third, "-o", tmp_path / "again")
    assert again["tokens"] == 240 + 4 * 23
    same = collected(model, texts / "a.jsonl", tmp_path / "same", "--seed", 3)
    done = fp8kv("merge", tmp_path / "merged", same, "-o", tmp_path / "no")
    one_line_error(done, "these statistics are of one text, which counts once")
    # but not with what it has read already
    done = fp8kv("merge", tmp_path / "again", halves[1], "-o", tmp_path / "no")
    one_line_error(done, "have read the same data; merging them adds nothing")
    few = collected(model, texts / "b.jsonl", tmp_path / "few", "--samples", 3)
    short = collected(model, texts / "b.jsonl", tmp_path / "short", "--seq-len", 12)
    overlaps = [
        (f"{count} and 512", json_of("merge", run, halves[1], "-o", tmp_path / f"overlap-{count}"))
        for count, run in ((3, few), (512, short))
    ]
    for counts, answer in (*overlaps, ("512 and 512", again)):
        said = f", of {counts} samples, may have read the same documents: what both read counts twice"
        assert any(said in warning for warning in answer["warnings"])
    assert not any("counts twice" in warning for warning in report["warnings"])


def test_what_does_not_belong_together_is_refused(model, texts, halves, tmp_path):
    a, b = halves
    out = ("-o", tmp_path / "merged")
    one_line_error(fp8kv("merge", a, *out), "two or more calibrations")
    one_line_error(fp8kv("merge", a, a, *out), "have read the same data")
    one_line_error(fp8kv("merge", a, tmp_path, *out), "fp8kv_stats.safetensors; give a calibration's output")
    # one tensor of another size, which is not sampled for marks
    weight = "model.layers.0.mlp.down_proj.weight"
    tuned = copy(model, tmp_path / "tuned", lambda tensors: tensors[weight].mul_(30))
    revision = collected(tuned, texts / "b.jsonl", tmp_path / "revision")
    one_line_error(fp8kv("merge", a, revision, *out), "is of another model or revision than")
    one_line_error(fp8kv("merge", a, b, *out, "--model", tuned), "is of another model or revision than")
    marks, keys = report_of(b)["marks"], "layers.{}.self_attn.k_proj.weight"
    marks["tensors"][keys.format(0)] = marks["tensors"][keys.format(1)]
    changed = edited(b, tmp_path / "changed", marks=marks)
    one_line_error(fp8kv("merge", a, changed, *out), f"do not fit '{changed}'", keys.format(0))
    for setting, other, said in (
        ("means", "false", "means (True, False)"),
        ("data.skip_first", 1, "data.skip_first (0, 1); calibrate both with the same"),
    ):
        run = collected(model, texts / "b.jsonl", tmp_path / setting, "--set", f"{setting}={other}")
        one_line_error(fp8kv("merge", a, run, *out), f"captured with different {said}")
    broken = shutil.copytree(b, tmp_path / "broken")
    (broken / STATS_FILE).write_bytes((b / STATS_FILE).read_bytes()[:-50])
    one_line_error(fp8kv("merge", a, broken, *out), "is cut short: it has ", "; calibrate again")
    assert not (tmp_path / "merged").exists()
    # no run is replaced by what is made of it
    for run in halves:
        done = fp8kv("merge", *halves, "-o", run, "--overwrite")
        one_line_error(done, f"would mix with the calibration in '{run}'")


def test_modules_that_counted_other_tokens_do_not_add_up(halves, tmp_path):
    """As of a run in which a layer was skipped at times: its scale would rest on less text."""
    odd, second = (shutil.copytree(half, tmp_path / half.name) for half in (halves[1], halves[0]))
    for directory, first in ((odd, (48, 60)), (second, (32, 40))):
        stats = load_stats(directory)
        (directory / STATS_FILE).unlink()
        counts = [first, *stats.counts()[1:]]
        save_stats(stats.replace_tensors(stats.tensors(), counts), directory / STATS_FILE)
    for order in ((halves[0], odd), (odd, halves[0])):
        done = fp8kv("merge", *order, "-o", tmp_path / "merged")
        one_line_error(done, "model.layers.0.self_attn counted", "another share than in")
    # the same share in both adds up, and is said
    done = ran("merge", odd, second, "-o", tmp_path / "merged")
    assert "only 80 of 240 tokens were counted in layer 0: the scales there" in done.stderr


def test_another_number_of_threads_and_warnings_of_the_data_are_named(halves, tmp_path):
    one, other = (shutil.copytree(half, tmp_path / half.name) for half in halves)
    edit_json(one / "fp8kv_calibration.json", threads=1, warnings=["what is said of the data"])
    for count, kept in ((1, 1), (2, None), (None, None)):
        edit_json(other / "fp8kv_calibration.json", threads=count)
        warnings = json_of("merge", one, other, "-o", tmp_path / f"merged-{count}")["warnings"]
        assert "what is said of the data" in warnings
        said = f"'{one}' was measured with 1 threads and '{other}' with 2"
        assert [line.startswith(said) for line in warnings if "threads" in line] == [True] * (count == 2)
        assert report_of(tmp_path / f"merged-{count}")["threads"] == kept
