"""Scales go under the checkpoint's own names, and never under a vision tower's."""

import pytest

from calib.errors import UnsupportedExportError

VISION = [f"vision_tower.vision_model.encoder.layers.{i}.self_attn.k_proj.weight" for i in range(2)]


@pytest.mark.parametrize(
    ("prefix", "module"),
    [
        ("model.layers.1.self_attn", "model.layers.1.self_attn"),
        ("language_model.model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
        ("model.language_model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
        ("transformer.h.1.attn", "transformer.h.1.attn"),
        ("model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
    ],
)
def test_the_prefix_is_the_checkpoints_own(prefix, module, make_checkpoint):
    names = [f"{prefix}.k_proj.weight", f"{prefix.replace('1', '11')}.k_proj.weight", *VISION]
    assert make_checkpoint(names=names).attention_prefix(module) == prefix


@pytest.mark.parametrize("tower", ["vision_model.model", "audio_tower", "vision_tower.model"])
@pytest.mark.parametrize("text", ["language_model.model", "language_model"])
def test_a_tower_with_the_same_layer_names_is_never_taken(text, tower, make_checkpoint):
    names = [f"{side}.layers.0.self_attn.k_proj.weight" for side in (text, tower)]
    found = make_checkpoint(names=names).attention_prefix("model.layers.0.self_attn")
    assert found == f"{text}.layers.0.self_attn"


def test_a_layer_the_checkpoint_lacks_is_an_error(make_checkpoint):
    with pytest.raises(UnsupportedExportError, match=r"belong to model.layers.7.self_attn"):
        make_checkpoint().attention_prefix("model.layers.7.self_attn")


def test_two_equally_good_prefixes_are_an_error(make_checkpoint):
    names = [f"{side}.layers.0.self_attn.k_proj.weight" for side in ("left", "right")]
    with pytest.raises(UnsupportedExportError, match="left.layers.0.self_attn and right"):
        make_checkpoint(names=names).attention_prefix("model.layers.0.self_attn")
