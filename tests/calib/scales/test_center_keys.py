"""Scales per channel, and with K's mean subtracted: calibrated, generated with, evaluated."""

import json

import pytest
import torch
from command_line import fp8kv, one_line_error, ran
from families import save_model, tiny_model
from generation import PROMPT, as_json, continuation

from calib.errors import InputError
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.recipe import load_recipe
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_scales, load_stats
from calib.scales.summary import summarize

SUITE = Suite(3, 4, 24, 2, 5, (), (), 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    model = tiny_model("llama", num_hidden_layers=2)
    return save_model(model, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(directory):
    path = directory.with_name("rows.jsonl")
    rows = [" ".join(f"w{3 + (7 * i + j * j) % 97}" for j in range(40)) for i in range(9)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def calibrated(directory, text, out, *options):
    data = ("--dataset", text, "--samples", 3, "--seq-len", 24, "--device", "cpu")
    ran("calibrate", directory, "-o", out, *data, "--format", "fp8kv", *options)
    return out


@pytest.mark.parametrize("name", ["channel", "channel+k_center"])
def test_what_is_calibrated_is_what_the_evaluation_praises(name, directory, text, tmp_path):
    flags = ("--center-keys",) if name == "channel+k_center" else ()
    out = calibrated(directory, text, tmp_path / "mine", "--strategy", "channel", *flags)
    choices = {"data.dataset": str(text), "device": "cpu", "dtype": "float32"}
    recipe = load_recipe(None, {**choices, "evaluation.variants": [name]})
    found = evaluate(str(directory), recipe, suite=SUITE, scales=[out]).measured
    mine, theirs = found["mine"], found[name]
    for layer, scales in theirs.variant.scales.layers.items():
        given = mine.variant.scales.layers[layer]
        assert torch.equal(given.k, scales.k)
        assert torch.equal(given.v, scales.v)
        assert (given.k_center is None) == (scales.k_center is None) == (not flags)
        assert given.k_center is None or torch.equal(given.k_center, scales.k_center)
    kl, expected = ([d.kl.tolist() for d in found.documents] for found in (mine, theirs))
    assert kl == expected
    assert max(map(max, kl)) > 0
    assert not mine.variant.is_loadable
    facts = as_json(directory, PROMPT, "--scales", out)
    assert facts["fp8"]["token_ids"] == continuation(directory, load_scales(out))


@pytest.mark.parametrize("strategy", ["tensor", "attn_head", "channel"])
def test_scales_cover_what_is_left_of_k_by_strategy(strategy, directory, text, tmp_path):
    options = ("--center-keys", "--strategy", strategy, "--headroom", 1.5)
    out = calibrated(directory, text, tmp_path / "mine", *options)
    stats = load_stats(out)
    for name, layer in load_scales(out).layers.items():
        k = stats.layers[name].k
        mean = (k.total / stats.layers[name].tokens).float()
        left = torch.maximum(k.high - mean, mean - k.low)
        largest = {"tensor": left.amax().view(1), "attn_head": left.amax(-1), "channel": left}
        assert torch.equal(layer.k, largest[strategy] * 1.5 / 448)
        assert torch.equal(layer.k_center, mean)
        plain = {"tensor": [1], "attn_head": [2], "channel": [2, 16]}[strategy]
        assert [*layer.v.shape] == plain
    rows = summarize(stats, load_scales(out))
    assert all(row.k_range_used == pytest.approx(1 / 1.5) for row in rows) == (strategy != "tensor")


def test_what_cannot_hold_it_is_refused_with_the_way_out(directory, text, tmp_path):
    command = ("calibrate", directory, "-o", tmp_path / "out", "--dataset", text, "--center-keys")
    for name in ("vllm", "json", "trtllm"):
        done = fp8kv(*command, "--format", name, "--reduce", "max")
        way_out = "Use --format fp8kv, or leave out --center-keys"
        one_line_error(done, f"--format {name}: ", "subtracts nothing from K", way_out)
    done = fp8kv(*command, "--format", "fp8kv", "--observer", "mse")
    one_line_error(done, "center_keys", "observer 'mse'", "use observer absmax")
    assert not (tmp_path / "out").exists()
    plain = calibrated(directory, text, tmp_path / "plain")
    with pytest.raises(InputError, match="hold no means of K; calibrate with --center-keys"):
        derive_scales(load_stats(plain), load_recipe(None, {"center_keys": True}))
