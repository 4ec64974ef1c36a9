"""`fp8kv stress` of latent attention (MLA): one factor for the latent and k_pe, as their scale is.

The twin is garbage at 1.0, and with its scales, or baked, as good as the source.
"""

import json
import re
import shlex

import pytest
import torch
from baking import TOKENS, bake, calibrated, in_float32, seen_amax
from command_line import fp8kv, ran
from families import LATENT, save_model, tiny_model

from calib.generate import unit_scales
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf import fp8_attention

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
    source, twin = tmp_path / "source", tmp_path / "twin"
    save_model(tiny_model(model_type, **LATENT[model_type]).bfloat16(), source)
    done = ran("stress", source, "-o", twin)
    assert "warning" not in done.stdout
    (logits, amax), (same, amax_of_twin) = seen_amax(source), seen_amax(twin)
    assert torch.equal(logits, same)
    assert amax_of_twin == {name: (k / 2**14, v / 2**14) for name, (k, v) in amax.items()}
    assert "latent amax" in done.stdout
    assert "k_pe amax" in done.stdout
    card = (twin / "README.md").read_text()
    assert "Its latents are the source's times 1/16384, its k_pe times\n1/16384; queries" in card
    if model_type in ENDINGS:
        check_commands(card, twin, ENDINGS[model_type])


def check_commands(card, twin, ending):
    """Run those of ours, and ask `verify` whether the last one serves what they wrote."""
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
    assert garbage == f"vllm serve {twin} {ending}"
    assert right == f"vllm serve {served} {ending}"
    done = fp8kv("verify", served, "--engine", "vllm", "--json")
    assert done.exit_code == 0, done.stdout
    (engine,) = json.loads(done.stdout)["engines"]
    # FP8 is on by itself where the config says so
    assert {*(engine["flag"] or "").split()} <= {*ending.split()}
    assert ("transformers" in (engine["flag"] or "")) == ("transformers" in ending)


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
        with fp8_attention(model, load_scales(given) if given else unit_scales(model), backend="torch"):
            found = model(TOKENS).logits
        return ((found - expected).norm() / expected.norm()).item()

    as_the_source = loss(source, scales[0])
    assert as_the_source < 0.1
    assert loss(twin) > 0.5
    # the same latents times a power of two, so the same rounding
    assert loss(twin, scales[1]) == as_the_source
    assert loss(baked) < 1.5 * as_the_source


def test_factors_that_are_given(deepseek, tmp_path):
    for flag in ("--k-factor", "--v-factor"):  # one is for both
        done = fp8kv("stress", deepseek.source, "-o", tmp_path / flag, flag, "2**20", "--json")
        said = json.loads(done.stdout)
        assert (said["k_factor"], said["v_factor"], said["latent"]) == (2**20, 2**20, True)
    source = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]).bfloat16(), tmp_path / "source")
    # which no scale serves, and which FP8 holds
    done = fp8kv("stress", source, "-o", tmp_path / "twin", "--k-factor", "4", "--v-factor", "2")
    shown = " ".join(done.stdout.split())
    assert "which FP8 holds: use a smaller factor" in shown
    assert "one scale serves the latent and k_pe" in shown
