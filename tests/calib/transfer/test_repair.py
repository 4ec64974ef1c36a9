"""What `verify --against` calls wrong is what `repair --stats` mends, or says that it could not."""

import json
import re
import shutil

import pytest
import torch
from apply_cases import calibrated, scales
from command_line import fp8kv
from families import SHARED_KV, save_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

LAYERS, SCALES = range(3), "model-fp8kv-scales.safetensors"


@pytest.fixture(scope="module")
def per_head(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured") / "per_head"
    return calibrated(model, out, "--strategy", "attn_head", "--targets", "qkv")


def name(layer, letter):
    return f"model.layers.{layer}.self_attn.{letter}_scale"


def changed(source, out, change):
    """A copy of an output whose scales, by layer and letter, are those that `change` returns."""
    shutil.copytree(source, out)
    tensors = load_file(out / SCALES)
    before = {(i, x): tensors[name(i, x)] for i in LAYERS for x in "kvq" if name(i, x) in tensors}
    after = {name(*at): torch.as_tensor(each) for at, each in change(before).items()}
    save_file(tensors | after, out / SCALES, {"format": "pt"})
    return out


def every(change):
    """Change all scales in the same way."""
    return lambda before: {at: change(scale) for at, scale in before.items()}


def one(at, change):
    return lambda before: {at: change(before[at])}


def swapped(before):
    other = {"k": "v", "v": "k", "q": "q"}
    return {(i, x): before[i, other[x]] for i, x in before}


def shifted(before):
    """Each layer's scales are in the next one, and the last one's in the first."""
    return {((i + 1) % len(LAYERS), x): scale for (i, x), scale in before.items()}


ALL = [(i, x) for i in LAYERS for x in "kv"]
DAMAGE = {  # the change, and which scales are replaced
    "all 1.0": (every(torch.ones_like), ALL),
    "V is 1.0": (lambda b: {(i, "v"): torch.ones(1) for i in LAYERS}, [(i, "v") for i in LAYERS]),
    "K and V are swapped": (swapped, ALL),
    "shifted by a layer": (shifted, ALL),
    "1/scale": (every(lambda scale: 1 / scale), ALL),
    "absmax itself": (every(lambda scale: 448 * scale), ALL),
    "divided by 240": (every(lambda scale: scale * 448 / 240), ALL),
    "for e5m2": (every(lambda scale: scale * 448 / 57344), ALL),
    "halved": (every(lambda scale: scale / 2), ALL),
    "doubled": (every(lambda scale: scale * 2), ALL),
    "all far too large": (every(lambda scale: scale * 100), ALL),
    "a layer is far too small": (one((1, "k"), lambda scale: scale / 1000), [(1, "k")]),
    "a layer is far too large": (one((2, "v"), lambda scale: scale * 30), [(2, "v")]),
    "a layer becomes zeros": (one((0, "v"), lambda scale: scale * 1e6), [(0, "v")]),
    "a layer is NaN": (one((2, "k"), lambda scale: scale * float("nan")), [(2, "k")]),
    "a layer is per head": (one((1, "k"), lambda scale: scale.repeat(2)), [(1, "k")]),
    "a layer has other heads": (one((1, "v"), lambda scale: scale.repeat(3)), [(1, "v")]),
    "1/scale, and a layer is NaN": (
        lambda b: {at: (1 if at[0] else float("nan")) / scale for at, scale in b.items()},
        ALL,
    ),
    "nothing": (lambda before: {}, []),
    "headroom": (every(lambda scale: scale * 1.5), []),
}


def repaired(broken, statistics, out, *flags):
    """Run `repair` and then `verify --against`; return what was replaced, and what was printed."""
    done = fp8kv("repair", broken, "--stats", statistics, "-o", out, *flags)
    assert done.exit_code in (0, 1), done.stderr
    found = re.findall(r"replaced: model\.layers\.(\d)\.self_attn (\w): ", done.stdout)
    verified = fp8kv("verify", out, "--against", statistics, "--engine", "vllm")
    assert verified.exit_code == done.exit_code, verified.stdout
    return {(int(layer), letter) for layer, letter in found}, done


@pytest.mark.parametrize(("change", "replaced"), DAMAGE.values(), ids=DAMAGE)
def test_what_contradicts_the_statistics_is_replaced_and_nothing_else(change, replaced, measured, tmp_path):
    broken = changed(measured, tmp_path / "broken", change)
    was_good = fp8kv("verify", broken, "--against", measured, "--engine", "vllm").exit_code == 0
    found, done = repaired(broken, measured, tmp_path / "out")
    assert done.exit_code == 0, done.stdout
    assert found == set(replaced)
    assert was_good <= (not replaced or replaced == [(2, "v")])  # under 1/16 is a warning
    for before, after, right in zip(*map(scales, (broken, tmp_path / "out", measured)), strict=True):
        for letter in (1, 2):
            expected = right if (before[0], "xkv"[letter]) in found else before
            assert after[letter] == expected[letter]


def test_old_and_new_values_are_listed(measured, tmp_path):
    broken = changed(measured, tmp_path / "broken", one((1, "k"), lambda scale: scale / 1000))
    _, done = repaired(broken, measured, tmp_path / "out")
    old, new = scales(broken)[1][1][0], scales(measured)[1][1][0]
    assert f"replaced: model.layers.1.self_attn k: {old:.4g}, now {new:.4g}\n" in done.stdout
    _, done = repaired(measured, measured, tmp_path / "same")
    assert done.stdout.startswith("replaced: nothing\n")


def test_what_is_not_mended_is_said_with_status_1(measured, tmp_path):
    """kv_cache_scales.json has one number for K and V, at which a V this small is all zeros."""
    statistics = tmp_path / "stats.safetensors"
    with safe_open(measured / "fp8kv_stats.safetensors", "pt") as file:
        facts, tensors = file.metadata(), {at: file.get_tensor(at) for at in file.keys()}  # noqa: SIM118
    small = {at: tensor * 1e-7 for at, tensor in tensors.items() if ".0.self_attn.v." in at}
    save_file(tensors | small, statistics, facts)
    done = fp8kv("repair", measured, "--stats", statistics, "--to", "json", "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert "\nnot mended: V becomes all zeros in layer 0: " in done.stdout
    verified = fp8kv("verify", tmp_path / "out", "--against", statistics)
    assert "problem: V becomes all zeros in layer 0: " in " ".join(verified.stdout.split())


def test_a_layer_that_shares_anothers_cache_is_judged_by_that(tmp_path):
    model = save_model(tiny_model("gemma3n_text", **SHARED_KV), tmp_path / "model")
    good = calibrated(model, tmp_path / "good")
    assert fp8kv("verify", good, "--against", good, "--engine", "vllm").exit_code == 0
    broken = changed(good, tmp_path / "broken", one((2, "k"), lambda scale: scale / 1000))
    found, _ = repaired(broken, good, tmp_path / "out")
    assert found == {(2, "k")}
    assert scales(tmp_path / "out") == scales(good)


DAMAGED_HEADS = {
    "a layer is per layer": (one((1, "k"), lambda s: s.amax()[None]), [(1, "k")]),
    "a layer has other heads": (one((2, "v"), lambda s: s.flatten().repeat(2)), [(2, "v")]),
    "a head is far too small": (
        one((0, "k"), lambda s: s.flatten() * torch.tensor([1, 1e-3])), [(0, "k")]
    ),
    "a head is far too large": (
        one((0, "v"), lambda s: s.flatten() * torch.tensor([1e3, 1])), [(0, "v")]
    ),
    "Q is 1/scale": (lambda b: {at: 1 / s for at, s in b.items() if at[1] == "q"},
                     [(i, "q") for i in LAYERS]),
    "Q of a layer is far too small": (one((1, "q"), lambda s: s / 100), [(1, "q")]),
    "Q of a layer is zero": (one((1, "q"), lambda s: s * 0), [(1, "q")]),
    "Q of a layer is per layer": (one((1, "q"), lambda s: s.amax()[None]), [(1, "q")]),
    "all 1.0": (every(torch.ones_like), [(i, x) for i in LAYERS for x in "kvq"]),
    "every head of another": (every(lambda s: s.flip(0)), None),
}  # fmt: skip


@pytest.mark.parametrize(("change", "replaced"), DAMAGED_HEADS.values(), ids=DAMAGED_HEADS)
def test_scales_per_head_and_of_queries_are_mended(change, replaced, per_head, tmp_path):
    broken = changed(per_head, tmp_path / "broken", change)
    found, done = repaired(broken, per_head, tmp_path / "out")
    assert done.exit_code == 0, done.stdout
    assert replaced is None or found == set(replaced)
    for after, right in zip(scales(tmp_path / "out"), scales(per_head), strict=True):
        assert [len(each) for each in after[1:]] == [2, 2, 4]
        for letter in (1, 2, 3):
            assert (after[0], "xkvq"[letter]) not in found or after[letter] == right[letter]


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize(
    "observer", [["mse"], ["percentile", "--set", "observer.percentile=99"]], ids=lambda x: x[0]
)
def test_what_an_observer_clips_on_purpose_is_kept(observer, strategy, model, tmp_path):
    """Scales of `attn_head-mse` clip a little: a warning, and no reason to replace them."""
    good = calibrated(model, tmp_path / "good", "--strategy", strategy, "--observer", *observer)
    found, done = repaired(good, good, tmp_path / "out")
    assert (done.exit_code, found) == (0, set()), done.stdout
    assert scales(tmp_path / "out") == scales(good)
    told = fp8kv("verify", good, "--against", good, "--engine", "vllm", "--json")
    clip = [text for text in json.loads(told.stdout)["warnings"] if "clip what was" in text]
    assert [text.partition("; ")[2] for text in clip] == ["the calibration's observer chose so"]
    broken = changed(good, tmp_path / "broken", one((1, "k"), lambda scale: scale / 1.1))
    found, done = repaired(broken, good, tmp_path / "mended")
    assert (done.exit_code, found) == (0, {(1, "k")}), done.stdout


def test_a_layer_that_shares_anothers_cache_clips_what_that_does(tmp_path):
    model = save_model(tiny_model("gemma3n_text", **SHARED_KV), tmp_path / "model")
    good = calibrated(model, tmp_path / "good", "--observer", "mse")
    assert repaired(good, good, tmp_path / "out")[0] == set()
