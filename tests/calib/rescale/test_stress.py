"""`fp8kv stress`: the same outputs bit for bit, other K and V, one line for what cannot be."""

import hashlib
import json
import pydoc_data.topics
import shutil

import pytest
import torch
from baking import in_float32, seen_amax
from command_line import calibrate, fp8kv, one_line_error, succeeded
from fake_quant import measured_scales
from families import FAMILIES, SHARED_KV, save_model, tiny_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import kl_div
from transformers import AutoTokenizer

from calib.errors import InputError, UnsupportedModelError
from calib.generate import unit_scales
from calib.rescale import weight_changes
from calib.rescale.factors import uniform_factors
from calib.rescale.stress import parse_factor
from calib.rescale.weight_changes import cached_attention
from fp8kv_runtime.hf import fp8_attention

# Gemma multiplies by 1 + weight, which bfloat16 cannot hold times 256
TWINS = {
    **dict.fromkeys(("llama", "mixtral", "olmo2", "phi3", "gpt_neox", "gpt_oss", "qwen3"), ()),
    "gemma3_text": ("--dtype", "float32"),
}


def stress(source, out, *flags):
    return fp8kv("stress", source, "-o", out, *flags)


def bf16_directory(path, model_type, **options):
    return save_model(tiny_model(model_type, **options).to(torch.bfloat16), path)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A Qwen 2, which has biases; to read."""
    return bf16_directory(tmp_path_factory.mktemp("qwen2") / "source", "qwen2")


def fingerprint(directory):
    files = sorted(directory.rglob("*"))
    return {file: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("model_type", TWINS)
def test_the_same_logits_and_other_k_and_v(model_type, tmp_path):
    source = bf16_directory(tmp_path / "source", model_type, **FAMILIES[model_type])
    before = fingerprint(source)
    done = succeeded(stress(source, tmp_path / "twin", *TWINS[model_type]))
    assert fingerprint(source) == before
    (logits, amax), (twin_logits, twin_amax) = seen_amax(source), seen_amax(tmp_path / "twin")
    if model_type == "gemma3_text":  # its (1 + 3.1e-6) / 256 - 1 is no float32
        said = json.loads((tmp_path / "twin" / "fp8kv_stress.json").read_text())
        assert said["rounded"] == [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(3)]
        assert 0 < said["kl"] < 1e-8
        # 2**-25 of 1/256 in a channel of 24, and what layers make of it
        torch.testing.assert_close(twin_logits, logits, rtol=2**-13, atol=2**-13)
        assert "bit for bit" not in done.stdout + (tmp_path / "twin" / "README.md").read_text()
        one_line_error(
            stress(source, tmp_path / "narrow"),
            "1 + 'model.layers.0.self_attn.q_norm.weight' times 0.00390625 has no exact value in bfloat16",
            "add --dtype float32",
        )
        return
    assert torch.equal(logits, twin_logits)
    assert twin_amax == {name: (k * 256, v / 1024) for name, (k, v) in amax.items()}


def test_other_factors_and_what_is_printed(qwen2, tmp_path):
    flags = ("--k-factor", "2**-4", "--v-factor", "1")
    printed = json.loads(stress(qwen2, tmp_path / "twin", *flags, "--json").stdout)
    assert (printed["k_factor"], printed["v_factor"]) == (1 / 16, 1)
    assert printed["k_amax"]["twin"] == printed["k_amax"]["source"] / 16
    assert printed["v_amax"]["twin"] == printed["v_amax"]["source"]
    old, new = (load_file(each / "model.safetensors") for each in (qwen2, tmp_path / "twin"))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    wanted = {f"{which}_proj.{kind}" for which in "qk" for kind in ("weight", "bias")}
    assert {name.split("self_attn.")[1] for name in changed} == wanted
    assert changed == set(printed["changed"])
    shown = stress(qwen2, tmp_path / "again", *flags).stdout
    for line in ("bit for bit", "warning: K reaches", "warning: V reaches"):
        assert line in shown


def test_the_directory_is_a_model_of_its_own(tmp_path, tiny_directory):
    twin = tmp_path / "twin"
    (tiny_directory / "chat_template.jinja").write_text("{{ messages }}")
    (tiny_directory / "model.safetensors.index.json.bak").write_text("{}")
    (tiny_directory / "generation_config.json").unlink()
    succeeded(stress(tiny_directory, twin))
    names = {file.name for file in twin.iterdir()}
    assert "generation_config.json" not in names
    assert {"tokenizer.json", "chat_template.jinja", "README.md", "fp8kv_stress.json"} <= names
    card = (twin / "README.md").read_text()
    assert f"fp8kv-calibrate {twin} -o" in card
    assert f"vllm serve {twin} --kv-cache-dtype fp8 --dtype float32" in card
    assert "its V times\n1/1024;" in card
    config, ours = (json.loads((d / "config.json").read_text()) for d in (tiny_directory, twin))
    assert ours == config
    assert calibrate(twin, "-o", tmp_path / "calibrated").exit_code == 0
    assert not (tmp_path / "calibrated" / "fp8kv_stress.json").exists()
    again = stress(tmp_path / "calibrated", tmp_path / "more")
    one_line_error(again, "has a quantization_config; give the model it was made from")


def test_a_factor_is_a_power_of_two_as_people_write_it(qwen2, tmp_path):
    for given, value in {"256": 256, "1/1024": 2**-10, " 0.5": 0.5, "2**-10": 2**-10, "2**64": 2**64}.items():
        assert parse_factor(given, "--k-factor") == value
    for given in ("3", "0", "-2", "1/3", "0.3", "nan", "2**65", "2**-65", "two", "", "1/0"):
        with pytest.raises(InputError, match=r"^--k-factor must be a power of two .*1/1024"):
            parse_factor(given, "--k-factor")
    done = stress(qwen2, tmp_path / "twin", "--v-factor=1/3")
    one_line_error(done, "--v-factor must be a power of two", "1/1024", "got '1/3'")
    assert not (tmp_path / "twin").exists()


def test_weights_that_the_dtype_cannot_hold_times_the_factor(tmp_path):
    model, twin = tiny_model("llama").half(), tmp_path / "twin"
    small = save_model(model, tmp_path / "small")
    one_line_error(
        stress(small, twin),
        "'model.layers.0.self_attn.q_proj.weight' times 0.00390625 is not exact in float16",
        "add --dtype float32",
        "nearer to 1",
    )
    succeeded(stress(small, twin, "--dtype", "float32"))
    assert json.loads((twin / "config.json").read_text())["dtype"] == "float32"
    weights = load_file(twin / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    one_line_error(
        stress(small, tmp_path / "no", "--dtype", "bfloat16"),
        "--dtype bfloat16 may round the source's weights",
        "use auto or float32",
    )
    with torch.no_grad():
        for parameter in model.parameters():  # few bits, so that halves of them are exact
            parameter.copy_((parameter * 256).round() / 256)
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = 60000
    large = save_model(model, tmp_path / "large")
    done = stress(large, tmp_path / "no", "--k-factor", "2")
    one_line_error(done, "'model.layers.1.self_attn.k_proj.weight' times 2 is not exact in float16")


def test_a_config_that_names_another_dtype_than_the_files_hold(tiny_directory, tmp_path):
    config = tiny_directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    assert stress(tiny_directory, tmp_path / "twin").exit_code == 0
    for directory in (tiny_directory, tmp_path / "twin"):
        weights = load_file(directory / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert torch.equal(seen_amax(tiny_directory)[0], seen_amax(tmp_path / "twin")[0])


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gemma3n_text", {**SHARED_KV, "num_kv_shared_layers": 0}, "normalises V"),
        ("stablelm", {"qk_layernorm": True}, "q_layernorm has no single weight"),
        ("llama4_text", {}, "no twin of Llama4ForCausalLM: K of model.layers.0"),
    ],
)
def test_what_cannot_be_proved_is_refused(model_type, options, reason, tmp_path):
    source = bf16_directory(tmp_path / "source", model_type, **options)
    one_line_error(stress(source, tmp_path / "twin"), reason)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [
        # a fused layout under another's name
        ("phi3", {"_STACKED": "none", "_GROUPED": "qkv_proj"}),
        # a norm behind the projection, not seen
        ("qwen3", {"_NORMS": {}}),
    ],
)
def test_a_wrong_guess_is_found(model_type, wrong, tmp_path, monkeypatch):
    source = bf16_directory(tmp_path / "source", model_type, **FAMILIES[model_type])
    for name, value in wrong.items():
        monkeypatch.setattr(weight_changes, name, value)
    done = stress(source, tmp_path / "twin")
    one_line_error(done, "is not the source's times its factor", "Nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_logits_are_found(tmp_path, monkeypatch):
    head_changes = weight_changes.head_changes

    def forget_the_output(*args):
        return (each for each in head_changes(*args) if "o_proj" not in each.name)

    monkeypatch.setattr(weight_changes, "head_changes", forget_the_output)
    # later layers read what earlier ones got wrong, so one layer is what shows the logits alone
    for layers, problem in ((3, "no twin of LlamaForCausalLM"), (1, "its logits are not the source's")):
        source = bf16_directory(tmp_path / f"{layers}", "llama", num_hidden_layers=layers)
        one_line_error(stress(source, tmp_path / "twin"), problem)


def test_one_tensor_in_two_layers_is_not_multiplied_twice(tiny_llama):
    model = tiny_model("llama")
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    second.k_proj.weight = first.k_proj.weight
    modules = cached_attention(model)
    with pytest.raises(UnsupportedModelError, match="are the same tensor"):
        weight_changes.list_changes(model, modules, uniform_factors(modules, 2.0, 0.5))
    assert torch.equal(first.k_proj.weight, tiny_llama.model.layers[0].self_attn.k_proj.weight)


def test_nan_weights_have_no_twin(qwen2, tmp_path):
    source = shutil.copytree(qwen2, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    one_line_error(stress(source, tmp_path / "twin"), "layers.1.self_attn.v_proj.weight'")


def test_only_what_fp8kv_wrote_is_replaced(qwen2, tmp_path):
    source, out = shutil.copytree(qwen2, tmp_path / "source"), tmp_path / "twin"
    assert stress(source, out).exit_code == 0
    one_line_error(stress(source, out), "exists; add --overwrite")
    assert stress(source, out, "--overwrite", "--k-factor", "4").exit_code == 0
    assert json.loads((out / "fp8kv_stress.json").read_text())["k_factor"] == 4
    one_line_error(stress(source, source, "--overwrite"), "would mix with")
    (out / "fp8kv_stress.json").unlink()
    one_line_error(stress(source, out, "--overwrite"), "was not written by fp8kv")
    assert isinstance(stress("./gone", out, "--debug").exception, InputError)


@torch.inference_mode()
def test_on_a_real_model_scales_make_all_the_difference(smollm2_directory, tmp_path):
    succeeded(stress(smollm2_directory, tmp_path / "twin"))
    page = pydoc_data.topics.topics["assert"]
    tokens = AutoTokenizer.from_pretrained(smollm2_directory)(page, return_tensors="pt")["input_ids"][:, :128]
    source, twin = in_float32(smollm2_directory), in_float32(tmp_path / "twin")
    expected = source(tokens).logits
    assert torch.equal(expected, twin(tokens).logits)

    def divergence(model, scales):
        with fp8_attention(model, scales, backend="torch"):
            found = model(tokens).logits
        logs = [x.log_softmax(-1).flatten(0, 1) for x in (found, expected)]
        return kl_div(*logs, log_target=True, reduction="batchmean").item()

    # the source does without: its K and V fit FP8 as they are
    assert divergence(source, unit_scales(source)) < 0.1
    assert divergence(twin, unit_scales(twin)) > 1
    calibrated = divergence(source, measured_scales(source, tokens))
    assert divergence(twin, measured_scales(twin, tokens)) < 1.3 * calibrated
