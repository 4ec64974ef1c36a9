"""Models that cache latents (MLA): their scales, recomputed in plain transformers, and who sums."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calibrate_each import RECIPE
from command_line import calibrate as calibrate_command
from command_line import fp8kv, one_line_error
from families import LATENT, kimi_k25, mixed_model, save_model, tiny_model
from quantized_models import edit_json
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import InputError
from calib.job import run
from calib.recipe import load_recipe
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_stats, save_stats

ROOT = Path(__file__).parents[3]
GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 24, 23, 11, 7)]
MSE = load_recipe(None, {"observer.name": "mse"})


def batches():
    return make_batches(SAMPLES, 2, pad_id=0)


@torch.inference_mode()
def largest_in_cache(model):
    """The largest magnitude of each layer's latent and k_pe, padding left out, by layer index."""
    largest = {}
    for batch in batches():
        cache = DynamicCache(config=model.config)
        model(batch.input_ids, attention_mask=batch.attention_mask, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            keys = getattr(layer, "keys", None)
            for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
                if keys is not None:
                    held = (keys[row, :, :length], layer.values[row, :, :length])
                    most = max(float(x.abs().max()) for x in held)
                    largest[index] = max(largest.get(index, 0.0), most)
    return largest


def with_large_k_pe(model):
    """Make k_pe larger than the latent in the last of the layers, and smaller in the others."""
    *others, last = (m for m in model.modules() if hasattr(m, "kv_a_proj_with_mqa"))
    with torch.no_grad():
        for attention in others:
            attention.kv_a_proj_with_mqa.weight[16:] /= 64
        last.kv_a_proj_with_mqa.weight[16:] *= 4096
    return model


@pytest.mark.parametrize("family", LATENT)
def test_scales_are_those_of_what_transformers_caches(family):
    model = with_large_k_pe(tiny_model(family, **LATENT[family]))
    recipe = load_recipe(None)
    stats = calibrate(model, batches(), recipe)
    larger = [bool(x.v.amax.max() > x.k.amax.max()) for x in stats.layers.values()]
    assert larger == [False] * (len(larger) - 1) + [True]
    scales = derive_scales(stats, recipe)
    expected = largest_in_cache(model)
    assert {layer.layer_idx for layer in scales.layers.values()} == set(expected)
    for layer in scales.layers.values():
        assert layer.latent
        assert torch.equal(layer.k, layer.v)
        assert layer.k.item() == pytest.approx(expected[layer.layer_idx] / 448, rel=1e-6)


def test_a_latent_is_what_its_weights_say():
    """From the hidden state, by hand: project, normalise, and turn what is shared."""
    model = tiny_model("deepseek_v2", **LATENT["deepseek_v2"], num_hidden_layers=1)
    sample = torch.tensor([SAMPLES[0]])
    stats = calibrate(model, make_batches(SAMPLES[:1], 1, pad_id=0), load_recipe(None))
    (layer,) = stats.layers.values()
    block = model.model.layers[0]
    norm, attention = block.input_layernorm, block.self_attn
    with torch.inference_mode():
        hidden = model.model.embed_tokens(sample)[0]
        hidden = hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        both = (hidden * norm.weight) @ attention.kv_a_proj_with_mqa.weight.T
        latent, pe = both[:, :16], both[:, 16:]
        eps = attention.kv_a_layernorm.variance_epsilon
        latent = latent * (latent.square().mean(-1, keepdim=True) + eps).rsqrt()
        latent = latent * attention.kv_a_layernorm.weight
        theta = model.config.rope_parameters["rope_theta"]
        angles = torch.arange(len(pe))[:, None] * theta ** (-torch.arange(0, 8, 2) / 8)
        turned = torch.view_as_complex(pe.reshape(-1, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(layer.k.amax[0], latent.abs().amax(0), rtol=1e-6, atol=0)
    k_pe = torch.view_as_real(turned).flatten(1).abs().amax(0)
    torch.testing.assert_close(layer.v.amax[0], k_pe, rtol=1e-5, atol=0)  # sines of two libraries


def test_an_observer_sees_latent_and_k_pe_as_one():
    model = with_large_k_pe(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]))
    stats = calibrate(model, batches(), MSE)
    for layer in stats.layers.values():
        both = layer.join_latent()
        assert both.amax.max() == max(layer.k.amax.max(), layer.v.amax.max())
        assert both.histogram.sum() == layer.tokens * (16 + 8)
    absmax = derive_scales(stats, load_recipe(None)).layers.values()
    for clipped, whole in zip(derive_scales(stats, MSE).layers.values(), absmax, strict=True):
        assert torch.equal(clipped.k, clipped.v)
        assert whole.k / 4 <= clipped.k <= whole.k


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every family on disk, by its name."""
    directory = tmp_path_factory.mktemp("models")
    return {
        family: save_model(tiny_model(family, **options), directory / family)
        for family, options in LATENT.items()
    }


def test_two_processes_change_no_bit_of_any_family(saved, tmp_path):
    places = [each for f, path in saved.items() for each in (path, tmp_path / "two" / f)]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = Path(__file__).parents[2] / "support" / "calibrate_each.py"
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), *map(str, places)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    torch.set_num_threads(1)
    for family, path in saved.items():
        run(str(path), load_recipe(None, RECIPE), tmp_path / "one" / family)
        one, two = (
            load_file(tmp_path / count / family / "fp8kv_stats.safetensors") for count in ("one", "two")
        )
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one), family


def test_a_model_that_sees_caches_latents_of_its_text(tmp_path):
    save_model(kimi_k25(), tmp_path / "model")
    run(str(tmp_path / "model"), load_recipe(None, RECIPE), tmp_path / "out")
    stats = load_stats(tmp_path / "out")
    assert [*stats.layers] == [f"model.language_model.layers.{i}.self_attn" for i in range(3)]
    assert all(layer.latent for layer in stats.layers.values())


def test_layers_with_k_and_v_beside_latents_have_two_scales():
    model = mixed_model()
    stats = calibrate(model, batches(), load_recipe(None))
    assert [layer.latent for layer in stats.layers.values()] == [True, False, True]
    first, plain, _ = derive_scales(stats, load_recipe(None)).layers.values()
    assert torch.equal(first.k, first.v)
    cached = [layer.v.amax.max() / 448 for layer in stats.layers.values()]
    assert plain.v == cached[1]
    assert plain.k != plain.v
    largest = largest_in_cache(model)
    assert max(plain.k, plain.v).item() == pytest.approx(largest[1] / 448, rel=1e-6)


def test_statistics_say_that_they_are_of_latents(tmp_path):
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    stats = calibrate(model, batches(), MSE)
    save_stats(stats, tmp_path / "stats.safetensors")
    assert load_stats(tmp_path / "stats.safetensors").latent
    halves = [calibrate(model, part, MSE) for part in (batches()[:1], batches()[1:])]
    assert halves[0].merge(halves[1]).latent


@pytest.mark.parametrize(
    ("flags", "phrase"),
    [
        (("--strategy", "attn_head"), "--strategy attn_head: this model caches one latent"),
        (("--strategy", "channel"), "--strategy channel: this model caches one latent"),
        (("--targets", "qkv"), "--targets qkv: this model caches one latent"),
        (("--center-keys",), "--center-keys: this model caches one latent"),
    ],
)
def test_more_than_one_scale_is_refused_before_anything_is_measured(flags, phrase, saved, tmp_path):
    out = ("--format", "fp8kv", "-o", tmp_path / "out")
    done = calibrate_command(saved["deepseek_v3"], *out, *flags)
    one_line_error(done, phrase, "use --strategy tensor", status=2)
    assert not (tmp_path / "out").exists()


def test_statistics_of_latents_give_no_scales_per_head():
    stats = calibrate(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), batches(), MSE)
    with pytest.raises(InputError, match="one latent per token"):
        derive_scales(stats, MSE.model_copy(update={"strategy": "attn_head"}))


def test_kimi_k2_is_read_as_the_deepseek_that_it_is(saved, tmp_path):
    shutil.copytree(saved["deepseek_v3"], tmp_path / "kimi")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    code |= {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    edit_json(tmp_path / "kimi" / "config.json", model_type="kimi_k2", auto_map=code)
    for name, model in (("kimi", tmp_path / "kimi"), ("deepseek", saved["deepseek_v3"])):
        run(str(model), load_recipe(None, RECIPE), tmp_path / "of" / name)
    kimi, deepseek = (load_stats(tmp_path / "of" / name) for name in ("kimi", "deepseek"))
    assert kimi.latent
    for name, layer in deepseek.layers.items():
        assert torch.equal(kimi.layers[name].join_latent().amax, layer.join_latent().amax)


def renamed(directory, out):
    """A calibration of latents whose statistics call them K and V."""
    shutil.copytree(directory, out)
    path = out / "fp8kv_stats.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    names = {n: n.replace(".latent.", ".k.").replace(".k_pe.", ".v.") for n in tensors}
    assert set(names.values()).isdisjoint(set(tensors) - {n for n in tensors if ".q." in n})
    save_file({names[n]: tensor for n, tensor in tensors.items()}, path, metadata)
    return out


def test_statistics_that_call_latents_k_and_v_fit_no_model_with_latents(saved, tmp_path):
    run(str(saved["deepseek_v3"]), load_recipe(None, RECIPE), tmp_path / "right")
    wrong = renamed(tmp_path / "right", tmp_path / "wrong")
    assert not load_stats(wrong).latent
    done = fp8kv("generate", saved["deepseek_v3"], "w4 w5", "--scales", wrong)
    one_line_error(done, "layer 0 has a cache of K and V, and latents in", status=2)


def test_absmax_of_latents_is_that_which_their_scale_is_for(saved, tmp_path):
    run(str(saved["deepseek_v3"]), load_recipe(None, RECIPE), tmp_path / "out")
    amax = load_stats(tmp_path / "out").amax_by_head()
    for layer in load_stats(tmp_path / "out").layers.values():
        largest = float(layer.join_latent().amax.max())
        assert amax[layer.layer_idx, "k"] == amax[layer.layer_idx, "v"] == (largest,)


@pytest.mark.parametrize(
    ("family", "name", "phrase"),
    [
        ("deepseek_v3", "vllm", "compute with 1.0"),
        ("deepseek_v3", "sglang", "stores latents"),
        ("longcat_flash", "modelopt", "several attention modules"),
    ],
)
def test_formats_that_spoil_or_drop_scales_are_refused_early(
    family, name, phrase, saved, tmp_path, monkeypatch
):
    if family == "deepseek_v3":
        monkeypatch.setattr("calib.job.load_model", None)  # nothing is loaded
    done = calibrate_command(saved[family], "--format", name, "-o", tmp_path / "out")
    one_line_error(done, phrase, "bake", status=2)
    assert not (tmp_path / "out").exists()


def test_two_attention_modules_of_a_layer_are_not_converted(saved, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(saved["longcat_flash"], model)
    scale = {f"model.layers.0.self_attn.{i}.k_scale": torch.tensor(0.1 + i) for i in range(2)}
    save_file(scale, model / "scales.safetensors", {"format": "pt"})
    done = fp8kv("convert", model, "--to", "modelopt", "-o", tmp_path / "out")
    one_line_error(done, "several attention modules", "fp8kv", status=2)


def test_what_convert_refuses_names_a_command_that_there_is(saved, tmp_path):
    out = ("--format", "modelopt", "-o", tmp_path / "scaled")
    done = calibrate_command(saved["deepseek_v3"], *out)
    assert done.exit_code == 0
    assert "serve with vLLM:" in done.stdout
    assert "for vLLM; strategy" in (tmp_path / "scaled" / "README.md").read_text()
    done = fp8kv("convert", tmp_path / "scaled", "--to", "vllm", "-o", tmp_path / "no")
    one_line_error(done, "Use fp8kv bake after fp8kv calibrate --format fp8kv, or --to", status=2)
