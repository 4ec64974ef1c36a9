"""Names: of scale tensors, as each tool writes them, and of attention modules in a checkpoint."""

import pytest

from calib.errors import UnsupportedExportError
from calib.files.names import parse_scale_name

ATTENTION = "model.layers.7.self_attn"
VISION = [f"vision_tower.vision_model.encoder.layers.{i}.self_attn.k_proj.weight" for i in range(2)]


@pytest.mark.parametrize(
    ("name", "letters", "dialect"),
    [
        (f"{ATTENTION}.q_scale", "q", "compressed-tensors"),
        (f"{ATTENTION}.attn.v_scale", "v", "compressed-tensors"),
        (f"{ATTENTION}.kv_scale", "kv", "kv_scale"),
        (f"{ATTENTION}.v_proj.v_scale", "v", "modelopt"),
        ("language_model.model.layers.7.self_attn.qkv_proj.k_scale", "k", "fused"),
        (f"{ATTENTION}.k_proj.output_scale", "k", "quark"),
        (f"{ATTENTION}.q_proj.output_scale", "q", "quark"),
        (f"{ATTENTION}.k_cache.scale", "k", "hy"),
        (f"{ATTENTION}.q.scale", "q", "hy"),
        ("transformer.layers.7.attention.kv_cache_scaling_factor", "kv", "tensorrt-llm"),
        ("transformer.layers.7.attention.v_cache_scaling_factor", "v", "tensorrt-llm"),
        ("transformer.h.7.attn.k_scale", "k", "compressed-tensors"),
    ],
)
def test_a_scale_is_known(name, letters, dialect):
    found = parse_scale_name(name)
    assert (found.layer, found.letters, found.dialect) == (7, letters, dialect)
    assert name.startswith(found.module)


def test_what_is_none_is_left_alone():
    others = ("k_proj.weight", "k_proj.weight_scale", "o_proj.output_scale", "k_zero_point", "k_scale\n")
    for name in (*(f"{ATTENTION}.{x}" for x in others), "lm_head.k_scale", ".k_scale", ""):
        assert parse_scale_name(name) is None


@pytest.mark.parametrize(
    ("prefix", "module"),
    [
        ("model.layers.1.self_attn", "model.layers.1.self_attn"),
        ("language_model.model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
        ("transformer.h.1.attn", "transformer.h.1.attn"),
        ("model.layers.1.self_attn", "model.language_model.layers.1.self_attn"),
    ],
)
def test_the_prefix_is_the_checkpoints_own(prefix, module, make_checkpoint):
    names = [f"{prefix}.k_proj.weight", f"{prefix.replace('1', '11')}.k_proj.weight", *VISION]
    assert make_checkpoint(names=names).attention_prefix(module) == prefix


def test_a_tower_is_never_taken_and_a_layer_that_is_missing_or_there_twice_is_an_error(make_checkpoint):
    def prefix(*sides, module="model.layers.0.self_attn"):
        names = [f"{side}.layers.0.self_attn.k_proj.weight" for side in sides]
        return make_checkpoint(names=names).attention_prefix(module)

    for tower in ("vision_model.model", "audio_tower", "vision_tower.model"):
        for text in ("language_model.model", "language_model"):
            assert prefix(text, tower) == f"{text}.layers.0.self_attn"
    with pytest.raises(UnsupportedExportError, match=r"belong to model.layers.7.self_attn"):
        prefix("model", module="model.layers.7.self_attn")
    with pytest.raises(UnsupportedExportError, match="left.layers.0.self_attn and right"):
        prefix("left", "right")
