"""The command line as a user meets it: real files, and one line for each mistake."""

import json
import os
import resource
import shlex
import subprocess
import sys

import pytest
import torch
from command_line import SMALL, calibrate, fp8kv, one_line_error, ran, succeeded
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from calib import __version__
from calib.commands.app import app, calibrate_main, eval_main
from calib.errors import InputError


def test_calibrate_prints_layers_speed_and_commands_that_run(tiny_directory, tmp_path):
    out = tmp_path / "out"
    done = succeeded(calibrate(tiny_directory, "-o", out, "--strategy", "attn_head"))
    for heading in ("layer", "K amax", "V scale", "K range used"):
        assert heading in done.stdout
    assert "128 tokens in" in done.stdout
    assert f"vllm serve {out} --kv-cache-dtype fp8" in done.stdout
    assert "random token ids" in done.stdout.lower()  # the warning about the data
    assert len(load_file(out / "model-fp8kv-scales.safetensors")) == 6
    next_command = done.stdout.splitlines()[-1].partition("fp8kv ")[2]
    assert next_command == f'generate {out} "The capital of France is" --compare'
    assert fp8kv(*shlex.split(next_command)).exit_code == 0
    one_line_error(calibrate(tiny_directory, "-o", out), "exists; add --overwrite")
    again = calibrate(tiny_directory, "-o", out, "--overwrite", "--set", "export.weights=none")
    assert again.stdout.splitlines()[-1].endswith(f"fp8kv verify {out}")
    one_line_error(calibrate(tiny_directory, "-o", tiny_directory, "--overwrite"), "would mix with")


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("vllm", "FP8 KV-cache scales"),
        ("vllm-nvfp4", "(absmax / 448)"),
        ("sglang-nvfp4", "(absmax / 2688)"),
    ],
)
def test_table_and_json_show_the_scales_that_are_written(name, title, tiny_directory, tmp_path):
    done = succeeded(calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name))
    written = load_file(tmp_path / "out/model-fp8kv-scales.safetensors")
    keys, values = (
        [f"{float(x):.4g}" for key, x in sorted(written.items()) if key.endswith(f"{which}_scale")]
        for which in "kv"
    )
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    assert [row[3].strip() for row in rows] == keys
    assert [row[4].strip() for row in rows] == values
    assert title in done.stdout.splitlines()[0]
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name, "--json", "--overwrite")
    printed = json.loads(done.stdout)
    assert [f"{layer['k_scale']:.4g}" for layer in printed["layers"]] == keys
    assert [layer["layer_idx"] for layer in printed["layers"]] == [0, 1, 2]
    assert printed["output"] == str(tmp_path / "out")
    assert printed["tokens"] == 128
    assert set(printed["seconds"]) == {"load", "calibrate", "write"}
    assert printed["tokens_per_second"] == pytest.approx(128 / printed["seconds"]["calibrate"])
    assert printed["warnings"]


def test_names_of_directories_cannot_steer_the_terminal(tiny_directory, tmp_path):
    out = tmp_path / "oo x\n\x1b[31mü"
    for done in (
        calibrate(tiny_directory, "-o", out),
        calibrate(tiny_directory, "-o", out),  # exists
        fp8kv("stress", tiny_directory, "-o", tmp_path / f"{out.name} twin"),
        fp8kv("eval", out, "--fail-if", f"{out.name}:kl>0.1"),
    ):
        printed = done.stdout + done.stderr
        assert "\x1b" not in printed
        assert "oo x\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31mü" in printed


def test_a_recipe_with_flags_and_set_on_top_into_the_default_output(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--recipe", "qkv-attn_head", "--set", "data.seed=7", "--set", "headroom=2.0")
    ran("calibrate", tiny_directory, *SMALL, *flags, "--batch-size", "2")
    out = tmp_path / "tiny-llama-fp8kv-attn_head"
    saved = json.loads((out / "fp8kv_calibration.json").read_text())["recipe"]
    assert (saved["targets"], saved["strategy"], saved["headroom"]) == ("qkv", "attn_head", 2.0)
    assert (saved["data"]["seed"], saved["data"]["batch_size"]) == (7, 2)


@pytest.mark.parametrize(
    ("flags", "phrases"),
    [
        (["--dataset", "builtin:wiki"], ["builtin:wiki", "builtin:python-docs"]),
        (["--dataset", "org/chat"], ["org/chat", "--dataset builtin:python-docs"]),
        (["--samples", "0"], ["data.samples", "greater than or equal to 1, got 0"]),
        (["--format", "tgi", "--strategy", "attn_head"], ["--format tgi", "--reduce max"]),
        (["--set", "datta.seed=1"], ["unknown key 'datta' (did you mean 'data'?)"]),
        (["--targets", "qkv", "--format", "json"], ["holds no query scales"]),
        (["--strategy", "per_head"], []),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(flags, phrases, tiny_directory, tmp_path):
    done = fp8kv("calibrate", tiny_directory, "-o", tmp_path / "out", *SMALL, *flags)
    if phrases:
        one_line_error(done, *phrases)
    else:  # typer's own
        assert done.exit_code == 2
        assert "'tensor', 'attn_head', 'channel'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_a_model_or_a_dataset_that_cannot_be_reached(tiny_directory):
    one_line_error(calibrate("./gone"), "model './gone' does not exist")
    one_line_error(calibrate("org/gone"), "model 'org/gone'", "the Hub cannot be reached")
    done = fp8kv("calibrate", tiny_directory, "--seq-len", "32", "--samples", "4")
    one_line_error(done, "ultrachat_200k", "--dataset builtin:python-docs")
    assert isinstance(calibrate("./gone", "--debug").exception, InputError)
    assert isinstance(calibrate("./gone").exception, SystemExit)


def test_weights_that_are_damaged(tiny_directory, tmp_path):
    file = tiny_directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    done = calibrate(tiny_directory, "-o", tmp_path / "out")
    one_line_error(done, "model.layers.1.self_attn: V holds NaN or Inf in sample ")
    assert not (tmp_path / "out").exists()
    file.write_bytes(file.read_bytes()[:-100])
    one_line_error(calibrate(tiny_directory), "model.safetensors' is damaged: its tensors end at")


def test_a_full_disk_leaves_nothing_behind(tiny_directory, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file may grow beyond 64 KiB: what a full disk looks like to a writer
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        done = calibrate(tiny_directory, "-o", tmp_path / "out", "--weights", "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line_error(done, f"cannot write '{tmp_path / 'out'}'")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_recipes_are_listed_and_shown():
    assert "qkv-attn_head" in fp8kv("recipes").stdout
    listed = json.loads(fp8kv("recipes", "--json").stdout)
    assert listed["tgi-kv_scale"].startswith("Scalar kv_scale")
    assert fp8kv("recipes", "tgi-kv_scale").stdout.startswith("# Text Generation Inference")
    one = json.loads(fp8kv("recipes", "tgi-kv_scale", "--json").stdout)
    assert one["export"]["formats"] == ["tgi"]
    one_line_error(fp8kv("recipes", "nope"), "no recipe named 'nope'")


def test_doctor_names_what_it_found():
    printed, found = fp8kv("doctor").stdout, json.loads(fp8kv("doctor", "--json").stdout)
    for what in ("Python", "torch", "triton", "GPU", "builtin:smollm2"):
        assert what in printed
        assert what in found
    assert __version__ in printed


def test_every_command_line_says_its_version():
    for program in (app, calibrate_main, eval_main):
        done = CliRunner().invoke(program, ["--version"])
        assert (done.exit_code, done.stdout) == (0, f"fp8kv {__version__}\n")


def test_help_shows_every_flag_and_what_matters_before_the_panels():
    shown = fp8kv("calibrate", "--help").stdout
    places = [
        shown.index(each)
        for each in (
            *("Options", "--output", "--recipe", "--strategy", "--format", "--dataset"),
            *("--samples", "--seq-len", "--device", "--evaluate", "--set"),
            *("Data", "--seed", "Scales", "--observer", "Output", "--overwrite"),
            *("Resources", "--max-memory"),
        )
    ]
    assert places == sorted(places)
    for flag in (
        *("--targets", "--reduce", "--tp-size", "--batch-size", "--dtype", "--fp8-dtype", "--headroom"),
        *("--weights", "--quiet", "--json", "--debug", "--trust-remote-code"),
    ):
        assert flag in shown


NAMES_CUT_IN_HELP = """
from typer.main import get_command
from typer.testing import CliRunner
from calib.commands.app import app

for name, command in get_command(app).commands.items():
    shown = CliRunner().invoke(app, [name, "--help"]).stdout
    visible = [x for x in command.params if not getattr(x, "hidden", False)]
    flags = [flag for x in visible for flag in x.opts if "--" in flag]
    assert "--debug" in flags
    print(*(f"{name} {flag}" for flag in flags if f"{flag} " not in shown))
"""


def test_help_on_a_narrow_screen_names_every_flag_in_full():
    environment = os.environ | {"COLUMNS": "50", "TERMINAL_WIDTH": "50"}  # read at typer's import
    command = [sys.executable, "-c", NAMES_CUT_IN_HELP]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == []


def test_completion_for_bash():
    command = ["bash", "-c", f"{sys.executable} -m calib --show-completion; exit $?"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "complete -o default -F" in done.stdout
