"""Names of scale tensors, as each tool writes them."""

import pytest

from calib.files.names import parse_scale_name

ATTENTION = "model.layers.7.self_attn"


@pytest.mark.parametrize(
    ("name", "letters", "dialect"),
    [
        (f"{ATTENTION}.k_scale", "k", "compressed-tensors"),
        (f"{ATTENTION}.v_scale", "v", "compressed-tensors"),
        (f"{ATTENTION}.q_scale", "q", "compressed-tensors"),
        (f"{ATTENTION}.attn.k_scale", "k", "compressed-tensors"),
        (f"{ATTENTION}.kv_scale", "kv", "kv_scale"),
        (f"{ATTENTION}.k_proj.k_scale", "k", "modelopt"),
        (f"{ATTENTION}.v_proj.v_scale", "v", "modelopt"),
        (f"{ATTENTION}.qkv_proj.k_scale", "k", "fused"),
        (f"{ATTENTION}.qkv_proj.v_scale", "v", "fused"),
        (f"{ATTENTION}.k_proj.output_scale", "k", "quark"),
        (f"{ATTENTION}.q_proj.output_scale", "q", "quark"),
        (f"{ATTENTION}.k_cache.scale", "k", "hy"),
        (f"{ATTENTION}.q.scale", "q", "hy"),
        ("transformer.layers.7.attention.kv_cache_scaling_factor", "kv", "tensorrt-llm"),
        ("transformer.layers.7.attention.v_cache_scaling_factor", "v", "tensorrt-llm"),
        ("model.language_model.layers.7.self_attn.k_scale", "k", "compressed-tensors"),
        ("language_model.model.layers.7.self_attn.qkv_proj.k_scale", "k", "fused"),
        ("transformer.h.7.attn.k_scale", "k", "compressed-tensors"),
    ],
)
def test_a_scale_is_known(name, letters, dialect):
    found = parse_scale_name(name)
    assert (found.layer, found.letters, found.dialect) == (7, letters, dialect)
    assert name.startswith(found.module)


@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}.k_proj.weight",
        f"{ATTENTION}.k_proj.weight_scale",
        f"{ATTENTION}.k_proj.input_scale",
        f"{ATTENTION}.o_proj.output_scale",
        f"{ATTENTION}.k_zero_point",
        f"{ATTENTION}.prob_output_scale",
        "lm_head.k_scale",
        "k_scale",
        ".k_scale",
        "",
        f"{ATTENTION}.k_scale\n",
    ],
)
def test_what_is_none_is_left_alone(name):
    assert parse_scale_name(name) is None
