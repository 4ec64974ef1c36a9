"""Models that cannot be calibrated are refused early; models that can be load completely."""

import json
from types import SimpleNamespace

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from families import FAMILIES, save_model, tiny_model, tiny_vision_language_model
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from calib.capture.attention import map_attention
from calib.errors import InputError, UnsupportedModelError
from calib.models import sources
from calib.models.config import check_cacheable, check_positions, load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import load_recipe


def recipe_with(**changes):
    return load_recipe(None, {"data.seq_len": 64, "device": "cpu", **changes})


RECIPE = recipe_with()


def load(directory, recipe=RECIPE):
    checkpoint = find_model(str(directory))
    return load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_model_loads_with_every_weight(tiny_directory, tiny_llama):
    loaded = load(tiny_directory)
    for name, tensor in tiny_llama.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not loaded.training


def test_dtype_is_the_checkpoints_or_the_users(tiny_directory):
    assert load(tiny_directory).dtype == torch.float32
    assert load(tiny_directory, recipe_with(dtype="bfloat16")).dtype == torch.bfloat16


def test_a_vision_language_model_loads_and_its_layers_have_checkpoint_names(tmp_path):
    directory = save_model(tiny_vision_language_model(), tmp_path / "vlm")
    checkpoint = find_model(str(directory))
    mapped = map_attention(load(directory))
    prefixes = [checkpoint.attention_prefix(name) for name in mapped.cached]
    assert len(set(prefixes)) == 3
    assert all(f"{prefix}.k_proj.weight" in checkpoint.weight_map for prefix in prefixes)
    assert not any("vision" in prefix for prefix in prefixes)


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "~/gone", "a/b/c"])
def test_a_directory_that_does_not_exist(name):
    with pytest.raises(InputError, match=f"model '{name}' does not exist; give a local directory"):
        find_model(name)


def test_a_file_is_not_a_model(tiny_directory):
    with pytest.raises(InputError, match="is a file; give the directory"):
        find_model(str(tiny_directory / "config.json"))


def test_an_unknown_builtin():
    with pytest.raises(InputError, match="no model 'builtin:gpt5'; built in: builtin:smollm2"):
        find_model("builtin:gpt5")


def refuse(directory, error, message, recipe=RECIPE):
    with pytest.raises(error, match=message) as caught:
        load(directory, recipe)
    assert "\n" not in str(caught.value)


def test_not_a_causal_language_model(tmp_path):
    model = tiny_model("bert", is_decoder=False)
    model.config.architectures = ["BertForMaskedLM"]
    directory = save_model(model, tmp_path / "bert")
    edit_config(directory, architectures=["BertForMaskedLM"])
    refuse(directory, UnsupportedModelError, "BertForMaskedLM is not a causal language model")


def test_an_encoder_decoder(tiny_directory):
    edit_config(tiny_directory, model_type="t5", architectures=["T5ForConditionalGeneration"])
    refuse(tiny_directory, UnsupportedModelError, "T5ForConditionalGeneration is an encoder-decoder")


def test_a_sequence_longer_than_the_models_positions(tiny_llama):
    check_positions(tiny_llama.config, 256, "--seq-len")
    with pytest.raises(InputError, match="--seq-len 257 is longer than the model's 256"):
        check_positions(tiny_llama.config, 257, "--seq-len")


def test_an_unknown_model_type(tiny_directory):
    edit_config(tiny_directory, model_type="llama99")
    refuse(tiny_directory, InputError, "cannot read the config")


def test_remote_code_stays_off(tiny_directory):
    (tiny_directory / "code.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit_config(tiny_directory, model_type="own", auto_map=auto_map)
    refuse(tiny_directory, InputError, "trust_remote_code")


def test_missing_weights_are_never_made_up(tiny_directory):
    file = tiny_directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refuse(tiny_directory, InputError, "lacks 1 weights, such as 'model.layers.1.self_attn.k_proj")


def test_weights_of_another_shape(tiny_directory):
    edit_config(tiny_directory, intermediate_size=100)
    refuse(tiny_directory, InputError, "config.json wants .64, 100.")


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_norms_that_another_architecture_has_no_use_for(family, tmp_path):
    directory = save_model(tiny_model(family, **FAMILIES[family]), tmp_path / family)
    edit_config(directory, model_type="llama", architectures=["LlamaForCausalLM"])
    refuse(directory, InputError, "norm.weight', which its config.json does not use")


def test_no_tokenizer(tiny_directory):
    (tiny_directory / "tokenizer.json").unlink()
    (tiny_directory / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="cannot load the tokenizer"):
        load_tokenizer(find_model(str(tiny_directory)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "holds no tokenizer: it has no model with a vocab; download it again"),
        ('{"added_tokens": [], "model": {}}', "holds no tokenizer"),
        ("", "tokenizer.json' is not JSON"),
        ("[]", "tokenizer.json' must hold a JSON object, got list"),
        ('{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": -1}}}', "cannot load the"),
    ],
)
def test_a_tokenizer_file_that_holds_none(text, message, tiny_directory):
    (tiny_directory / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load_tokenizer(find_model(str(tiny_directory)))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {}),
        ("falcon_mamba", {}),
        ("rwkv", {"attention_hidden_size": 64}),
        ("granitemoehybrid", {}),
        ("jamba", {"num_experts": 2, "attn_layer_period": 8, "attn_layer_offset": 7}),
    ],
)
def test_a_model_without_attention(family, options, tmp_path):
    config = AutoConfig.for_model(family, num_hidden_layers=3, **options)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    said = f"no layer of {name} attends: .* so it has no KV cache to calibrate"
    with pytest.raises(UnsupportedModelError, match=said):
        check_cacheable(config, {"architectures": [name]})
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    one_line_error(fp8kv("bench", tmp_path), f"no layer of {name} attends")


def test_cuda_without_a_gpu(tiny_directory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(tiny_directory, InputError, "torch sees no GPU", recipe_with(device="cuda"))


def test_an_output_of_ours_can_be_calibrated_again(tiny_directory):
    edit_config(
        tiny_directory,
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    )
    assert list(map_attention(load(tiny_directory)).cached)


def hub_error(kind):
    response = SimpleNamespace(headers={}, request=None, status_code=403)
    return kind("refused", response=response) if kind is not OSError else OSError("no route")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "is gated: accept its terms at https://huggingface.co/org/name"),
        (errors.RepositoryNotFoundError, "is neither a directory nor a model on the Hub"),
        (errors.HfHubHTTPError, "the Hub cannot be reached .*try builtin:smollm2"),
        (OSError, "the Hub cannot be reached .no route"),
    ],
)
def test_what_the_hub_says_in_words(kind, message, monkeypatch):
    def refuse_download(*_, **__):
        raise hub_error(kind)

    monkeypatch.setattr(sources, "snapshot_download", refuse_download)
    with pytest.raises(InputError, match=message) as caught:
        find_model("org/name")
    assert "\n" not in str(caught.value)


def test_a_model_on_the_hub_is_downloaded_without_pickles(monkeypatch, tiny_directory):
    asked = {}

    def download(repo, allow_patterns):
        asked.update(repo=repo, patterns=allow_patterns)
        return str(tiny_directory)

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert find_model("org/name").path == tiny_directory
    assert asked["repo"] == "org/name"
    assert "*.safetensors" in asked["patterns"]
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in asked["patterns"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("generation_config.json", "[]"),
    ],
)
def test_files_beside_the_weights_that_make_no_sense_are_one_line(name, text, tiny_directory, tmp_path):
    (tiny_directory / name).write_text(text)
    one_line_error(calibrate(tiny_directory, "-o", tmp_path / "out"), "cannot load", str(tiny_directory))


@pytest.mark.parametrize(
    ("key", "value"), [("pad_token_id", 10**6), ("attn_implementation", "flash_attention_2")]
)
def test_a_config_that_cannot_be_built_is_one_line(key, value, tiny_directory, tmp_path):
    path = tiny_directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    one_line_error(calibrate(tiny_directory, "-o", tmp_path / "out"), "no model")


def test_a_weight_that_the_config_makes_no_use_of_is_refused(tiny_directory, tmp_path):
    weights = load_file(tiny_directory / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.bias"
    bias = torch.ones(len(weights[name.replace("bias", "weight")]))
    save_file({**weights, name: bias}, tiny_directory / "model.safetensors", {"format": "pt"})
    one_line_error(calibrate(tiny_directory, "-o", tmp_path / "out"), name, "config.json")


@pytest.mark.parametrize("value", [0, -1])
def test_a_model_that_cannot_run_is_one_line(value, tmp_path):
    directory = save_model(tiny_model("mistral"), tmp_path / "model")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": value}))
    one_line_error(calibrate(directory, "-o", tmp_path / "out"), "cannot run")
