"""Whole jobs on models that the FP8 runtime may not run: each says so at once, or works."""

import json

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, succeeded
from families import (
    CONVOLVED,
    LATENT,
    OWN_CACHE,
    PARALLEL,
    save_model,
    tiny_model,
    tiny_vision_language_model,
)
from generation import PROMPT

REFUSED = {"mllama": "the code of Mllama", "minimax": "has a cache class of its own, MiniMaxCache"}
RUNNING = ["zaya", "inkling_text", "deepseek_v2", "falcon_h1"]
TEXT = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--variants", "none")
GENERATE = (PROMPT, "--max-new-tokens", 3)


def made(family):
    if family == "mllama":
        return tiny_vision_language_model(family)
    if family == "deepseek_v2":  # other KV heads than attention heads
        model = tiny_model(family, **{**LATENT[family], "v_head_dim": 8})
        model.config.num_key_value_heads = 2
        return model
    model = tiny_model(family, **(CONVOLVED | OWN_CACHE | PARALLEL)[family])
    if family == "zaya":  # K is multiplied by this, which starts at 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".temp"):
                    parameter.fill_(1.0)
    return model


@pytest.mark.parametrize("family", REFUSED)
def test_what_later_commands_cannot_do_is_said_at_once(family, tmp_path):
    model, out = save_model(made(family), tmp_path / "model"), tmp_path / "out"
    done = succeeded(calibrate(model, "-o", out))
    assert "fp8kv generate" not in done.stdout
    report = json.loads((out / "fp8kv_calibration.json").read_text())
    start = "eval and generate cannot run this model on an FP8 cache: "
    (said,) = (each for each in report["warnings"] if each.startswith(start))
    assert REFUSED[family] in said
    assert said.endswith("; its scales are not affected")
    for text in (done.stdout, (out / "README.md").read_text()):
        assert said in " ".join(text.split())
    one_line_error(fp8kv("eval", model, *TEXT), said)
    one_line_error(fp8kv("generate", out, *GENERATE), said)
    done = fp8kv("generate", model, *GENERATE, "--cache", "int8_per_token_head")
    assert done.exit_code == 0, done.stderr  # transformers' own cache
    assert "\n8 tokens: " in done.stdout  # six of the prompt, and two that were read again


@pytest.mark.parametrize("family", RUNNING)
def test_all_commands_run_it(family, tmp_path):
    model, out = save_model(made(family), tmp_path / "model"), tmp_path / "out"
    for command in (
        ("generate", model, *GENERATE, "--scales", "none", "--compare"),
        *([] if family == "falcon_h1" else [("eval", model, *TEXT)]),
    ):
        done = fp8kv(*command)
        assert done.exit_code == 0, (command, done.stderr, done.exception)
    flags = ("--offload", "layerwise") if family == "deepseek_v2" else ()
    succeeded(calibrate(model, "-o", out, "--format", "fp8kv", *flags))
    warnings = json.loads((out / "fp8kv_calibration.json").read_text())["warnings"]
    assert not any("cannot run this model" in each for each in warnings)
