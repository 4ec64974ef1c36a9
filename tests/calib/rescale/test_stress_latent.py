"""`fp8kv stress` of latent attention (MLA): one factor for the latent and k_pe, as their scale is.

The twin is garbage at 1.0, and with its scales, or baked, as good as the source.
"""

import json
import pydoc_data.topics
import re
import shlex

import latent_smollm2
import pytest
import torch
from baking import TOKENS, bake, calibrated, in_float32
from command_line import fp8kv
from families import LATENT, save_model, tiny_model
from torch.nn.functional import kl_div
from transformers import AutoTokenizer

from calib.capture.attention import observe_qkv
from calib.generate import unit_scales
from calib.models.sources import find_model
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf import fp8_attention


@pytest.fixture
def source(tmp_path):
    return save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]).bfloat16(), tmp_path / "source")


@torch.inference_mode()
def seen(directory):
    """Logits, and the amax of the latent and of k_pe in each layer."""
    model, amax = in_float32(directory), {}

    def note(name, query, latent, k_pe):
        amax[name] = (latent.abs().max().item(), k_pe.abs().max().item())

    with observe_qkv(model, note):
        logits = model(TOKENS, use_cache=False).logits
    return logits, amax


@pytest.mark.parametrize("model_type", LATENT)
def test_the_same_logits_and_other_latents(model_type, tmp_path):
    model = tiny_model(model_type, **LATENT[model_type])
    source = save_model(model.bfloat16(), tmp_path / "source")
    done = fp8kv("stress", source, "-o", tmp_path / "twin")
    assert done.exit_code == 0, done.stderr
    assert "warning" not in done.stdout
    (logits, amax), (same, twin) = seen(source), seen(tmp_path / "twin")
    assert torch.equal(logits, same)
    assert twin == {name: (k / 2**14, v / 2**14) for name, (k, v) in amax.items()}


@torch.inference_mode()
def test_one_scale_per_layer_makes_all_the_difference(tmp_path):
    model = tiny_model("deepseek_v3", **LATENT["deepseek_v3"])
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(30)  # attention must matter
    source = save_model(model.bfloat16(), tmp_path / "source")
    twin, baked, flags = tmp_path / "twin", tmp_path / "baked", ("--format", "fp8kv")
    assert fp8kv("stress", source, "-o", twin).exit_code == 0
    scales = [calibrated(each, tmp_path / f"{each.name}-s", *flags) for each in (source, twin)]
    assert bake(twin, scales[1], baked, "--for", "fp8").exit_code == 0
    expected = in_float32(source)(TOKENS).logits

    def loss(directory, given=None):
        model = in_float32(directory)
        scales = unit_scales(model) if given is None else load_scales(given)
        with fp8_attention(model, scales, backend="torch"):
            found = model(TOKENS).logits
        return ((found - expected).norm() / expected.norm()).item()

    as_the_source = loss(source, scales[0])
    assert as_the_source < 0.1
    assert loss(twin) > 0.5
    # the same latents times a power of two, so the same rounding
    assert loss(twin, scales[1]) == as_the_source
    assert loss(baked) < 1.5 * as_the_source


@torch.inference_mode()
def test_on_a_real_model(smollm2_directory, tmp_path, monkeypatch):
    # that it is SmolLM2 is tested beside the script
    same = {"logits": {1: 0.0}, "same_text": True}
    monkeypatch.setattr(latent_smollm2, "compare", lambda *_: same)
    source, twin, baked = (tmp_path / name for name in ("source", "twin", "baked"))
    latent_smollm2.write_latent_model(find_model(str(smollm2_directory)), source)
    assert fp8kv("stress", source, "-o", twin).exit_code == 0
    docs = ("--dataset", "builtin:python-docs", "--samples", "4", "--seq-len", "128")
    flags = (*docs, "--format", "fp8kv", "--device", "cpu", "--dtype", "float32")
    for each in (source, twin):
        assert fp8kv("calibrate", each, "-o", f"{each}-s", *flags).exit_code == 0
    assert bake(twin, f"{twin}-s", baked, "--for", "fp8").exit_code == 0
    text = pydoc_data.topics.topics["assert"]
    tokens = AutoTokenizer.from_pretrained(source)(text, return_tensors="pt")["input_ids"][:, :128]
    expected = in_float32(source)(tokens).logits

    def divergence(directory, scales=None):
        model = in_float32(directory)
        scales = unit_scales(model) if scales is None else load_scales(tmp_path / scales)
        with fp8_attention(model, scales, backend="torch"):
            found = model(tokens).logits
        logs = [x.log_softmax(-1).flatten(0, 1) for x in (found, expected)]
        return kl_div(*logs, log_target=True, reduction="batchmean").item()

    assert torch.equal(in_float32(twin)(tokens).logits, expected)
    assert divergence(source) < 0.1
    assert divergence(twin) > 1
    calibrated_source = divergence(source, "source-s")
    assert divergence(twin, "twin-s") == calibrated_source
    assert divergence(baked) < 1.3 * calibrated_source


def test_one_factor_that_is_given_is_for_both(source, tmp_path):
    for flag in ("--k-factor", "--v-factor"):
        done = fp8kv("stress", source, "-o", tmp_path / flag, flag, "2**20", "--json")
        said = json.loads(done.stdout)
        assert (said["k_factor"], said["v_factor"]) == (2**20, 2**20)
        assert said["latent"]


def test_factors_that_no_scale_serves_and_that_fp8_holds(source, tmp_path):
    flags = ("--k-factor", "4", "--v-factor", "2")
    done = fp8kv("stress", source, "-o", tmp_path / "twin", *flags)
    shown = " ".join(done.stdout.split())
    assert "which FP8 holds: use a smaller factor" in shown
    assert "one scale serves the latent and k_pe" in shown


def test_what_the_twin_says(source, tmp_path):
    twin = tmp_path / "twin"
    shown = fp8kv("stress", source, "-o", twin).stdout
    assert "latent amax" in shown
    assert "k_pe amax" in shown
    card = (twin / "README.md").read_text()
    assert "Its latents are the source's times 1/16384, its k_pe times\n1/16384; queries" in card


@pytest.mark.parametrize(
    ("model_type", "ending"),
    [
        ("deepseek_v3", "--kv-cache-dtype fp8 --model-impl transformers"),
        ("youtu", "--kv-cache-dtype fp8"),  # vLLM has no class of its own for it
        # no engine is known to compute with its scales, so it is baked
        ("minicpm3", "--model-impl transformers --kv-cache-dtype fp8"),
        ("deepseek_v32", "--kv-cache-dtype fp8"),
        ("axk2", "--kv-cache-dtype fp8"),
    ],
)
def test_the_commands_of_its_card_work(model_type, ending, tmp_path):
    model = tiny_model(model_type, **LATENT[model_type]).bfloat16()
    source, twin = save_model(model, tmp_path / "source"), tmp_path / "twin"
    assert fp8kv("stress", source, "-o", twin).exit_code == 0
    [block] = re.findall(r"```bash\n(.*?)```", (twin / "README.md").read_text(), re.DOTALL)
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
    assert garbage == f"vllm serve {twin} {ending}"
    assert right == f"vllm serve {served} {ending}"
    done = fp8kv("verify", served, "--engine", "vllm", "--json")
    assert done.exit_code == 0, done.stdout
    (engine,) = json.loads(done.stdout)["engines"]
    # FP8 is on by itself where the config says so
    assert {*(engine["flag"] or "").split()} <= {*ending.split()}
    assert ("transformers" in (engine["flag"] or "")) == ("transformers" in ending)
