"""A layer that drafts tokens (MTP) or a drafter (EAGLE) has scales of its own, named as engines load them."""

import json
import shlex
from shutil import copytree

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error, ran
from families import HYBRIDS, LATENT, edit_json, save_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear, rms_norm
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from calib.capture.attention import map_attention
from calib.capture.draft import MtpModel, add_draft_layer, layers_read, read_by_drafter
from calib.capture.loop import calibrate
from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.names import SCALES_SHARD, STATS_FILE
from calib.formats.card import serve_command
from calib.job import run
from calib.models import sources
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
        parts = [*(norm(size, model.config.rms_norm_eps) for _ in "eh"), nn.Linear(2 * size, size, False)]
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
    assert "were not measured, and work at scale 1.0: under which names" in " ".join(done.stderr.split())


def test_a_draft_is_left_out_in_words_also_one_that_lacks_a_weight_or_holds_nan(tmp_path, monkeypatch):
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
            said = " ".join(ran("calibrate", file.parent, "-o", one, *options).output.split())
            assert f"at scale 1.0: {why}" in said
            assert "num_nextn_predict_layers 2, and the files hold 1" in said
            assert len(load_file(one / SCALES_SHARD)) == 6
    monkeypatch.delattr(MtpModel, "get_weight_conversions")  # as before transformers 5.20
    assert " 5.20 on" in ran("calibrate", file.parent, "-o", one, *SMALL, "--overwrite").output
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


ROWS = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(0))
LAYERS = "eagle_aux_hidden_state_layer_ids"
NAMED = {LAYERS: [6, 0, 3], "eagle_config": {LAYERS: [6, 0, 3]}}
SPECIAL = {"use_aux_hidden_state": False, "dflash_config": {"target_layer_ids": [1]}, "pard_token": 0}
WRONG_LAYERS, TABLES = ([1, 2, 8], [True, 2, 3], [1, 2]), ("embed_tokens.weight", "lm_head.weight", "d2t")
SIZES = {"hidden_size": 64, "target_hidden_size": 64, "vocab_size": 128}
SPECIAL |= {"target_layer_ids": [1], "ptd_token_id": 0, "parallel_drafting": True, "layer_ids": [1]}
DRAFTERS = {  # the layers whose inputs it reads, settings, and what its scales are called before `k_scale`
    "EagleLlamaForCausalLM": ((), {}, {"vllm": "layers.0.self_attn."}),
    "LlamaForCausalLMEagle": ((), {}, {"sglang": "layers.0.self_attn."}),
    "LlamaForCausalLMEagle3": ((2, 4, 5), {}, {"vllm": "midlayer.self_attn.", "sglang": "self_attn.attn."}),
    "Eagle3LlamaForCausalLM": ((0, 3, 6), NAMED, {"vllm": "midlayer.self_attn."}),
}


def save_drafter(directory, name, family):
    """Save a model of 8 layers, and a drafter for it with norms far from 1; return it and the weights."""
    model, (layers, settings, _) = tiny_model(family, num_hidden_layers=8, head_dim=24), DRAFTERS[name]
    config = save_model(model, directory / "model") / "config.json"
    place, width = ("midlayer.", 128) if layers else ("layers.0.", 64)
    shapes = {f"{place}self_attn.{x}_proj": (24 * n, width) for x, n in {"q": 4, "k": 2, "v": 2}.items()}
    shapes |= {f"{place}{norm}": (64,) for norm in ("input_layernorm", "hidden_norm") if layers}
    shapes |= {"fc": (64, 64 * (len(layers) or 2))} | ({} if layers else {"embed_tokens": (128, 64)})
    generator = torch.Generator().manual_seed(1)
    weights = {f"{x}.weight": torch.randn(shape, generator=generator) for x, shape in shapes.items()}
    weights |= {"fc.bias": torch.randn(64, generator=generator)} if name.endswith("Eagle") else {}
    changes = {"architectures": [name], "model_type": "llama", "num_hidden_layers": 1, "layer_types": None}
    (file := directory / name / "config.json").parent.mkdir()
    file.write_text(json.dumps(json.loads(config.read_text()) | changes | settings))
    save_file(weights, file.with_name("model.safetensors"), {"format": "pt"})
    return model, weights


@torch.inference_mode()
def keys_and_values(model, weights, layers):
    """K and V of every position but the last, whose next token nobody has, by head."""
    out, place = model.model(ROWS, output_hidden_states=True), "midlayer" if layers else "layers.0"
    embeddings = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    embedded, states = embeddings[ROWS.roll(-1, 1)], [out.hidden_states[i] for i in layers]
    read = torch.cat(states or [embedded, out.last_hidden_state], -1)
    read = linear(read, weights["fc.weight"], weights.get("fc.bias"))
    if layers:
        parts, eps = {"input_layernorm": embedded, "hidden_norm": read}.items(), model.config.rms_norm_eps
        read = torch.cat([rms_norm(x, (64,), weights[f"{place}.{n}.weight"], eps) for n, x in parts], -1)
    k, v = (linear(read[:, :-1], weights[f"{place}.self_attn.{x}_proj.weight"]) for x in "kv")
    k, v = (x.view(4, 47, 2, 24).transpose(1, 2) for x in (k, v))
    angles = LlamaRotaryEmbedding(model.config)(k, torch.arange(47)[None])
    return apply_rotary_pos_emb(k, k, *angles)[1], v


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_amax_is_that_of_what_it_reads_of_its_model_and_its_scales_load(name, family, tmp_path):
    (own, weights), (layers, _, engines) = save_drafter(tmp_path, name, family), DRAFTERS[name]
    drafter = open_model_directory(tmp_path / name)
    read = layers_read(drafter, own.config, Recipe(export={"formats": [*engines][:1]}))
    attention = read_by_drafter(map_attention(own), own, drafter, read)
    (layer,) = calibrate(own, [ROWS], Recipe(), attention=attention).layers.values()
    for part, expected in zip((layer.k, layer.v), keys_and_values(own, weights, layers), strict=True):
        torch.testing.assert_close(part.amax, expected.abs().amax((0, 2)), rtol=1e-5, atol=1e-6)
    for engine, scale in engines.items():
        out, model, method = tmp_path / engine, tmp_path / "model", "eagle3" if layers else "eagle"
        said = ran("calibrate", model, "--draft", drafter.path, "-o", out, *SMALL, "--format", engine).stdout
        assert f'{{"method":"{method}","model":"{out}"' in said or f"-algorithm {method.upper()}" in said
        assert f" {model} --spec" in (out / "README.md").read_text()
        assert [x.endswith(f"{scale}k_scale") for x in sorted(load_file(out / SCALES_SHARD))] == [True, False]
        assert "1 of 1" in ran("verify", out, "--engine", engine, "--against", out).stdout


def test_the_command_that_serves_names_a_built_in_model_by_its_path_and_quotes_paths(tmp_path, monkeypatch):
    name, model, out = "EagleLlamaForCausalLM", tmp_path / "model", tmp_path / "it's \"a\\b"
    _, weights = save_drafter(tmp_path, name, "llama")
    monkeypatch.setattr(sources, "builtin_model", lambda _: model)
    recipe = Recipe(data={"dataset": "random", "samples": 2, "seq_len": 48, "allow_few_tokens": True})
    drafts_for = run("builtin:smollm2", recipe, out, draft=tmp_path / name).drafts_for
    for engine, flag in (("vllm", "--speculative-config"), ("sglang", "--speculative-draft-model-path")):
        words = shlex.split(serve_command(engine, out, "tensor", drafts_for=drafts_for))
        place = words[words.index(flag) + 1]
        assert str(model) in words
        assert str(out) == (json.loads(place)["model"] if engine == "vllm" else place)
    save_file(weights | {"fc.bias": torch.ones(64)}, tmp_path / name / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="not as its config says: its files hold fc.bias, and its"):
        run(str(model), recipe, tmp_path / "other", draft=tmp_path / name)


def test_a_drafter_that_is_not_known_or_is_another_models_is_refused(tmp_path):
    _, weights = save_drafter(tmp_path, name := "LlamaForCausalLMEagle3", "qwen3")
    path, model = tmp_path / name, tmp_path / "model"
    config, command = json.loads((path / "config.json").read_text()), ("calibrate", model, "--draft", path)
    for changes, options, problem in (
        ({"architectures": ["MyEagle3"]}, (), "--format vllm is not known to load scales of a drafter MyE"),
        ({}, ("--format", "vllm-nvfp4"), "--format vllm-nvfp4 is not known to load"),
        ({"eagle_config": {"fc_norm": True}}, (), "its config.json says fc_norm"),
        ({"model_type": "qwen3"}, (), "it is not one layer of a llama"),
        *(({LAYERS: x}, (), f"reads are {x}, and vLLM wants 3 of the model's 8") for x in WRONG_LAYERS),
        ({"eagle_config": NAMED["eagle_config"]}, (), "vLLM reads eagle_aux_hidden_state_layer_ids beside"),
        (NAMED | {LAYERS: [1, 2, 3]}, (), "vLLM reads eagle_aux_hidden_state_layer_ids beside eagle_config"),
        *(({key: value}, (), f"its config.json says {key}") for key, value in SPECIAL.items()),
        (NAMED, ("--format", "sglang"), "SGLang counts eagle_aux"),
        ({}, ("--offload", "layerwise"), "need the whole model, and this one runs layer by layer"),
        ({}, ("-o", model, "--overwrite"), "would mix with the model in"),
        ({"fc.weight": torch.ones(64, 100)}, (), "is a drafter of another model, or not as its config"),
        *(({x: 96}, (), f"as its config says: {x} 96, not {n}") for x, n in SIZES.items()),
        *(({x: torch.ones(96, 64)}, (), f"{x} 96, not 128") for x in TABLES),
        ({"midlayer.self_attn.v_proj.weight": torch.ones(9, 128)}, (), "[9, 128], and config.json asks"),
        ({}, ("--targets", "qkv"), "whether engines load a query scale of one is not known"),
        ({"fc.bias": torch.ones(64)}, (), "its files hold fc.bias, and its architecture has none"),
        ({"midlayer.hidden_norm.weight": None}, (), "its files lack hidden_norm.weight"),
    ):
        tensors = changes if isinstance(next(iter(changes.values()), 0), torch.Tensor | None) else {}
        rest = {part: x for part, x in (weights | tensors).items() if x is not None}
        save_file(rest, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | ({} if tensors else changes)))
        one_line_error(fp8kv(*command, "-o", tmp_path / "out", *SMALL, *options), problem)
    one_line_error(fp8kv("eval", path), "is a drafter (EAGLE): give its model, and --draft")
    one_line_error(fp8kv(*command[:3], "gone"), "drafter 'gone' does not exist; give a local directory, or")
    edit_json(model / "config.json", model_type="mistral")
    one_line_error(fp8kv(*command, *SMALL), "what it reads of a ministral is not known")
    edit_json(path / "config.json", architectures=["LlamaForCausalLM"])
    assert "is a drafter" not in fp8kv("eval", path).stderr
