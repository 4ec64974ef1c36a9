"""Channels that RoPE turns together, found by trying, and models that mix K in other ways."""

import pytest
import torch
from baking import OTHERS, bake, calibrated
from command_line import one_line_error, ran
from families import FAMILIES, save_model, tiny_model

from calib.errors import UnsupportedModelError
from calib.models.sources import find_model
from calib.rescale import rope_pairs
from calib.rescale.bake import baked_factors
from calib.rescale.rope_pairs import rotated_pairs
from calib.rescale.weight_changes import cached_attention
from calib.scales.stats_file import load_stats

SLOW = {"rope_theta": 1e13, "rope_type": "default", "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        ("llama", {}, [*range(8, 16), *range(8)]),
        # norms with weights of 0.3 beside 60: in bfloat16 the second hides the first
        ("gemma3_text", {}, [*range(12, 24), *range(12)]),
        ("glm4", {"rope_parameters": SLOW, "max_position_embeddings": 2**20},
         [1, 0, 3, 2, 5, 4, 7, 6, *range(8, 16)]),
        ("gpt_neox", {}, [2, 3, 0, 1, *range(4, 16)]),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, [*range(16)]),
    ],
)  # fmt: skip
def test_pairs_are_found_by_trying(model_type, options, expected):
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(model_type, **(FAMILIES | OTHERS | {"smollm3": {}})[model_type] | options).to(
            dtype
        )
        for module in cached_attention(model).values():
            assert rotated_pairs(model, module).tolist() == expected


def test_wrong_pairs_are_not_proved(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(rope_pairs, "rotated_pairs", lambda *_: torch.arange(16) ^ 1)
    done = bake(llama.source, llama.scales, tmp_path / "baked", "--for", "int8")
    one_line_error(done, "cannot be baked: K of model.layers.0", "Nothing was written")
    assert not (tmp_path / "baked").exists()


@pytest.mark.parametrize("head_dim", [6, 80])  # no powers of two, nor K mixed by RoPE alone
def test_channels_that_a_norm_mixes_behind_rope(head_dim, tmp_path):
    model = tiny_model("llama4_text", head_dim=head_dim).to(torch.bfloat16)
    source = save_model(model, tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    refusal = "mixes channels of K in another way than RoPE's pairs"
    one_line_error(bake(source, scales, tmp_path / "out", "--for", "int8"), refusal)
    with pytest.raises(UnsupportedModelError, match=refusal):
        baked_factors(model.float(), find_model(str(source)), load_stats(scales), "int8")
    for cache in ("int4_per_token_head", "lmdeploy_int4"):
        ran("generate", source, "w5", "--cache", cache, "--max-new-tokens", 2)
