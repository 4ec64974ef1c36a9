"""`fp8kv stress`: the same outputs bit for bit, other K and V, one line for what cannot be."""

import json
import re
import shlex

import apply_cases
import pytest
import torch
from apply_cases import config_of
from baking import seen_amax
from command_line import fp8kv, json_of, one_line_error, succeeded
from families import FAMILIES, LATENT, SHARED_KV, edit_tensors, save_model, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from calib.errors import InputError, UnsupportedModelError
from calib.rescale import weight_changes
from calib.rescale.factors import uniform_factors
from calib.rescale.stress import parse_factor
from calib.rescale.weight_changes import cached_attention, head_changes


def stress(source, out, *flags):
    return fp8kv("stress", source, "-o", out, *flags)


def bf16_directory(path, model_type, **options):
    return save_model(tiny_model(model_type, **options).to(torch.bfloat16), path)


@pytest.mark.parametrize(
    "model_type", ["llama", "mixtral", "olmo2", "phi3", "gpt_neox", "gpt_oss", "qwen3", "gemma3_text"]
)
def test_the_same_logits_and_other_k_and_v(model_type, tmp_path):
    source, twin = bf16_directory(tmp_path / "source", model_type, **FAMILIES[model_type]), tmp_path / "twin"
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()}
    # Gemma multiplies by 1 + weight, which bfloat16 cannot hold times 256
    flags = ("--dtype", "float32") if model_type == "gemma3_text" else ()
    done = succeeded(stress(source, twin, *flags))
    assert before == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()}
    (logits, amax), (twin_logits, twin_amax) = seen_amax(source), seen_amax(twin)
    if model_type == "gemma3_text":  # its (1 + 3.1e-6) / 256 - 1 is no float32
        said = json.loads((twin / "fp8kv_stress.json").read_text())
        assert said["rounded"] == [f"model.layers.{i}.self_attn.q_norm.weight" for i in range(3)]
        assert 0 < said["kl"] < 1e-8
        # 2**-25 of 1/256 in a channel of 24, and what layers make of it
        torch.testing.assert_close(twin_logits, logits, rtol=2**-13, atol=2**-13)
        assert "bit for bit" not in done.stdout + (twin / "README.md").read_text()
        words = "1 + 'model.layers.0.self_attn.q_norm.weight' times 0.00390625 has no exact value in bfloat16"
        one_line_error(stress(source, tmp_path / "narrow"), words, "add --dtype float32")
        return
    assert torch.equal(logits, twin_logits)
    assert twin_amax == {name: (k * 256, v / 1024) for name, (k, v) in amax.items()}


def test_the_directory_is_a_model_of_its_own(tmp_path, tiny_directory):
    twin = tmp_path / "twin"
    (tiny_directory / "chat_template.jinja").write_text("{{ messages }}")
    (tiny_directory / "generation_config.json").unlink()
    succeeded(stress(tiny_directory, twin))
    names = {file.name for file in twin.iterdir()}
    assert "generation_config.json" not in names
    assert {"tokenizer.json", "chat_template.jinja", "README.md", "fp8kv_stress.json"} <= names
    card = (twin / "README.md").read_text()
    assert re.search(rf"fp8kv-calibrate {twin} -o \S+    # offline: --dataset builtin:python-docs", card)
    assert f"vllm serve {twin} --kv-cache-dtype fp8 --dtype float32" in card
    assert "its V times\n1/1024;" in card
    assert json.loads((twin / "config.json").read_text()) == config_of(tiny_directory)
    calibrated = apply_cases.calibrated(twin, tmp_path / "calibrated")
    assert not (calibrated / "fp8kv_stress.json").exists()
    again = stress(calibrated, tmp_path / "more")
    one_line_error(again, "has a quantization_config; give the model it was made from")


def test_weights_that_the_dtype_cannot_hold_times_the_factor(tmp_path):
    model, twin, no = tiny_model("llama").half(), tmp_path / "twin", tmp_path / "no"
    small = save_model(model, tmp_path / "small")
    inexact = "'model.layers.0.self_attn.q_proj.weight' times 0.00390625 is not exact in float16"
    one_line_error(stress(small, no), inexact, "add --dtype float32", "nearer to 1")
    succeeded(stress(small, twin, "--dtype", "float32"))
    assert config_of(twin)["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(twin / "model.safetensors").values()} == {torch.float32}
    done = stress(small, no, "--dtype", "bfloat16")
    one_line_error(done, "--dtype bfloat16 may round the source's weights", "use auto or float32")
    with torch.no_grad():
        for parameter in model.parameters():  # few bits, so that halves of them are exact
            parameter.copy_((parameter * 256).round() / 256)
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = 60000
    done = stress(save_model(model, tmp_path / "large"), no, "--k-factor", "2")
    one_line_error(done, "'model.layers.1.self_attn.k_proj.weight' times 2 is not exact in float16")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    nan = save_model(model.float(), tmp_path / "nan")
    one_line_error(stress(nan, no), "layers.1.self_attn.v_proj.weight'")


def test_other_factors_and_what_is_printed_and_replaced(tmp_path):
    for given, value in {"256": 256, "1/1024": 2**-10, " 0.5": 0.5, "2**-10": 2**-10, "2**64": 2**64}.items():
        assert parse_factor(given, "--k-factor") == value
    for given in ("3", "0", "-2", "1/3", "0.3", "nan", "2**65", "2**-65", "two", "", "1/0"):
        with pytest.raises(InputError, match=r"^--k-factor must be a power of two .*1/1024"):
            parse_factor(given, "--k-factor")
    source, twin = bf16_directory(tmp_path / "source", "qwen2"), tmp_path / "twin"  # which has biases
    done = stress(source, twin, "--v-factor=1/3")
    one_line_error(done, "--v-factor must be a power of two", "1/1024", "got '1/3'")
    assert not twin.exists()
    flags = ("--k-factor", "2**-4", "--v-factor", "1")
    printed = json.loads(stress(source, twin, *flags, "--json").stdout)
    assert (printed["k_factor"], printed["v_factor"]) == (1 / 16, 1)
    assert printed["k_amax"]["twin"] == printed["k_amax"]["source"] / 16
    assert printed["v_amax"]["twin"] == printed["v_amax"]["source"]
    old, new = (load_file(each / "model.safetensors") for each in (source, twin))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    wanted = {f"{which}_proj.{kind}" for which in "qk" for kind in ("weight", "bias")}
    assert {name.split("self_attn.")[1] for name in changed} == wanted
    assert changed == set(printed["changed"])
    one_line_error(stress(source, twin, *flags), "exists; add --overwrite")
    shown = succeeded(stress(source, twin, "--overwrite", *flags)).output
    for line in ("bit for bit", "warning: K reaches", "warning: V reaches"):
        assert line in shown
    one_line_error(stress(source, source, "--overwrite"), "would mix with")
    assert isinstance(stress("./gone", twin, "--debug").exception, InputError)


WITHOUT_OUTPUT = {"head_changes": lambda *args: (x for x in head_changes(*args) if "o_proj" not in x.name)}


@pytest.mark.parametrize(
    ("model_type", "wrong", "said"),
    [
        # a fused layout under another's name
        ("phi3", {"_STACKED": "none", "_GROUPED": "qkv_proj"}, "is not the source's times its factor"),
        # a norm behind the projection, not seen
        ("qwen3", {"_NORMS": {}}, "is not the source's times its factor"),
        ("llama", WITHOUT_OUTPUT, "its logits are not the source's"),
    ],
)
def test_a_wrong_guess_is_found(model_type, wrong, said, tmp_path, monkeypatch):
    # later layers read what earlier ones got wrong, so one layer is what shows the logits alone
    options = {"num_hidden_layers": 1} if model_type == "llama" else FAMILIES[model_type]
    source = bf16_directory(tmp_path / "source", model_type, **options)
    for name, value in wrong.items():
        monkeypatch.setattr(weight_changes, name, value)
    one_line_error(stress(source, tmp_path / "twin"), said, "Nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_cannot_be_proved_is_refused(tmp_path):
    for model_type, options, reason in (
        ("gemma3n_text", {**SHARED_KV, "num_kv_shared_layers": 0}, "normalises V"),
        ("stablelm", {"qk_layernorm": True}, "q_layernorm has no single weight"),
        ("llama4_text", {}, "normalises K"),
    ):
        source = bf16_directory(tmp_path / model_type / "source", model_type, **options)
        one_line_error(stress(source, source.with_name("twin")), reason)
        assert [path.name for path in source.parent.iterdir()] == ["source"]
    source = bf16_directory(tmp_path / "source", "llama")
    edit_tensors(source, lambda tensors: tensors["lm_head.weight"][0].fill_(torch.nan))
    one_line_error(stress(source, tmp_path / "twin"), "NaN or Inf in the model's own K, V or logits")


def test_one_tensor_in_two_layers_is_not_multiplied_twice(tiny_llama):
    model = tiny_model("llama")
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    second.k_proj.weight = first.k_proj.weight
    modules = cached_attention(model)
    with pytest.raises(UnsupportedModelError, match="are the same tensor"):
        weight_changes.list_changes(model, modules, uniform_factors(modules, 2.0, 0.5))
    assert torch.equal(first.k_proj.weight, tiny_llama.model.layers[0].self_attn.k_proj.weight)


# what the commands of its card end with
ENDINGS = {
    "deepseek_v3": "--kv-cache-dtype fp8 --model-impl transformers",
    "youtu": "--kv-cache-dtype fp8",  # vLLM has no class of its own for it
    # no engine is known to compute with its scales, so it is baked
    "minicpm3": "--model-impl transformers --kv-cache-dtype fp8",
    "deepseek_v32": "--kv-cache-dtype fp8",
    "axk2": "--kv-cache-dtype fp8",
}


@pytest.mark.parametrize("model_type", [*ENDINGS, "longcat_flash", "kimi_linear"])
def test_the_same_logits_and_other_latents_served_as_the_card_says(model_type, tmp_path):
    source, twin = bf16_directory(tmp_path / "source", model_type, **LATENT[model_type]), tmp_path / "twin"
    done = succeeded(stress(source, twin))
    assert "warning" not in done.stdout
    (logits, amax), (same, amax_of_twin) = seen_amax(source), seen_amax(twin)
    assert torch.equal(logits, same)
    assert amax_of_twin == {name: (k / 2**14, v / 2**14) for name, (k, v) in amax.items()}
    assert "latent amax" in done.stdout
    assert "k_pe amax" in done.stdout
    card = (twin / "README.md").read_text()
    assert "Its latents are the source's times 1/16384, its k_pe times\n1/16384; queries" in card
    if model_type not in ENDINGS:
        return
    ending = ENDINGS[model_type]
    [block] = re.findall(r"```bash\n(.*?)```", card, re.DOTALL)
    commands = [line.partition("  #")[0].strip() for line in block.splitlines()]
    ours = [shlex.split(line) for line in commands if line.startswith("fp8kv")]
    for name, *arguments in ours:
        # enough text to see its few large latents
        enough = ("--dataset", "random", "--samples", "32", "--seq-len", "64", "--device", "cpu")
        is_calibration = name == "fp8kv-calibrate"
        done = fp8kv("calibrate", *arguments, *enough) if is_calibration else fp8kv(*arguments)
        assert done.exit_code == 0, (arguments, done.stderr)
    served = ours[-1][-1]  # what the last of them wrote
    garbage, right = (line for line in commands if not line.startswith("fp8kv"))
    assert (garbage, right) == (f"vllm serve {twin} {ending}", f"vllm serve {served} {ending}")
    (engine,) = json_of("verify", served, "--engine", "vllm")["engines"]
    # FP8 is on by itself where the config says so
    assert {*(engine["flag"] or "").split()} <= {*ending.split()}
    assert ("transformers" in (engine["flag"] or "")) == ("transformers" in ending)


def test_a_twin_of_latents_in_float32_is_served_in_bfloat16(tmp_path):
    source, twin = tmp_path / "source", tmp_path / "twin"
    save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), source)
    succeeded(stress(source, twin))
    card, ending = (twin / "README.md").read_text(), f"{ENDINGS['deepseek_v3']} --dtype bfloat16 "
    assert [card.count(f"vllm serve {path} {ending}") for path in (twin, f"{twin}-fp8kv")] == [1, 1]
    assert "vLLM takes no scales of latents in float32. In bfloat16 the twin's outputs are" in card
    models = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (source, twin))
    logits, same = (model(torch.arange(24)[None]).logits for model in models)
    assert torch.equal(logits, same)


def test_factors_of_latents_that_are_given(deepseek, tmp_path):
    for flag in ("--k-factor", "--v-factor"):  # one is for both
        said = json_of("stress", deepseek.source, "-o", tmp_path / flag, flag, "2**20")
        assert (said["k_factor"], said["v_factor"], said["latent"]) == (2**20, 2**20, True)
    source = bf16_directory(tmp_path / "source", "deepseek_v3", **LATENT["deepseek_v3"])
    # which no scale serves, and which FP8 holds
    shown = " ".join(stress(source, tmp_path / "twin", "--k-factor", "4", "--v-factor", "2").output.split())
    assert "which FP8 holds: use a smaller factor" in shown
    assert "one scale serves the latent and k_pe" in shown
