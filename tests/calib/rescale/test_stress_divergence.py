"""Twins are garbage at 1.0; with their scales, or baked, they are as good as their source."""

import pydoc_data.topics

import latent_smollm2
import pytest
import torch
from baking import TOKENS, bake, calibrated, in_float32
from command_line import fp8kv
from fake_quant import measured_scales
from families import LATENT, save_model, tiny_model
from torch.nn.functional import kl_div
from transformers import AutoTokenizer

from calib.generate import unit_scales
from calib.models.sources import find_model
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf import fp8_attention


@pytest.fixture
def text(smollm2_directory):
    """A page of Python's documentation, as tokens."""
    page = pydoc_data.topics.topics["assert"]
    tokens = AutoTokenizer.from_pretrained(smollm2_directory)(page, return_tensors="pt")["input_ids"]
    assert tokens.shape[1] >= 128
    return tokens[:, :128]


def rounded(model, scales, tokens):
    with fp8_attention(model, scales or unit_scales(model), backend="torch"):
        return model(tokens).logits


def divergence(found, expected):
    logs = [x.log_softmax(-1).flatten(0, 1) for x in (found, expected)]
    return kl_div(*logs, log_target=True, reduction="batchmean").item()


@torch.inference_mode()
def test_one_scale_per_layer_makes_all_the_difference(tmp_path):
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(30)  # attention must matter
    source = save_model(model.bfloat16(), tmp_path / "source")
    twin, baked, flags = tmp_path / "twin", tmp_path / "baked", ("--format", "fp8kv")
    assert fp8kv("stress", source, "-o", twin).exit_code == 0
    scales = [calibrated(each, tmp_path / f"{each.name}-s", *flags) for each in (source, twin)]
    assert bake(twin, scales[1], baked, "--for", "fp8").exit_code == 0
    expected = in_float32(source)(TOKENS).logits

    def loss(directory, given=None):
        found = rounded(in_float32(directory), given and load_scales(given), TOKENS)
        return ((found - expected).norm() / expected.norm()).item()

    as_the_source = loss(source, scales[0])
    assert as_the_source < 0.1
    assert loss(twin) > 0.5
    # the same latents times a power of two, so the same rounding
    assert loss(twin, scales[1]) == as_the_source
    assert loss(baked) < 1.5 * as_the_source


@torch.inference_mode()
def test_on_a_real_model(smollm2_directory, text, tmp_path):
    done = fp8kv("stress", smollm2_directory, "-o", tmp_path / "twin")
    assert done.exit_code == 0, done.stderr
    source, twin = in_float32(smollm2_directory), in_float32(tmp_path / "twin")
    expected = source(text).logits
    assert torch.equal(expected, twin(text).logits)

    def loss(model, scales=None):
        return divergence(rounded(model, scales, text), expected)

    # the source does without: its K and V fit FP8 as they are
    assert loss(source) < 0.1
    assert loss(twin) > 1
    assert loss(twin, measured_scales(twin, text)) < 1.3 * loss(source, measured_scales(source, text))


@torch.inference_mode()
def test_on_a_real_model_with_latents(smollm2_directory, text, tmp_path, monkeypatch):
    # that it is SmolLM2 is tested beside the script
    same = {"logits": {1: 0.0}, "same_text": True}
    monkeypatch.setattr(latent_smollm2, "compare", lambda *_: same)
    source, twin, baked = (tmp_path / name for name in ("source", "twin", "baked"))
    latent_smollm2.write_latent_model(find_model(str(smollm2_directory)), source)
    assert fp8kv("stress", source, "-o", twin).exit_code == 0
    docs = ("--dataset", "builtin:python-docs", "--samples", "4", "--seq-len", "128")
    flags = (*docs, "--format", "fp8kv", "--device", "cpu", "--dtype", "float32")
    for each in (source, twin):
        assert fp8kv("calibrate", each, "-o", f"{each}-s", *flags).exit_code == 0
    assert bake(twin, f"{twin}-s", baked, "--for", "fp8").exit_code == 0
    expected = in_float32(source)(text).logits
    assert torch.equal(in_float32(twin)(text).logits, expected)

    def loss(directory, scales=None):
        found = rounded(in_float32(directory), scales and load_scales(tmp_path / scales), text)
        return divergence(found, expected)

    assert loss(source) < 0.1
    assert loss(twin) > 1
    calibrated_source = loss(source, "source-s")
    assert loss(twin, "twin-s") == calibrated_source
    assert loss(baked) < 1.3 * calibrated_source
