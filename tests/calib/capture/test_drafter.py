"""A drafter in a directory of its own (EAGLE) gets scales of what it caches while its model reads."""

import json
import shlex

import pytest
import torch
from command_line import SMALL, fp8kv, one_line_error, ran
from families import edit_json, save_model, tiny_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from calib.capture.attention import map_attention
from calib.capture.draft import layers_read, read_by_drafter
from calib.capture.loop import calibrate
from calib.errors import InputError
from calib.files.model_directory import open_model_directory
from calib.files.names import SCALES_SHARD
from calib.formats.card import serve_command
from calib.job import run
from calib.models import sources
from calib.recipe import Recipe

IDS = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(0))
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
    out, place = model.model(IDS, output_hidden_states=True), "midlayer" if layers else "layers.0"
    embeddings = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
    embedded, states = embeddings[IDS.roll(-1, 1)], [out.hidden_states[i] for i in layers]
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
    (layer,) = calibrate(own, [IDS], Recipe(), attention=attention).layers.values()
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
    with pytest.raises(InputError, match='not as its config says: Unexpected key.* "fc.bias"'):
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
        ({"fc.weight": torch.ones(64, 100)}, (), "is a drafter of a model of another size"),
        *(({x: 96}, (), f"as its config says: {x} 96, not {n}") for x, n in SIZES.items()),
        *(({x: torch.ones(96, 64)}, (), f"{x} 96, not 128") for x in TABLES),
        ({"midlayer.self_attn.v_proj.weight": torch.ones(9, 128)}, (), "or not as its config says"),
        ({}, ("--targets", "qkv"), "whether engines load a query scale of one is not known"),
        ({"fc.bias": torch.ones(64)}, (), 'Unexpected key(s) in state_dict: "fc.bias"'),
        ({"midlayer.hidden_norm.weight": None}, (), 'Missing key(s) in state_dict: "hidden_norm.weight"'),
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
