"""The measurement: exact, place by place, blind to padding, precise about bad numbers; latents (MLA) too."""

import shutil
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from command_line import calibrate as calibrate_command
from command_line import fp8kv, one_line_error
from families import FAMILIES, LATENT, edit_json, mixed_model, save_model, tiny_model
from transformers import DynamicCache

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate, singles
from calib.capture.reductions import CpuReductions, GpuReductions
from calib.data import make_batches
from calib.errors import CalibrationError, InputError
from calib.files.names import STATS_FILE
from calib.job import run
from calib.recipe import load_recipe
from calib.scales.observers import NUM_BINS
from calib.scales.places import BUCKETS, POSITION_BUCKETS
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_stats, save_stats

GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 24, 23, 11, 7)]
RECIPE = load_recipe(None)


def batches(size=2, skip_first=0):
    return make_batches(SAMPLES, size, pad_id=0, skip_first=skip_first)


@torch.inference_mode()
def cached(model, batches, cache_config=None):
    """Of each sample as it is read, K and V [H, T, D] of each layer, without padding."""
    for batch in batches:
        # without a config a cache holds all tokens, also of layers with a window
        cache = DynamicCache(config=cache_config)
        model(batch.input_ids, attention_mask=batch.attention_mask, past_key_values=cache)
        for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
            yield [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in cache.layers]


def test_histograms_and_means_are_those_of_the_tokens_in_the_cache_that_are_not_skipped():
    model = tiny_model("llama")
    recipe = load_recipe(None, {"observer.name": "mse", "means": True, "targets": "qkv"})
    stats = calibrate(model, batches(skip_first=4), recipe)
    held = [*cached(model, batches())]
    for i, layer in enumerate(stats.layers.values()):
        keys, values = (torch.cat([x[i][n][:, 4:] for x in held], dim=1).transpose(0, 1) for n in (0, 1))
        assert (layer.tokens, layer.tokens_read) == (len(keys), len(keys) + 5 * 4) == (69, 89)
        assert torch.equal(layer.k.amax, keys.abs().amax(0))
        assert torch.equal(layer.k.histogram, CpuReductions().histogram(keys))
        assert torch.equal(layer.v.histogram, CpuReductions().histogram(values))
        # every batch's sum is rounded to a multiple of 2**-20
        torch.testing.assert_close(layer.k.total, keys.double().sum(0), rtol=0, atol=len(SAMPLES) * 2**-21)
        assert torch.equal(layer.k.low, keys.amin(0))
        assert torch.equal(layer.k.high, keys.amax(0))
        assert layer.q.low is None
        assert layer.q.histogram.shape == (4, NUM_BINS)
        assert {x.histogram.sum(-1).unique().item() for x in (layer.k, layer.v, layer.q)} == {69 * 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_reduces_to_the_numbers_of_a_cpu_and_reads_nothing_back(dtype):
    x = (torch.randn(3, 2, 40, 8, generator=GENERATOR) * 9).to(dtype).transpose(1, 2).flatten(0, 1)
    x[5, 1, 3], buckets = torch.nan, torch.arange(120) // 50
    cpu, gpu = CpuReductions(), GpuReductions()
    wanted = cpu.amax(x, with_tokens=True)
    with torch.profiler.profile() as profile:
        channels, heads = gpu.amax(x, with_tokens=True)
        by_bucket, histogram = gpu.bucket_amax(heads, buckets, 4), gpu.histogram(x)
    operations = {event.key for event in profile.key_averages()}
    assert operations.isdisjoint({"aten::_local_scalar_dense", "aten::bincount", "aten::nonzero"})
    pairs = [*zip((channels, heads), wanted, strict=True), (histogram, cpu.histogram(x))]
    for one, two in [*pairs, (by_bucket, cpu.bucket_amax(heads, buckets, 4))]:
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    assert (by_bucket[:, 3] == 0).all()
    assert gpu.amax(x, with_tokens=False)[1] is None


@pytest.mark.parametrize(
    ("family", "size", "skip_first"),
    [("llama", 1, 0), ("gemma2", 2, 0), ("falcon", 2, 5), ("deepseek_v3", 2, 5)],
)
def test_curve_and_positions_are_those_of_the_caches(family, size, skip_first):
    model = tiny_model(family, **(FAMILIES | LATENT)[family])
    read_batches = batches(size, skip_first)
    stats, tables, read = calibrate(model, read_batches, RECIPE), {}, 0
    for sample in cached(model, read_batches, model.config if family in LATENT else None):
        for i, layer in enumerate(sample):
            for letter, x in zip("kv", layer, strict=True):
                made = [torch.zeros(len(x), count) for count in (BUCKETS, POSITION_BUCKETS)]
                curve, positions = tables.setdefault((i, letter), made)
                for t in range(skip_first, x.shape[1]):
                    largest = x[:, t].abs().amax(-1).float()
                    for table, place in ((curve, read + t), (positions, t)):
                        at = (place + 1).bit_length() - 1  # how often it can be halved, from 1
                        table[:, at] = torch.maximum(table[:, at], largest)
        read += sample[0][0].shape[1]
    for i, layer in enumerate(stats.layers.values()):
        assert layer.tokens_read == read
        assert layer.q.curve is layer.q.positions is None
        for letter in "kv":
            found, (curve, positions) = getattr(layer, letter), tables[i, letter]
            repeat = len(curve) // len(found.curve)
            assert torch.equal(found.curve, curve[::repeat])
            assert torch.equal(found.positions, positions[::repeat])
            assert torch.equal(found.curve.amax(1), found.amax.amax(1))
    assert stats.tokens == sum(len(sample) - skip_first for sample in SAMPLES)
    if family in LATENT:
        both = next(iter(stats.layers.values())).join_latent()
        assert torch.equal(both.positions.amax(1), both.amax.amax(1))


def test_nothing_behind_the_last_k_and_v_is_computed_and_training_modes_come_back():
    model, seen = tiny_model("llama").train(), []
    model.model.norm.eval()
    mapped, modes = map_attention(model), [module.training for module in model.modules()]
    for unused in (model.lm_head, model.model.layers[-1].self_attn.o_proj):
        unused.register_forward_hook(lambda *_: pytest.fail("it ran for nothing"))
    calibrate(model, batches(), RECIPE, attention=mapped, on_batch=lambda b, _: seen.append(b.num_tokens))
    # the largest first, the others in any order
    assert (seen[0], sorted(seen)) == (48, [7, 11, 23, 48])
    assert [module.training for module in model.modules()] == modes

    def stop(*_):
        raise InputError("stopped inside the loop")

    with pytest.raises(InputError, match="stopped inside the loop"):
        calibrate(model, batches(), RECIPE, attention=mapped, on_batch=stop)
    assert [module.training for module in model.modules()] == modes


def test_a_model_with_offloaded_weights_runs_to_its_end():
    model, plain = tiny_model("llama"), tiny_model("llama")
    cpu_offload(model, execution_device="cpu")
    found, expected = calibrate(model, batches(), RECIPE), calibrate(plain, batches(), RECIPE)
    for one, other in zip(found.layers.values(), expected.layers.values(), strict=True):
        assert torch.equal(one.k.amax, other.k.amax)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_bad_numbers_are_named_by_layer_tensor_and_sample():
    assert [(x.sample_ids, x.skip_first) for x in singles(batches(skip_first=3)[0])] == [((0,), 3), ((1,), 3)]
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = 3e38
    with pytest.raises(CalibrationError, match=r"model.layers.1.self_attn: V .* in sample 0 of those read;"):
        calibrate(model, batches(1), RECIPE)
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
        model.model.layers[1].self_attn.v_proj.weight[0] = 0
    samples = [[5, 6, 7], [8, 9, 10], [11, 77, 12], [13, 14, 15]]
    with pytest.raises(CalibrationError, match=r"model.layers.0.self_attn: K .* in sample 2 of those read;"):
        calibrate(model, make_batches(samples, 4, pad_id=0), RECIPE)


MSE = load_recipe(None, {"observer.name": "mse"})
RANDOM = {"data.dataset": "random", "data.samples": 6, "data.seq_len": 24}
JOB = load_recipe(None, {**RANDOM, "device": "cpu", "observer.name": "mse", "export.formats": ("fp8kv",)})


def test_an_observer_sees_latent_and_k_pe_as_one():
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    with torch.no_grad():  # of the last layer k_pe is the larger one
        model.model.layers[-1].self_attn.kv_a_proj_with_mqa.weight[16:] *= 4096
    stats = calibrate(model, batches(), MSE)
    for layer in stats.layers.values():
        both = layer.join_latent()
        assert both.amax.max() == max(layer.k.amax.max(), layer.v.amax.max())
        assert both.histogram.sum() == layer.tokens * (16 + 8)
    absmax = derive_scales(stats, RECIPE).layers.values()
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
    stats = calibrate(mixed_model(), batches(), RECIPE)
    assert [layer.latent for layer in stats.layers.values()] == [True, False, True]
    first, plain, _ = derive_scales(stats, RECIPE).layers.values()
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
    stats = load_stats(measured)
    layers = {name: replace(layer, latent=False) for name, layer in stats.layers.items()}
    save_stats(replace(stats, layers=layers), wrong / STATS_FILE)
    assert not load_stats(wrong).latent
    done = fp8kv("generate", saved, "w4 w5", "--scales", wrong)
    one_line_error(done, "layer 0 has a cache of K and V, and latents in", status=2)
