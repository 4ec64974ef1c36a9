"""Whole jobs on models whose layers have other numbers of KV heads, or of other sizes."""

import json
import shutil

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from families import ONE_MODULE, UNEVEN, published_gemma4, save_model, tiny_model
from generation import PROMPT
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from calib.capture.attention import map_attention
from calib.data import load_data
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.rescale.rope_pairs import rotated_pairs
from calib.scales.stats_file import load_scales, load_stats

HEADS = {  # KV heads, K's channels, V's
    "mimo_v2_flash": [(4, 24, 16), (4, 24, 16), (2, 24, 16)],
    "gemma4": [(4, 16, 16), (2, 32, 32), (2, 32, 32)],
}


@pytest.fixture(scope="module", params=HEADS)
def job(request, tmp_path_factory):
    """A family, its directory, and the output of its calibration per head."""
    family, root = request.param, tmp_path_factory.mktemp("uneven")
    (root / "model").mkdir()
    if family == "gemma4":
        model = published_gemma4(root / "model")
    else:
        model = save_model(tiny_model(family, **UNEVEN[family]), root / "model")
    succeeded(calibrate(model, "-o", root / "out", "--strategy", "attn_head"))
    return family, model, root / "out"


def test_scales_are_those_of_a_plain_forwards_own_cache(job, tmp_path):
    family, directory, out = job
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    recipe, checkpoint = load_recipe(None, report["recipe"]), find_model(str(directory))
    model = load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
    samples = load_data(recipe.data, load_tokenizer(checkpoint), lambda: model).samples
    cache = DynamicCache()  # without a config it keeps what lies outside of windows, too
    with torch.inference_mode():
        model(input_ids=torch.tensor(samples), past_key_values=cache, use_cache=True)
    flags = ("--strategy", "attn_head", "--offload", "layerwise")
    succeeded(calibrate(directory, "-o", tmp_path / "out", *flags))
    stats, scales = load_stats(out).layers, load_scales(out).layers
    layerwise = load_scales(tmp_path / "out").layers
    shapes = []
    for name, held in zip(stats, cache.layers, strict=True):
        amax = {"k": held.keys.abs().amax((0, 2)), "v": held.values.abs().amax((0, 2))}
        shapes.append((*amax["k"].shape, amax["v"].shape[1]))
        for which, own in amax.items():
            assert torch.equal(getattr(stats[name], which).amax, own)
            assert torch.equal(getattr(scales[name], which), own.amax(-1) / 448)
            assert torch.equal(getattr(layerwise[name], which), own.amax(-1) / 448)
    assert shapes == HEADS[family]


def test_an_engine_has_a_scale_for_each_head_of_its_layer_and_of_no_other(job, tmp_path):
    family, _, out = job
    done = fp8kv("verify", out, "--engine", "vllm", "--json")
    assert done.exit_code == 0, done.stdout
    (engine,) = json.loads(done.stdout)["engines"]
    values = {letter: [] for letter in "kvq"}
    for layer in engine["layers"]:
        values[layer["letter"]].append(layer["values"])
    for letter in "kv":
        own = [getattr(layer, letter).tolist() for layer in load_scales(out).layers.values()]
        assert values[letter] == own
    assert [len(each) for each in values["k"]] == [heads for heads, _, _ in HEADS[family]]
    spoilt = shutil.copytree(out, tmp_path / "spoilt")
    file = spoilt / "model-fp8kv-scales.safetensors"
    tensors = load_file(file)
    first, *_, last = (name for name in sorted(tensors) if name.endswith("k_scale"))
    tensors[last] = tensors[first].clone()
    save_file(tensors, file)
    done = fp8kv("verify", spoilt, "--engine", "vllm")
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    assert "K has 4 scales in layer 2 (one per query head), but" in said
    assert "the model has 2 KV heads there" in said


def test_every_command_reads_it(job, tmp_path):
    _, model, out = job
    small = ("--dataset", "random", "--samples", "2", "--seq-len", "16")
    given = ("--scales", out, "--variants", "none")
    for command in (
        ("inspect", out),
        ("convert", out, "--to", "sglang", "--reduce", "max", "-o", tmp_path / "sglang"),
        ("generate", model, PROMPT, "--max-new-tokens", 3, "--cache", "int8_per_token_head"),
        ("eval", model, *small, *given, "-o", tmp_path / "report"),
    ):
        done = fp8kv(*command)
        assert done.exit_code == 0, (command, done.stderr, done.exception)
    assert (tmp_path / "report" / "report.html").exists()


def test_generate_counts_the_bytes_of_a_token_as_eval_does(job):
    family, _, out = job
    size = sum(heads * (k + v) for heads, k, v in HEADS[family])
    largest = sum(2 * heads * max(k, v) for heads, k, v in HEADS[family])
    done = fp8kv("generate", out, PROMPT, "--max-new-tokens", 3, "--json")
    found = json.loads(done.stdout)
    assert (found["bytes_per_token"], found["bytes_per_token_16bit"]) == (size, 2 * size)
    assert found["bytes_per_token_in_blocks"] == largest
    printed = fp8kv("generate", out, PROMPT, "--max-new-tokens", 3).stdout
    assert f"KV cache: {size} bytes a token in FP8, {2 * size} in 16 bits (0.50x)" in printed
    filled = f"({largest} bytes a token: smaller heads are filled up)"
    assert (filled in printed) == (largest > size)


def test_weights_are_rescaled_but_for_v_where_the_model_normalises_it(job, tmp_path):
    family, model, out = job
    normalised = family == "gemma4"
    for purpose in ("fp8", "int8"):
        baked = tmp_path / purpose
        done = ran("bake", model, "--scales", out, "--for", purpose, "-o", baked)
        assert "the source's, bit for bit" in done.stdout
        assert ("V of 3 of 3 layers stays as it is" in done.stdout) == normalised
        factors = json.loads((baked / "fp8kv_bake.json").read_text())["factors"]
        assert any(set(map(str, each["k"])) != {"1.0"} for each in factors.values())
    flags = ()
    if normalised:
        done = fp8kv("stress", model, "-o", tmp_path / "twin")
        one_line_error(done, "normalises V, which undoes a factor in front of it")
        flags = ("--v-factor", "1")
    ran("stress", model, "-o", tmp_path / "twin", *flags)


def test_proportional_rope_turns_few_pairs_half_a_head_apart():
    model = tiny_model("gemma4_text", **UNEVEN["gemma4_text"])
    turned = map_attention(model).cached["model.layers.1.self_attn"]
    partners = rotated_pairs(model, turned)
    assert [*partners[:5]] == [16, 17, 18, 19, 4]
    assert [*partners[16:21]] == [0, 1, 2, 3, 20]


def test_bench_wants_one_shape(tmp_path):
    model = save_model(tiny_model("gemma4_text", **UNEVEN["gemma4_text"]), tmp_path)
    one_line_error(fp8kv("bench", model), "have several shapes of heads", "--heads instead of MODEL")


@pytest.mark.parametrize("family", ONE_MODULE)
def test_a_block_that_layers_share_is_refused_in_one_line(family, tmp_path):
    (tmp_path / "model").mkdir()
    model = save_model(tiny_model(family, **ONE_MODULE[family]), tmp_path / "model")
    for done in (
        calibrate(model, "-o", tmp_path / "out"),
        fp8kv("generate", model, PROMPT, "--scales", "none"),
    ):
        one_line_error(done, "is of a block that several layers share")
