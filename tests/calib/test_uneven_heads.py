"""Whole jobs on models whose layers have other numbers of KV heads, or of other sizes."""

import json
import shutil

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
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

MODELS = [*UNEVEN, "gemma4"]
HEADS = {  # KV heads, K's channels, V's
    "gemma4_text": [(4, 16, 16), (2, 32, 32), (2, 32, 32)],
    "mimo_v2_flash": [(4, 24, 16), (4, 24, 16), (2, 24, 16)],
    "gemma4": [(4, 16, 16), (2, 32, 32), (2, 32, 32)],
}


@pytest.fixture(scope="module", params=MODELS)
def job(request, tmp_path_factory):
    """A family, its directory, and the output of its calibration per head."""
    family, root = request.param, tmp_path_factory.mktemp("uneven")
    (root / "model").mkdir()
    if family == "gemma4":
        model = published_gemma4(root / "model")
    else:
        model = save_model(tiny_model(family, **UNEVEN[family]), root / "model")
    done = calibrate(model, "-o", root / "out", "--strategy", "attn_head")
    assert done.exit_code == 0, done.stderr
    return family, model, root / "out"


def loaded(directory, recipe):
    checkpoint = find_model(str(directory))
    config = load_config(checkpoint)
    return load_model(checkpoint, config, recipe.dtype, recipe.device), load_tokenizer(checkpoint)


def test_scales_are_those_of_a_plain_forwards_own_cache(job):
    family, directory, out = job
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    recipe = load_recipe(None, report["recipe"])
    model, tokenizer = loaded(directory, recipe)
    samples = load_data(recipe.data, tokenizer, lambda: model).samples
    cache = DynamicCache()  # without a config it keeps what lies outside of windows, too
    with torch.inference_mode():
        model(input_ids=torch.tensor(samples), past_key_values=cache, use_cache=True)
    stats, scales = load_stats(out).layers, load_scales(out).layers
    shapes = []
    for name, held in zip(stats, cache.layers, strict=True):
        amax = {"k": held.keys.abs().amax((0, 2)), "v": held.values.abs().amax((0, 2))}
        shapes.append((*amax["k"].shape, amax["v"].shape[1]))
        for which, own in amax.items():
            assert torch.equal(getattr(stats[name], which).amax, own)
            assert torch.equal(getattr(scales[name], which), own.amax(-1) / 448)
    assert shapes == HEADS[family]


def test_every_layer_has_a_scale_for_each_of_its_heads_in_an_engine(job):
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


def test_scales_for_the_heads_of_another_layer_are_a_problem(job, tmp_path):
    _, _, out = job
    spoilt = tmp_path / "spoilt"
    shutil.copytree(out, spoilt)
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


def test_layer_by_layer_the_scales_are_the_same(job, tmp_path):
    _, model, out = job
    flags = ("--strategy", "attn_head", "--offload", "layerwise")
    done = calibrate(model, "-o", tmp_path / "out", *flags)
    assert done.exit_code == 0, done.stderr
    own, whole = load_scales(tmp_path / "out").layers, load_scales(out).layers
    assert all(torch.equal(own[name].k, whole[name].k) for name in whole)
    assert all(torch.equal(own[name].v, whole[name].v) for name in whole)


def test_every_command_reads_it(job, tmp_path):
    _, model, out = job
    small = ("--dataset", "random", "--samples", "3", "--seq-len", "24")
    given = ("--scales", out, "--variants", "none,qkv")
    for command in (
        ("inspect", out),
        ("convert", out, "--to", "sglang", "--reduce", "max", "-o", tmp_path / "sglang"),
        ("generate", out, PROMPT, "--max-new-tokens", 3),
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


@pytest.mark.parametrize("purpose", ["fp8", "int8"])
def test_weights_are_baked_and_v_stays_where_the_model_normalises_it(job, purpose, tmp_path):
    family, model, out = job
    done = fp8kv("bake", model, "--scales", out, "--for", purpose, "-o", tmp_path / "baked")
    assert done.exit_code == 0, done.stderr
    assert "the source's, bit for bit" in done.stdout
    normalised = family.startswith("gemma4")
    assert ("V of 3 of 3 layers stays as it is" in done.stdout) == normalised
    factors = json.loads((tmp_path / "baked" / "fp8kv_bake.json").read_text())["factors"]
    assert any(set(map(str, each["k"])) != {"1.0"} for each in factors.values())


def test_a_factor_for_a_normalised_v_is_refused(job, tmp_path):
    family, model, _ = job
    if family == "mimo_v2_flash":
        assert fp8kv("stress", model, "-o", tmp_path / "twin").exit_code == 0
        return
    done = fp8kv("stress", model, "-o", tmp_path / "twin")
    one_line_error(done, "normalises V, which undoes a factor in front of it")
    done = fp8kv("stress", model, "-o", tmp_path / "twin", "--v-factor", "1")
    assert done.exit_code == 0, done.stderr


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
