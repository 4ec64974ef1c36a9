"""A layer that drafts tokens (MTP) gets scales of its own, under the names that engines' classes load."""

import pytest
import torch
from command_line import SMALL, fp8kv, ran
from drafts import Drafting
from families import edit_json
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from calib.capture.attention import map_attention
from calib.capture.draft import add_draft_layer
from calib.capture.loop import calibrate
from calib.files.model_directory import open_model_directory
from calib.files.names import INDEX_FILE, SCALES_SHARD
from calib.recipe import Recipe

IDS = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(0))
# format and name of its scales
WRITTEN = {
    "deepseek_v3": ("modelopt", "model.layers.3.self_attn.{x}_proj.{x}_scale"),
    "glm4_moe": ("vllm", "model.layers.3.self_attn.attn.{x}_scale"),
    "qwen3_next": ("sglang", "mtp.layers.0.self_attn.{x}_proj.{x}_scale"),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_amax_is_that_of_the_layers_own_cache_and_its_scales_are_written_where_engines_look(family, tmp_path):
    drafting = Drafting(family, tmp_path / "model")
    model, checkpoint = drafting.model, open_model_directory(tmp_path / "model")
    attention = add_draft_layer(map_attention(model), model, checkpoint)
    (module,), (form, name) = checkpoint.draft_modules, WRITTEN[family]
    for ids in (IDS, IDS[:, :2]):  # of few tokens the first may be the largest
        layer = calibrate(model, [ids], Recipe(), attention=attention).layers[module]
        drafting.run(ids, cache := DynamicCache(), "next" if family == "qwen3_next" else "zero")
        for part, tensor in ((layer.k, cache.layers[0].keys), (layer.v, cache.layers[0].values)):
            assert torch.equal(part.amax, tensor.abs().amax((0, 2)))
    for offload in ("none", "layerwise"):
        output = tmp_path / offload
        command = ("calibrate", checkpoint.path, "-o", output, *SMALL, "--offload", offload, "--format", form)
        assert f"{module} drafts tokens: K amax" in ran(*command).stdout
    scales, again = (load_file(tmp_path / x / SCALES_SHARD) for x in ("none", "layerwise"))
    assert scales == again
    assert {name.format(x=x) for x in "kv"} < scales.keys()
    verified = fp8kv("verify", output, "--engine", "sglang" if form == "sglang" else "vllm").stdout
    assert "the layer that drafts tokens (MTP) loads its scales" in " ".join(verified.split())


class Rounded(DynamicCache):
    """An FP8 cache with a scale for K and one for V."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales

    def update(self, *tensors_and_layer):
        tensors = zip(tensors_and_layer[:2], self.scales, strict=True)
        rounded = (((x / s).clamp(-448, 448).to(torch.float8_e4m3fn)).float() * s for x, s in tensors)
        return super().update(*rounded, tensors_and_layer[2])


@torch.no_grad()
def plant(model, join):
    """Make the draft the model's one layer, which reads the embedding alone; its K is 64 times as large."""
    embeddings, (first, draft) = model.get_input_embeddings().weight, model.model.layers
    embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)
    first.self_attn.o_proj.weight *= 16  # so that attention decides what comes next
    draft.load_state_dict(first.state_dict())
    attention, size = draft.self_attn, embeddings.shape[1]
    join["enorm"].weight.fill_(1)
    join["eh_proj"].weight.copy_(torch.eye(size, 2 * size))
    if hasattr(attention, "kv_b_proj"):
        larger, smaller = [attention.kv_a_layernorm.weight], [attention.kv_b_proj.weight]
    else:
        larger, smaller = (list(x.parameters()) for x in (attention.k_proj, attention.q_proj))
    for factor, weights in ((64, larger), (1 / 64, smaller)):
        for weight in weights:
            weight *= factor


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_draft_with_a_planted_k_keeps_its_acceptance_with_its_own_scale_and_loses_it_at_one(
    family, tmp_path
):
    options = {"num_hidden_layers": 2, "first_k_dense_replace": 0, "use_qk_norm": False}
    drafting, (form, name) = Drafting(family, tmp_path / "model", plant, **options), WRITTEN[family]
    model, output = drafting.model, tmp_path / "out"
    ran("calibrate", tmp_path / "model", "-o", output, *SMALL, "--samples", 64, "--format", form)
    scales = load_file(output / SCALES_SHARD)
    own = [scales[name.replace("3", "1", 1).format(x=x)].item() for x in "kv"]
    chosen = model(IDS).logits.argmax(-1)

    def acceptance(cache):
        drafted = model.lm_head(model.model.norm(drafting.run(IDS, cache, "next"))).argmax(-1)
        return (drafted == chosen)[:, 1:].float().mean().item()

    in_16_bits, with_own, at_one = map(acceptance, (DynamicCache(), Rounded(own), Rounded((1.0, 1.0))))
    assert in_16_bits > 0.9
    assert at_one < 0.65 * in_16_bits < in_16_bits - 0.05 < with_own


def test_what_nobody_is_known_to_load_is_said_and_not_written(tmp_path):
    directory, output = Drafting("glm4_moe", tmp_path / "model").directory, tmp_path / "out"

    def calibrated(*flags):
        said = ran("calibrate", directory, "-o", output, *SMALL, "--overwrite", *flags).stdout
        return " ".join(said.split()), [n for n in load_file(output / SCALES_SHARD) if ".3." in n]

    assert len(calibrated()[1]) == 2
    for file in (output / SCALES_SHARD, output / INDEX_FILE):  # names that stop vLLM's class: of equal length
        file.write_bytes(file.read_bytes().replace(b".3.self_attn.attn.", b".3.self_attn.qkv_."))
    said = " ".join(fp8kv("verify", output, "--engine", "vllm").stdout.split())
    assert "of a layer that drafts tokens (MTP), is not known to load: it works at 1.0" in said
    weights, reason = load_file(directory / "model.safetensors"), "not measured, and work at scale 1.0: "
    second = {n.replace("layers.3.", "layers.4."): x.clone() for n, x in weights.items() if "layers.3." in n}
    for name, more, form, expected in (
        ("Glm4Moe", {}, "vllm-nvfp4", "vLLM is not known to load scales of model.layers.3.self_attn"),
        ("Glm4Moe", second, "vllm", f"{reason}there are 2, and what the second reads is not known"),
        ("My", {}, "vllm", f"{reason}under which names engines load scales of those of MyForCausalLM is"),
    ):
        save_file(weights | more, directory / "model.safetensors", {"format": "pt"})
        changes = {"architectures": [f"{name}ForCausalLM"], "num_nextn_predict_layers": 1 + bool(more)}
        edit_json(directory / "config.json", **changes)
        said, written = calibrated("--format", form)
        assert (expected in said, written) == (True, []), said
