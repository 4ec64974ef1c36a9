"""Models and configs that make no sense are refused at once, in one line; others load completely."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from command_line import SMALL, calibrate, fp8kv, one_line_error, succeeded
from families import FAMILIES, edit_json, edit_tensors, save_model, tiny_model
from huggingface_hub import errors
from loaded import refused
from transformers import AutoConfig
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from calib.bench.run import attention_heads
from calib.errors import InputError, UnsupportedModelError
from calib.files.model_directory import check_layers
from calib.models import sources
from calib.models.config import check_cacheable, load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.progress import library_bars_hidden
from calib.same_model.check import model_facts


def test_what_is_no_directory():
    for name, said in (
        *((n, f"model '{n}' does not exist; give a local directory") for n in ("./gone", "~/gone", "a/b/c")),
        (__file__, "is a file; give the directory"),
        ("builtin:gpt5", "no model 'builtin:gpt5'; built in: builtin:smollm2"),
    ):
        with pytest.raises(InputError, match=said):
            find_model(name)


def test_what_is_no_decoder_or_of_an_unknown_type_whose_code_stays_off(tiny_directory):
    for kind, name, said in (
        ("bert", "BertForMaskedLM", "not a causal language model"),
        ("t5", "T5ForConditionalGeneration", "an encoder-decoder"),
    ):
        edit_json(tiny_directory / "config.json", model_type=kind, architectures=[name])
        refused(tiny_directory, f"{name} is {said}", error=UnsupportedModelError)
    edit_json(tiny_directory / "config.json", model_type="llama99")
    refused(tiny_directory, "cannot read the config")
    (tiny_directory / "code.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    edit_json(tiny_directory / "config.json", model_type="own", auto_map=auto_map)
    refused(tiny_directory, "trust_remote_code")


def test_missing_weights_are_never_made_up(tiny_directory):
    edit_tensors(tiny_directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(tiny_directory, "lacks 1 weights, such as 'model.layers.1.self_attn.k_proj", loaders=[load_model])


def test_norms_of_another_architecture_and_a_bias_that_the_config_makes_no_use_of(tiny_directory, tmp_path):
    name = "model.layers.0.self_attn.k_proj.bias"
    edit_tensors(tiny_directory, lambda tensors: tensors.update({name: torch.ones(32)}))
    refused(tiny_directory, f"{name}', which its config.json does not use")
    directory = save_model(tiny_model("qwen3", **FAMILIES["qwen3"]), tmp_path / "qwen3")
    edit_json(directory / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    refused(directory, "norm.weight', which its config.json does not use")


def test_a_tokenizer_file_that_holds_none(tiny_directory):
    for text, message in (
        ("{}", "holds no tokenizer: it has no model with a vocab; download it again"),
        ('{"added_tokens": [], "model": {}}', "holds no tokenizer"),
        ("", "tokenizer.json' is not JSON"),
        ("[]", "tokenizer.json' must hold a JSON object, got list"),
        ('{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": -1}}}', "cannot load the"),
        (None, "cannot load the tokenizer"),
    ):
        file = tiny_directory / "tokenizer.json"
        if text is None:
            file.unlink()
            file.with_name("tokenizer_config.json").unlink()
        else:
            file.write_text(text)
        with pytest.raises(InputError, match=message):
            load_tokenizer(find_model(str(tiny_directory)))


def test_a_model_without_attention(tmp_path):
    for family, options in (
        ("mamba", {}),
        ("rwkv", {"attention_hidden_size": 64}),
        ("jamba", {"num_experts": 2, "attn_layer_period": 8, "attn_layer_offset": 7}),
    ):
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


def test_what_the_hub_says_in_words_and_that_no_pickle_is_downloaded(monkeypatch, tiny_directory):
    for kind, message in (
        (errors.GatedRepoError, "is gated: accept its terms at https://huggingface.co/org/name"),
        (errors.RepositoryNotFoundError, "is neither a directory nor a model on the Hub"),
        (errors.HfHubHTTPError, "the Hub cannot be reached .*try builtin:smollm2"),
        (OSError, "the Hub cannot be reached .no route"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached .no answer.; download it elsewhere"),
    ):
        response = SimpleNamespace(headers={}, request=None, status_code=403)
        is_plain = kind in (OSError, errors.LocalEntryNotFoundError)
        error = kind("no route") if is_plain else kind("refused", response=response)
        error.__cause__ = OSError("no answer")
        monkeypatch.setattr(sources, "snapshot_download", Mock(side_effect=error))
        with pytest.raises(InputError, match=message):
            find_model("org/name")

    def download(repo, allow_patterns):
        assert repo == "org/name"
        assert "*.safetensors" in allow_patterns
        assert not any(pattern.endswith((".bin", ".pt")) for pattern in allow_patterns)
        return str(tiny_directory)

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert find_model("org/name").path == tiny_directory
    # messages call a model what the user called it
    monkeypatch.setattr(sources, "builtin_model", lambda _: tiny_directory)
    for name in ("org/name", "builtin:smollm2", str(tiny_directory)):
        assert model_facts(find_model(name)).name == name


def test_nonsense_that_loading_or_running_shows_is_one_line(edit, tmp_path):
    for file, changes, said in (
        ("tokenizer_config.json", [], "cannot load"),
        ("tokenizer_config.json", {"tokenizer_class": 3}, "cannot load"),
        ("generation_config.json", [], "cannot load"),
        ("config.json", {"pad_token_id": 10**6}, "no model"),
        ("config.json", {"attn_implementation": "flash_attention_2"}, "no model"),
        ("config.json", {"model_type": "mistral", "sliding_window": -1}, "cannot run"),
    ):
        directory = edit()
        if changes == []:
            (directory / file).write_text("[]")
        else:
            edit_json(directory / file, **changes)
        where = [str(directory)] if said == "cannot load" else []
        one_line_error(calibrate(directory, "-o", tmp_path / "out"), said, *where)


def test_the_librarys_bar_of_gguf_is_hidden(capfd):
    def bar():
        [*gguf.tqdm(range(3), desc="Converting")]
        return capfd.readouterr().err

    with library_bars_hidden():
        assert bar() == ""
    assert "Converting" in bar()


FLAGS = ["--samples", "2", "--seq-len", "16", "--device", "cpu", "--allow-few-tokens"]


@pytest.fixture
def run(tiny_directory, tmp_path):
    """Run a command, with rows of text as its data, on a model of 128 tokens whose tokenizer has 130."""
    file, path = tiny_directory / "tokenizer.json", tmp_path / "rows.jsonl"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["w128"] = 128
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 129, "content": "<new>"})
    file.write_text(json.dumps(tokenizer))

    def run(command, *arguments, rows=()):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        return fp8kv(command, tiny_directory, *arguments, *(["--dataset", path] if rows else []))

    return run


def test_tokens_that_have_no_row_are_refused_before_the_model_runs(run, tmp_path, monkeypatch):
    for command, rows in (
        (("calibrate", *FLAGS), ["w5 w6 w7", "w5 w128 w7"]),
        (("calibrate", *FLAGS, "--offload", "layerwise"), ["w5 w6 w7", "w5 <new> w7"]),
        (("generate", "w5 <new> w7", "--scales", "none", "--device", "cpu"), []),
        (("eval", *FLAGS), [f"w5 w{number} <new> " * 200 for number in range(3, 100)]),
    ):
        monkeypatch.setattr(torch.nn.functional, "embedding", lambda *_, **__: pytest.fail("the model ran"))
        output = [] if command[0] == "generate" else ["-o", tmp_path / "out"]
        one_line_error(run(*command, *output, rows=rows), "130 tokens", "128 rows", "token id")
        assert not (tmp_path / "out").exists()


def test_samples_that_the_model_writes_need_a_row_for_bos_and_none_for_padding(tiny_directory, run, tmp_path):
    outputs, flags = [], [*FLAGS, "--dataset", "self", "--samples", "20", "--batch-size", "10"]
    for pad in ("<pad>", "<new>"):
        edit_json(tiny_directory / "tokenizer_config.json", pad_token=pad)
        succeeded(run("calibrate", "-o", tmp_path / pad, *flags))
        outputs.append(json.loads((tmp_path / pad / "fp8kv_calibration.json").read_text())["dataset"])
    assert outputs[0] == outputs[1]
    edit_json(tiny_directory / "tokenizer_config.json", bos_token="<new>")
    one_line_error(run("calibrate", "-o", tmp_path / "out", *flags), "130 tokens", "128 rows", "token id")


SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
)


@pytest.fixture
def edit(saved_llama, tmp_path):
    directory = tmp_path / "model"

    def changed(**values):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(saved_llama, directory)
        edit_json(directory / "config.json", **values)
        return directory

    return changed


def refused_by_bench_too(model, message, *, by_bench=True):
    """By whatever loads the model, and by `bench`, which reads no weight."""
    ways = (lambda: load_config(find_model(str(model))), lambda: attention_heads(str(model)))
    for call in ways[: 1 + by_bench]:
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_no_model_has(key, edit):
    for value in (10**9, 0, "4", True) if key == "hidden_size" else (10**9, -1, 2.5, [3, 0]):
        said = f"has {key} .*; it must be a whole number from 1 to |00000, but the weights have 3"
        refused_by_bench_too(edit(**{key: value}), said)


def test_values_that_make_no_sense_and_architectures_that_are_no_names(edit):
    for changes, said in (
        ({"vision_config": {"num_hidden_layers": 10**9}}, "has num_hidden_layers 1000000000; it must be"),
        ({"num_key_value_heads": 3}, "has 4 attention heads, which 3 key-value heads cannot share equally"),
        ({"rope_parameters": "none"}, "config"),
        ({"model_type": ["llama"]}, r"has model_type \['llama'\]; it must be a name such as 'llama'"),
        ({"layer_types": ["nonsense"] * 3}, "config"),
        ({"model_type": "qwen3", "layer_types": 5}, "config"),
        ({"dtype": "float4096"}, "config"),
        # which is seen in the weights alone
        ({"vocab_size": 130}, r"' is \[128, 64\] in the .* wants \[130, 64\]"),
        ({"num_key_value_heads": 4}, r"[kv]_proj.weight' is \[32, 64\] .* wants \[64, 64\]"),
    ):
        refused_by_bench_too(edit(**changes), said, by_bench="wants" not in said)
    assert attention_heads(str(edit(architectures="LlamaForCausalLM"))) == (4, 2, 16)
    for none in ([5], None, {}):
        said = 'names no architecture, by which engines choose a class; add "architectures": ["Llama'
        one_line_error(fp8kv("bench", edit(architectures=none)), said)


def test_other_stacks_may_have_any_number_of_layers():
    for count, weights in (
        (2, ["model.layers.1.x", "mtp.layers.0.x"]),  # of Qwen3-Next; DeepSeek has the next
        (2, ["model.layers.1.x", "model.layers.2.x", "model.layers.2.eh_proj.weight"]),
        (2, ["model.language_model.layers.1.x", "model.vision_tower.encoder.layers.5.x"]),
        (2, ["model.decoder.layers.1.x", "model.encoder.layers.5.x"]),
        (2, ["model.layers.1.x", "model.layers.2.self_attn.k_scale"]),  # stale scales
        (12, ["encoder.albert_layer_groups.0.x"]),  # shared by all: no stack of a decoder
    ):
        config = {"num_hidden_layers": count}
        check_layers(Path("model"), config, weights)
        if count == 2:
            with pytest.raises(InputError, match="says num_hidden_layers 2, but .* have 4 layers"):
                check_layers(Path("model"), config, [name.replace("rs.1.x", "rs.3.x") for name in weights])


NONSENSE = [
    ('"model_type": 7', " has model_type 7; it must be a name such as 'llama': correct it, or download"),
    ('"num_hidden_layers": 4', "says num_hidden_layers 4, but the weights have 3 layers"),
    ('"num_hidden_layers": 1000000000', " num_hidden_layers 1000000000"),
    ('"rms_norm_eps": NaN', "NaN is not JSON"),
    ('"rms_norm_eps": Infinity', "Infinity is not JSON"),
    ('"rms_norm_eps": 1e999', "beyond any float"),
    ('"vocab_size": 128', "the key 'vocab_size' is there twice"),
]
PETIT = '"quantization_config": {"quant_method": "petit"}', "give the model it was"


def test_every_command_refuses(edit, saved_llama, tmp_path):
    succeeded(calibrate(saved_llama, "-o", tmp_path / "calibration"))
    edited = shutil.copytree(tmp_path / "calibration", tmp_path / "edited")
    edit_json(edited / "config.json", model_type=7)
    one_line_error(fp8kv("pack", edited, "-o", tmp_path / "out"), NONSENSE[0][1])
    for command in (
        ("calibrate", "MODEL", "-o", "OUT", *SMALL),
        ("calibrate", "MODEL", "-o", "OUT", *SMALL, "--offload", "layerwise"),
        ("eval", "MODEL", "--dataset", "builtin:python-docs", "--device", "cpu"),
        ("generate", "MODEL", "w5", "--scales", "none"),
        ("stress", "MODEL", "-o", "OUT"),
        ("strip", "MODEL", "-o", "OUT"),
        ("convert", "MODEL", "-o", "OUT", "--to", "tgi"),
        ("bench", "MODEL"),
        ("recommend", "MODEL", "--device", "cpu"),
        ("bake", "MODEL", "--scales", "SCALES", "-o", "OUT", "--for", "fp8"),
        ("apply", "SCALES", "MODEL", "-o", "OUT"),
        ("verify", "SCALES", "--served", "http://127.0.0.1:9", "--model", "MODEL"),
    ):
        nonsense = NONSENSE if command[0] == "bench" else NONSENSE[:4]
        if command[0] in ("calibrate", "eval", "generate", "stress"):
            nonsense = [*nonsense, PETIT]
        for text, said in nonsense:
            model = edit()
            document = json.loads((model / "config.json").read_text())
            if "twice" not in said:
                document.pop(text.split('"')[1], None)
            inner = json.dumps(document).removesuffix("}")
            (model / "config.json").write_text(f"{inner}, {text}}}")
            names = {"MODEL": model, "OUT": tmp_path / "out", "SCALES": tmp_path / "calibration"}
            one_line_error(fp8kv(*(names.get(word, word) for word in command)), said)
            assert not (tmp_path / "out").exists()
