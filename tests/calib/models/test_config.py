"""Configs that make no sense are refused at once, by every command, in one line."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import SMALL, calibrate, fp8kv, one_line_error
from families import edit_json

from calib.bench import attention_heads
from calib.errors import InputError
from calib.files.model_directory import check_layers
from calib.models.config import load_config
from calib.models.sources import find_model

SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
)


@pytest.fixture(scope="module")
def calibration(saved_llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "out"
    assert calibrate(saved_llama, "-o", out).exit_code == 0
    return out


@pytest.fixture
def edit(saved_llama, tmp_path):
    """Give the tiny model other values in its config.json."""
    directory = tmp_path / "model"

    def changed(**values):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(saved_llama, directory)
        edit_json(directory / "config.json", **values)
        return directory

    return changed


def refused(model, message, *, by_bench=True):
    """By whatever loads the model, and by `bench`, which reads no weight."""
    ways = (lambda: load_config(find_model(str(model))), lambda: attention_heads(str(model)))
    for call in ways[: 1 + by_bench]:
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_no_model_has(key, edit):
    for value in (10**9, 0, "4", True) if key == "hidden_size" else (10**9, -1, 2.5, [3, 0]):
        said = f"has {key} .*; it must be a whole number from 1 to |00000, but the weights have 3"
        refused(edit(**{key: value}), said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_config": {"num_hidden_layers": 10**9}}, "has num_hidden_layers 1000000000; it must be"),
        ({"num_attention_heads": 3}, "config"),
        ({"num_key_value_heads": 3}, "has 4 attention heads, which 3 key-value heads cannot share equally"),
        ({"rope_parameters": "none"}, "config"),
        ({"model_type": ["llama"]}, "config"),
        ({"hidden_act": 7}, "config"),
        ({"layer_types": ["nonsense"] * 3}, "config"),
        ({"model_type": "qwen3", "layer_types": 5}, "config"),
        ({"dtype": "float4096"}, "config"),
        # which is seen in the weights alone
        ({"vocab_size": 130}, r"' is \[128, 64\] in the .* wants \[130, 64\]"),
        ({"num_key_value_heads": 4}, r"[kv]_proj.weight' is \[32, 64\] .* wants \[64, 64\]"),
    ],
)
def test_values_that_make_no_sense(changes, said, edit):
    refused(edit(**changes), said, by_bench="wants" not in said)


def test_architectures_are_a_list_of_names_or_one(edit):
    assert attention_heads(str(edit(architectures="LlamaForCausalLM"))) == (4, 2, 16)
    for none in ([5], None, {}):
        done = fp8kv("bench", edit(architectures=none))
        said = 'names no architecture, by which engines choose a class; add "architectures": ["Llama'
        one_line_error(done, said)


@pytest.mark.parametrize(
    ("count", "weights"),
    [
        (2, ["model.layers.1.x", "mtp.layers.0.x"]),  # of Qwen3-Next; DeepSeek has the next
        (2, ["model.layers.1.x", "model.layers.2.x", "model.layers.2.eh_proj.weight"]),
        (2, ["model.language_model.layers.1.x", "model.vision_tower.encoder.layers.5.x"]),
        (2, ["model.decoder.layers.1.x", "model.encoder.layers.5.x"]),
        (2, ["model.layers.1.x", "model.layers.2.self_attn.k_scale"]),  # stale scales
        (12, ["encoder.albert_layer_groups.0.x"]),  # shared by all: no stack of a decoder
    ],
)
def test_other_stacks_may_have_any_number_of_layers(count, weights):
    config = {"num_hidden_layers": count}
    check_layers(Path("model"), config, weights)
    if count == 2:
        with pytest.raises(InputError, match="says num_hidden_layers 2, but .* have 4 layers"):
            check_layers(Path("model"), config, [name.replace("rs.1.x", "rs.3.x") for name in weights])


NONSENSE = [
    ('"num_hidden_layers": 4', "says num_hidden_layers 4, but the weights have 3 layers"),
    ('"num_hidden_layers": 1000000000', " num_hidden_layers 1000000000"),
    ('"rms_norm_eps": NaN', "NaN is not JSON"),
    ('"rms_norm_eps": Infinity', "Infinity is not JSON"),
    ('"rms_norm_eps": 1e999', "beyond any float"),
    ('"vocab_size": 128', "the key 'vocab_size' is there twice"),
]


@pytest.mark.parametrize(
    "command",
    [
        ("calibrate", "MODEL", "-o", "OUT", *SMALL),
        ("calibrate", "MODEL", "-o", "OUT", *SMALL, "--offload", "layerwise"),
        ("eval", "MODEL", "--dataset", "builtin:python-docs", "--device", "cpu"),
        ("generate", "MODEL", "w5", "--scales", "none"),
        ("stress", "MODEL", "-o", "OUT"),
        ("bench", "MODEL"),
        ("recommend", "MODEL", "--device", "cpu"),
        ("bake", "MODEL", "--scales", "SCALES", "-o", "OUT", "--for", "fp8"),
        ("apply", "SCALES", "MODEL", "-o", "OUT"),
        ("verify", "SCALES", "--served", "http://127.0.0.1:9", "--model", "MODEL"),
    ],
    ids=lambda command: " ".join(command[:1] + command[-1:]),
)
def test_every_command_refuses(command, edit, calibration, tmp_path):
    nonsense = NONSENSE if command[0] == "bench" else NONSENSE[:3]
    if command[0] in ("calibrate", "eval", "generate", "stress"):
        nonsense = [*nonsense, ('"quantization_config": {"quant_method": "petit"}', "give the model it was")]
    for text, said in nonsense:
        model = edit()
        document = json.loads((model / "config.json").read_text())
        if "twice" not in said:
            document.pop(text.split('"')[1], None)
        inner = json.dumps(document).removesuffix("}")
        (model / "config.json").write_text(f"{inner}, {text}}}")
        names = {"MODEL": model, "OUT": tmp_path / "out", "SCALES": calibration}
        one_line_error(fp8kv(*(names.get(word, word) for word in command)), said)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight_map", [{"a": ["x"]}, {"a": 5}, [1]])
def test_an_index_that_names_no_files(weight_map, edit):
    model = edit()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match="index.json"):
        find_model(str(model))
