"""Models that cache latents (MLA): their scales, recomputed in plain transformers, and who sums."""

import shutil

import pytest
import torch
from command_line import calibrate as calibrate_command
from command_line import fp8kv, one_line_error
from families import LATENT, edit_json, mixed_model, save_model, tiny_model
from safetensors import safe_open
from safetensors.torch import save_file

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.files.names import STATS_FILE
from calib.job import run
from calib.recipe import load_recipe
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_stats

GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 24, 23, 11, 7)]
BATCHES = make_batches(SAMPLES, 2, pad_id=0)
MSE = load_recipe(None, {"observer.name": "mse"})
RANDOM = {"data.dataset": "random", "data.samples": 6, "data.seq_len": 24}
JOB = load_recipe(None, {**RANDOM, "device": "cpu", "observer.name": "mse", "export.formats": ("fp8kv",)})


def test_an_observer_sees_latent_and_k_pe_as_one():
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    with torch.no_grad():  # of the last layer k_pe is the larger one
        model.model.layers[-1].self_attn.kv_a_proj_with_mqa.weight[16:] *= 4096
    stats = calibrate(model, BATCHES, MSE)
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
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    return save_model(model, tmp_path_factory.mktemp("models") / "deepseek")


@pytest.fixture(scope="module")
def measured(saved):
    run(str(saved), JOB, saved.with_name("out"))
    return saved.with_name("out")


def test_layers_with_k_and_v_beside_latents_have_two_scales():
    stats = calibrate(mixed_model(), BATCHES, load_recipe(None))
    assert [layer.latent for layer in stats.layers.values()] == [True, False, True]
    first, plain, _ = derive_scales(stats, load_recipe(None)).layers.values()
    assert torch.equal(first.k, first.v)
    assert plain.k != plain.v == [*stats.layers.values()][1].v.amax.max() / 448


def test_more_than_one_scale_is_refused_before_anything_is_measured(saved, tmp_path):
    for flags in (("--strategy", "attn_head"), ("--targets", "qkv"), ("--center-keys",)):
        done = calibrate_command(saved, "--format", "fp8kv", "-o", tmp_path / "out", *flags)
        said = f"{' '.join(flags)}: this model caches one latent"
        one_line_error(done, said, "use --strategy tensor", status=2)
        assert not (tmp_path / "out").exists()


def test_kimi_k2_is_read_as_the_deepseek_that_it_is(saved, measured, tmp_path):
    shutil.copytree(saved, tmp_path / "kimi")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    code |= {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    edit_json(tmp_path / "kimi" / "config.json", model_type="kimi_k2", auto_map=code)
    run(str(tmp_path / "kimi"), JOB, tmp_path / "out")
    kimi, deepseek = load_stats(tmp_path / "out"), load_stats(measured)
    assert kimi.latent
    by_head = deepseek.amax_by_head()
    for name, layer in deepseek.layers.items():
        amax = layer.join_latent().amax
        assert torch.equal(kimi.layers[name].join_latent().amax, amax)
        assert by_head[layer.layer_idx, "k"] == by_head[layer.layer_idx, "v"] == (float(amax.max()),)


def test_statistics_that_call_latents_k_and_v_fit_no_model_with_latents(saved, measured, tmp_path):
    wrong = tmp_path / "wrong"
    shutil.copytree(measured, wrong)
    with safe_open(measured / STATS_FILE, framework="pt") as file:
        tensors = {
            name.replace(".latent.", ".k.").replace(".k_pe.", ".v."): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
        }
        save_file(tensors, wrong / STATS_FILE, file.metadata())
    assert not load_stats(wrong).latent
    done = fp8kv("generate", saved, "w4 w5", "--scales", wrong)
    one_line_error(done, "layer 0 has a cache of K and V, and latents in", status=2)
