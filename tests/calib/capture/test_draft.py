"""A layer that drafts tokens (MTP) gets scales of its own, under the names that engines' classes load."""

from shutil import copytree

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error, ran
from families import HYBRIDS, LATENT, edit_json, save_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from calib.capture.attention import map_attention
from calib.capture.draft import add_draft_layer
from calib.capture.loop import calibrate
from calib.files.model_directory import open_model_directory
from calib.files.names import SCALES_SHARD, STATS_FILE
from calib.recipe import Recipe
from fp8kv_runtime.fp8 import dequantize, quantize

IDS = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(0))
_GLM = {"head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN = HYBRIDS["qwen3_next"] | {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}
_LATENT = "modelopt", "model.layers.3.self_attn.{x}_proj.{x}_scale"
FAMILIES = {  # options, the format, and the names of the draft's scales
    **{family: (LATENT[family], *_LATENT) for family in ("deepseek_v3", "glm4_moe_lite")},
    "glm4_moe": (_GLM | {"attention_bias": True}, "vllm", "model.layers.3.self_attn.attn.{x}_scale"),
    "qwen3_next": (_QWEN, "modelopt", "mtp.layers.0.self_attn.{x}_proj.{x}_scale"),
}
MTP = "deepseek_v3", {"first_k_dense_replace": 0}, *_LATENT
EAGLE = "llama", {}, "vllm", "layers.0.self_attn.{x}_scale"
JOINING = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}  # in Qwen3-Next


class Drafting:
    """A model saved with its draft, the layer behind its last, and that layer by itself."""

    def __init__(self, family, directory, change=lambda model, joining: None, **options):
        model = tiny_model(family, **{"num_hidden_layers": 4} | FAMILIES.get(family, [{}])[0] | options)
        *others, self.layer = model.model.layers
        count, place = len(others), f"model.layers.{len(others)}"
        size, norm = model.config.hidden_size, type(model.model.norm)
        parts = [norm(size, model.config.rms_norm_eps) for _ in "eh"]
        parts += [nn.Linear(2 * size, size, bias=False)]
        self.joining = nn.ModuleDict(zip(JOINING, parts, strict=True))
        for i, part in enumerate(parts):
            nn.init.normal_(part.weight, 0.5, 0.5, generator=torch.Generator().manual_seed(i))
        change(model, self.joining)
        save_model(model, directory)
        weights = load_file(directory / "model.safetensors")
        weights |= {f"{place}.{name}": x for name, x in self.joining.state_dict().items()}
        changes = {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
        if family == "qwen3_next":
            names = {f"{place}.{own}.weight": f"mtp.{name}.weight" for own, name in JOINING.items()}
            weights = {names.get(n, n).replace(place, "mtp.layers.0"): x for n, x in weights.items()}
            changes["num_nextn_predict_layers"] = None  # its config says nothing of them
        for key in ("layer_types", "mlp_layer_types"):
            changes |= {key: kinds[:count]} if (kinds := getattr(model.config, key, None)) else {}
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        edit_json(directory / "config.json", **changes)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.layer.self_attn.layer_idx, self.directory = 0, directory

    @torch.inference_mode()
    def run(self, ids, cache, zero_at_first):
        """Read ids [B, T] as engines do; in the place of token 0 is what vLLM reads at position 0."""
        embedded, hidden = self.model.get_input_embeddings()(ids), self.model.model(ids).last_hidden_state
        tokens = [(embedded[:, 1] * (not zero_at_first), hidden[:, 0], 0)]
        tokens += [(embedded[:, j], hidden[:, j - 1], j - 1) for j in range(1, ids.shape[1])]
        embedded, hidden = (torch.stack([token[i] for token in tokens], 1) for i in (0, 1))
        enorm, hnorm, project = self.joining.values()
        joined = project(torch.cat([enorm(embedded), hnorm(hidden)], -1))
        angles = self.model.model.rotary_emb(joined, torch.tensor([[token[2] for token in tokens]]))
        return self.layer(joined, position_embeddings=angles, past_key_values=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_amax_is_that_of_the_layers_own_cache_and_its_scales_are_written_where_engines_look(family, tmp_path):
    drafting, (_, form, name) = Drafting(family, tmp_path / "model"), FAMILIES[family]
    model, checkpoint = drafting.model, open_model_directory(tmp_path / "model")
    attention, (module,) = add_draft_layer(map_attention(model), model, checkpoint), checkpoint.draft_modules
    for ids in (IDS, IDS[:, :2]):  # of few tokens the first may be the largest
        layer = calibrate(model, [ids], Recipe(), attention=attention).layers[module]
        drafting.run(ids, cache := DynamicCache(), family != "qwen3_next")
        for part, tensor in ((layer.k, cache.layers[0].keys), (layer.v, cache.layers[0].values)):
            assert torch.equal(part.amax, tensor.abs().amax((0, 2)))
    for offload in ("none", "layerwise"):
        out = tmp_path / offload
        done = ran("calibrate", tmp_path / "model", "-o", out, *SMALL, "--format", form, "--offload", offload)
        assert f"{module} drafts tokens: K amax" in done.stdout
        assert f'"offload": "{offload}"' in (out / "fp8kv_calibration.json").read_text()
    for file in (SCALES_SHARD, STATS_FILE):
        assert (tmp_path / "none" / file).read_bytes() == (out / file).read_bytes()
    assert {name.format(x=x) for x in "kv"} < load_file(out / SCALES_SHARD).keys()
    for engine in ("vllm", "sglang"):
        is_loaded = engine == "vllm" or family == "qwen3_next"
        loads = "(MTP) loads its scales" if is_loaded else "(MTP), is not known to load: it works"
        assert loads in " ".join(fp8kv("verify", out, "--engine", engine).stdout.split())
    edit_json(tmp_path / "model" / "config.json", architectures=["MyForCausalLM"])
    done = ran("calibrate", tmp_path / "model", "-o", tmp_path / "mine", *SMALL, "--format", "fp8kv")
    assert "were not measured, and work at scale 1.0: under which names" in " ".join(done.stdout.split())


def test_a_draft_is_left_out_in_words_also_one_that_lacks_a_weight_or_holds_nan(tmp_path):
    file = Drafting("glm4_moe", tmp_path / "model").directory / "model.safetensors"
    one, two = tmp_path / "1", tmp_path / "2"
    for out in (one, two):
        ran("calibrate", file.parent, "-o", out, *SMALL, "--seed", out.name)
    for command, *given in (
        *(("convert", one, "--to", "vllm"), ("repair", one, "--stats", two)),
        *(("merge", one, two), ("apply", one, file.parent)),
    ):
        said = fp8kv(command, *given, "-o", tmp_path / command).output
        assert "of the layer that drafts tokens (MTP) are left out" in " ".join(said.split()), command
    name, weights, config = "model.layers.3.enorm.weight", load_file(file), file.with_name("config.json")
    edit_json(config, num_nextn_predict_layers=2)
    spoiled = {name: weights.pop(name) * torch.nan}
    for rest, why in (({}, "the files lack a weight of theirs"), (spoiled, "its K, V or Q hold NaN or Inf")):
        save_file(weights | rest, file, {"format": "pt"})
        for way in (("--offload", "none"), ("--offload", "layerwise"), ("--until", 1)):
            options = (*SMALL, "--samples", 64, "--overwrite", *way)
            said = " ".join(ran("calibrate", file.parent, "-o", one, *options).stdout.split())
            assert f"at scale 1.0: {why}" in said
            assert "num_nextn_predict_layers 2, and the files hold 1" in said
            assert len(load_file(one / SCALES_SHARD)) == 6
    edit_json(config, num_nextn_predict_layers=0)
    one_line_error(fp8kv("calibrate", file.parent, *SMALL), "mend the config (num_nextn_predict_layers")


def test_a_drafts_scales_are_checked_as_those_of_the_model_shown_and_compared(tmp_path):
    Drafting("glm4_moe", tmp_path / "m")
    formats = ("--format", "vllm", "--format", "modelopt")
    ran("calibrate", tmp_path / "m", "-o", tmp_path / "out", *SMALL, *formats)
    good, bad = (tmp_path / "out" / name for name in formats[1::2])
    scales = load_file(file := bad / SCALES_SHARD)
    k, v = (f"model.layers.3.self_attn.attn.{x}_scale" for x in "kv")
    for changes, problem in (
        ({k: scales[k] * torch.nan}, "K scales are NaN in layer 3 (draft)"),
        ({k: -scales[k], v: scales[v] * 0}, "V scales are zero in layer 3 (draft)"),
        ({v: scales[v] / 9}, "draft: 1 layer clips what was measured, layer 3 the most: its V is 9.00 times"),
        ({k: scales[k].repeat(3)}, "K has 3 scales in layer 3 (draft), but the model has 2 KV heads there"),
        ({k.replace("attn.attn", "attn"): scales[k] * 2}, "two values for the K scale of layer 3 (draft)"),
    ):
        save_file(scales | changes, file)
        done = fp8kv("verify", bad, "--engine", "vllm", "--against", good)
        assert (done.exit_code, f"problem: {problem}" in " ".join(done.stdout.split())) == (1, True)
    save_file({n: x * 2 for n, x in scales.items()}, file)
    for command in (("inspect", bad), ("verify", good, "--against", good)):
        assert "3 (draft)" in ran(*command).stdout
    lines = ran("compare", good, bad).stdout.splitlines()
    assert [[cell.strip() for cell in x.split("│")][4::3] for x in lines if "3 (draft)" in x] == [["2", "2"]]
    save_file({n.replace("attn.attn", "attn"): x for n, x in scales.items()}, file)
    done = fp8kv("verify", bad, "--engine", "vllm")  # whose class has no place under this name
    assert (done.exit_code, "with speculative decoding it does not start" in done.stdout) == (1, True)


class Rounded(DynamicCache):  # in FP8, with a scale for K and one for V
    def update(self, k, v, layer, *_, **__):
        k, v = (dequantize(quantize(x, s), s) for x, s in ((k, self.scales[0]), (v, self.scales[1])))
        return super().update(k, v, layer)


@torch.no_grad()
def plant(model, joining):
    """Make the draft the model's one layer, which reads embeddings alone; its keys are 64 times larger."""
    embeddings, (first, draft) = model.get_input_embeddings().weight, model.model.layers
    embeddings /= embeddings.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)
    first.self_attn.o_proj.weight *= 16  # so that attention decides what comes next
    if hasattr(first.self_attn, "k_proj"):  # of EAGLE, which lacks this norm
        first.input_layernorm.weight.fill_(1)
        first.self_attn.k_proj.weight *= 16
        first.self_attn.o_proj.weight *= 2
    draft.load_state_dict(first.state_dict())
    joining["enorm"].weight.fill_(1)
    joining["eh_proj"].weight.copy_(torch.eye(embeddings.shape[1], 2 * embeddings.shape[1]))
    parts = dict(draft.self_attn.named_children())
    parts.get("kv_a_layernorm", parts.get("k_proj")).weight *= 64
    parts.get("kv_b_proj", parts.get("q_proj")).weight /= 64


@pytest.mark.parametrize("kind", [MTP, EAGLE])
def test_a_draft_of_planted_keys_keeps_its_acceptance_at_its_own_scale_and_not_at_one(kind, tmp_path):
    (family, options, form, name), place = kind, tmp_path / "drafter"
    drafting = Drafting(family, tmp_path / "m", plant, num_hidden_layers=2, **options)
    model, flags = drafting.model, (*SMALL, "--samples", 64, "--format", form)
    if kind is EAGLE:
        edit_json(copytree(tmp_path / "m", place) / "config.json", architectures=["EagleLlamaForCausalLM"])
        own = {f"layers.0.self_attn.{n}": x for n, x in drafting.layer.self_attn.state_dict().items()}
        save_file(own | {"fc.weight": drafting.joining["eh_proj"].weight}, place / "model.safetensors")
        flags += "--draft", place
    ran("calibrate", tmp_path / "m", "-o", tmp_path / "out", *flags)
    scales, chosen, accepted = load_file(tmp_path / "out" / SCALES_SHARD), model(IDS).logits.argmax(-1), []
    own = [scales[name.replace("s.3", "s.1").format(x=x)] for x in "kv"]
    for cache, cache_scales in ((DynamicCache(), ()), (Rounded(), own), (Rounded(), [torch.ones(1)] * 2)):
        cache.scales = cache_scales
        drafted = model.lm_head(model.model.norm(drafting.run(IDS, cache, False))).argmax(-1)
        accepted.append((drafted == chosen)[:, 1:].float().mean().item())
    in_16_bits, with_own, at_one = accepted
    assert at_one < 0.65 * in_16_bits < 0.85 < 0.95 * in_16_bits < with_own
