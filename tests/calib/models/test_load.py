"""Models that cannot be calibrated are refused early; models that can be load completely."""

from types import SimpleNamespace

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from families import FAMILIES, edit_json, save_model, tiny_model
from huggingface_hub import errors
from loaded import load, refused
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from calib.errors import InputError, UnsupportedModelError
from calib.models import sources
from calib.models.config import check_cacheable, check_positions
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.progress import library_bars_hidden


def edit_tensors(directory, edit):
    """Let `edit` change the tensors of the model."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_a_model_loads_with_every_weight_in_its_dtype_or_the_users(tiny_directory, tiny_llama):
    loaded = load(tiny_directory)
    for name, tensor in tiny_llama.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not loaded.training
    assert loaded.dtype == torch.float32
    assert load(tiny_directory, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((n, f"model '{n}' does not exist; give a local directory") for n in ("./gone", "~/gone", "a/b/c")),
        (__file__, "is a file; give the directory"),
        ("builtin:gpt5", "no model 'builtin:gpt5'; built in: builtin:smollm2"),
    ],
)
def test_what_is_no_directory(name, said):
    with pytest.raises(InputError, match=said):
        find_model(name)


def test_what_is_no_decoder(tmp_path, tiny_directory):
    bert = save_model(tiny_model("bert", is_decoder=False), tmp_path / "bert")
    edit_json(bert / "config.json", architectures=["BertForMaskedLM"])
    refused(bert, "BertForMaskedLM is not a causal language model", error=UnsupportedModelError)
    edit_json(tiny_directory / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"])
    said = "T5ForConditionalGeneration is an encoder-decoder"
    refused(tiny_directory, said, error=UnsupportedModelError)


def test_a_sequence_longer_than_the_models_positions(tiny_llama):
    check_positions(tiny_llama.config, 256, "--seq-len")
    with pytest.raises(InputError, match="--seq-len 257 is longer than the model's 256"):
        check_positions(tiny_llama.config, 257, "--seq-len")


def test_an_unknown_model_type_whose_code_stays_off(tiny_directory):
    edit_json(tiny_directory / "config.json", model_type="llama99")
    refused(tiny_directory, "cannot read the config")
    (tiny_directory / "code.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit_json(tiny_directory / "config.json", model_type="own", auto_map=auto_map)
    refused(tiny_directory, "trust_remote_code")


def test_missing_weights_are_never_made_up(tiny_directory):
    edit_tensors(tiny_directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    said = "lacks 1 weights, such as 'model.layers.1.self_attn.k_proj"
    refused(tiny_directory, said, loaders=[load_model])


def test_norms_of_another_architecture_and_a_bias_that_the_config_makes_no_use_of(tiny_directory, tmp_path):
    name = "model.layers.0.self_attn.k_proj.bias"
    edit_tensors(tiny_directory, lambda tensors: tensors.update({name: torch.ones(32)}))
    refused(tiny_directory, f"{name}', which its config.json does not use")
    directory = save_model(tiny_model("qwen3", **FAMILIES["qwen3"]), tmp_path / "qwen3")
    edit_json(directory / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    refused(directory, "norm.weight', which its config.json does not use")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "holds no tokenizer: it has no model with a vocab; download it again"),
        ('{"added_tokens": [], "model": {}}', "holds no tokenizer"),
        ("", "tokenizer.json' is not JSON"),
        ("[]", "tokenizer.json' must hold a JSON object, got list"),
        ('{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": -1}}}', "cannot load the"),
        (None, "cannot load the tokenizer"),
    ],
)
def test_a_tokenizer_file_that_holds_none(text, message, tiny_directory):
    file = tiny_directory / "tokenizer.json"
    if text is None:
        file.unlink()
        file.with_name("tokenizer_config.json").unlink()
    else:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_tokenizer(find_model(str(tiny_directory)))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {}),
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
    refused(tiny_directory, "torch sees no GPU", device="cuda")


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
        response = SimpleNamespace(headers={}, request=None, status_code=403)
        raise OSError("no route") if kind is OSError else kind("refused", response=response)

    monkeypatch.setattr(sources, "snapshot_download", refuse_download)
    with pytest.raises(InputError, match=message) as caught:
        find_model("org/name")
    assert "\n" not in str(caught.value)


def test_a_model_on_the_hub_is_downloaded_without_pickles(monkeypatch, tiny_directory):
    def download(repo, allow_patterns):
        assert repo == "org/name"
        assert "*.safetensors" in allow_patterns
        assert not any(pattern.endswith((".bin", ".pt")) for pattern in allow_patterns)
        return str(tiny_directory)

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert find_model("org/name").path == tiny_directory


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("tokenizer_config.json", [], "cannot load"),
        ("tokenizer_config.json", {"tokenizer_class": 3}, "cannot load"),
        ("generation_config.json", [], "cannot load"),
        ("config.json", {"pad_token_id": 10**6}, "no model"),
        ("config.json", {"attn_implementation": "flash_attention_2"}, "no model"),
        ("config.json", {"model_type": "mistral", "sliding_window": -1}, "cannot run"),
    ],
)
def test_nonsense_that_only_loading_or_running_shows_is_one_line(
    file, changes, said, tiny_directory, tmp_path
):
    if changes == []:
        (tiny_directory / file).write_text("[]")
    else:
        edit_json(tiny_directory / file, **changes)
    where = [str(tiny_directory)] if said == "cannot load" else []
    one_line_error(calibrate(tiny_directory, "-o", tmp_path / "out"), said, *where)


def test_the_librarys_bar_of_gguf_is_hidden(capfd):
    def bar():
        [*gguf.tqdm(range(3), desc="Converting")]
        return capfd.readouterr().err

    with library_bars_hidden():
        assert bar() == ""
    assert "Converting" in bar()
