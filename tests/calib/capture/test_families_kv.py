"""Measured amax of K and V is that of the cache which the whole model fills, for every family.

Run as a script it prints a line for each family.
"""

import sys

import pytest
import torch
from families import FAMILIES, HYBRIDS, LATENT, SHARED_KV, tiny_model, tiny_vision_language_model

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import UnsupportedModelError
from calib.recipe import load_recipe

_WINDOW = {"sliding_window": 64}  # wider than the samples, so that the cache holds all of them
_SECTIONS = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}

_WITHOUT_OPTIONS = [
    *("afmoe", "apertus", "arcee", "biogpt", "bitnet", "cohere", "ctrl", "cwm", "doge", "ernie4_5"),
    *("exaone4", "exaone_moe", "flex_olmo", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode"),
    *(
        "granitemoe",
        "granitemoeshared",
        "hyperclovax",
        "jais2",
        "lfm2",
        "llama4_text",
        "minimax_m2",
    ),
    *("ministral3", "nanochat", "nemotron", "olmo", "olmo3", "olmoe", "opt", "persimmon", "phi"),
    *("seed_oss", "smollm3", "stablelm", "vaultgemma"),
]
CAUSAL = {
    **{family: {**options, **_WINDOW} for family, options in FAMILIES.items()},
    **HYBRIDS,
    **LATENT,
    "gemma3n_text": {**SHARED_KV, **_WINDOW},
    **{family: {} for family in _WITHOUT_OPTIONS},
}
SEEING = {
    "aya_vision": {"model_type": "cohere2", **_WINDOW},
    "gemma3": _WINDOW,
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "llama4": {},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "mistral3": {"model_type": "mistral", **_WINDOW},
    "paligemma": {},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _SECTIONS),
}
REFUSED = {
    "bloom": "call neither transformers' attention interface nor scaled_dot_product_attention",
    "diffllama": "changes K or V after they are cached",
    "gpt_neox_japanese": "call neither transformers' attention interface",
    "jetmoe": "changes K or V after they are cached",
    "mpt": "call neither transformers' attention interface nor scaled_dot_product_attention",
    "xglm": "call neither transformers' attention interface nor scaled_dot_product_attention",
}
_GENERATOR = torch.Generator().manual_seed(1)
_SAMPLES = [[1, *torch.randint(3, 110, (length,), generator=_GENERATOR).tolist()] for length in (24, 22)]
RECIPE = load_recipe(None, {"device": "cpu", "targets": "kv"})


def models():
    """Name of each family, and what builds a model with realistic weights."""
    for family, options in CAUSAL.items():
        layers = {} if "layer_types" in options else {"num_hidden_layers": 2}
        yield family, lambda f=family, o=layers | options: tiny_model(f, **o)
    for family, options in SEEING.items():
        yield family, lambda f=family, o=options: tiny_vision_language_model(f, **o)


@torch.inference_mode()
def wrong_layers(model):
    """Layers and letters whose measured amax is not that of the cache, per head and channel."""
    (batch,) = make_batches(_SAMPLES, 2, pad_id=0)
    stats = calibrate(model, [batch], RECIPE)
    cache = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=True)
    tokens, wrong = batch.attention_mask.bool(), []
    for layer in stats.layers.values():
        stored = cache.past_key_values.layers[layer.layer_idx]
        for letter, of, held in (("K", layer.k, stored.keys), ("V", layer.v, stored.values)):
            amax = held.transpose(1, 2)[tokens].abs().amax(0)
            repeats = len(amax) // len(of.amax)  # Falcon's cache holds each KV head several times
            if not torch.equal(amax[::repeats], of.amax):
                wrong.append(f"{letter} of layer {layer.layer_idx}")
    assert stats.layers
    return wrong


def verdict(build):
    """`right`, or what is wrong."""
    try:
        return ", ".join(wrong_layers(build())) or "right"
    except UnsupportedModelError as error:
        return f"refused: {error}"


def test_measured_amax_is_that_of_the_cache_that_the_whole_model_fills():
    verdicts = {family: verdict(build) for family, build in models()}
    assert {family: found for family, found in verdicts.items() if found != "right"} == {}
    assert len(verdicts) >= 80


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_observed_is_refused(family):
    assert REFUSED[family] in verdict(lambda: tiny_model(family, num_hidden_layers=2))


def test_the_decoder_reads_for_a_model_that_takes_no_text_alone(monkeypatch):
    model = tiny_vision_language_model("llava", model_type="llama")
    assert map_attention(model).reader == "model"

    def forward(self, input_ids, pixel_values, **kwargs):
        raise AssertionError("an image is missing before anything runs")

    monkeypatch.setattr(type(model.base_model), "forward", forward)
    assert map_attention(model).reader == "model.language_model"


if __name__ == "__main__":
    refused = ((family, lambda f=family: tiny_model(f)) for family in REFUSED)
    for name, build in [*models(), *refused]:
        sys.stdout.write(f"{name} | {verdict(build)}\n")
