"""The command line as a user meets it: real processes, real files, one line for each mistake."""

import json
import os
import pty
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from command_line import CLI, SMALL, calibrate, fp8kv, one_line_error, process
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from calib import __version__
from calib.commands.app import app, calibrate_main, eval_main
from calib.errors import InputError


def test_calibrate_prints_layers_speed_and_the_serve_command(tiny_directory, tmp_path):
    out = tmp_path / "out"
    done = calibrate(tiny_directory, "-o", out, "--strategy", "attn_head")
    assert done.exit_code == 0, done.stderr
    for heading in ("layer", "K amax", "V scale", "K range used"):
        assert heading in done.stdout
    assert "128 tokens in" in done.stdout
    assert f"vllm serve {out} --kv-cache-dtype fp8" in done.stdout
    assert "random token ids" in done.stdout.lower()  # the warning about the data
    assert len(load_file(out / "model-fp8kv-scales.safetensors")) == 6
    next_command = done.stdout.splitlines()[-1].partition("fp8kv ")[2]
    assert next_command == f'generate {out} "The capital of France is" --compare'
    assert fp8kv(*shlex.split(next_command)).exit_code == 0


def test_without_weights_the_next_step_is_verify(tiny_directory, tmp_path):
    out = tmp_path / "out"
    done = calibrate(tiny_directory, "-o", out, "--set", "export.weights=none")
    assert done.stdout.splitlines()[-1].endswith(f"fp8kv verify {out}")


def test_json_is_one_object_with_the_promised_keys(tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--json")
    printed = json.loads(done.stdout)
    assert printed["output"] == str(tmp_path / "out")
    assert printed["tokens"] == 128
    assert set(printed["seconds"]) == {"load", "calibrate", "write"}
    assert printed["tokens_per_second"] == pytest.approx(128 / printed["seconds"]["calibrate"])
    assert [layer["layer_idx"] for layer in printed["layers"]] == [0, 1, 2]
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


def test_quiet_prints_nothing(tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_the_default_output_is_named_after_model_and_strategy(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = calibrate(tiny_directory, "--strategy", "attn_head")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "tiny-llama-fp8kv-attn_head" / "config.json").exists()


def test_a_recipe_with_flags_and_set_on_top(tiny_directory, tmp_path):
    done = fp8kv(
        *("calibrate", tiny_directory, "-o", tmp_path / "out", "--recipe", "qkv-attn_head"),
        *(*SMALL, "--set", "data.seed=7", "--set", "headroom=2.0", "--batch-size", "2"),
    )
    assert done.exit_code == 0, done.stderr
    saved = json.loads((tmp_path / "out" / "fp8kv_calibration.json").read_text())["recipe"]
    assert (saved["targets"], saved["strategy"], saved["headroom"]) == ("qkv", "attn_head", 2.0)
    assert (saved["data"]["seed"], saved["data"]["batch_size"]) == (7, 2)


@pytest.mark.parametrize(
    ("flags", "phrases"),
    [
        (["--dataset", "builtin:wiki"], ["builtin:wiki", "builtin:python-docs"]),
        (["--dataset", "org/chat"], ["org/chat", "--dataset builtin:python-docs"]),
        (["--dataset", "gone.jsonl"], ["gone.jsonl"]),
        (["--seq-len", "999"], ["--seq-len 999 is longer than the model's 256 positions"]),
        (["--samples", "0"], ["data.samples", "greater than or equal to 1, got 0"]),
        (["--format", "tgi", "--strategy", "attn_head"], ["--format tgi", "--reduce max"]),
        (["--format", "gguf"], ["export.formats", "'vllm'", "got 'gguf'"]),
        (["--recipe", "tensor-absmx"], ["did you mean 'tensor-absmax'?"]),
        (["--set", "datta.seed=1"], ["unknown key 'datta' (did you mean 'data'?)"]),
        (["--set", "seed"], ["--set takes KEY=VALUE"]),
        (["--targets", "qkv", "--format", "json"], ["holds no query scales"]),
        (
            ["--batch-size", "many"],
            ["data.batch_size: ", "integer", "or 'auto', got 'many'"],
        ),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(flags, phrases, tiny_directory, tmp_path):
    one_line_error(fp8kv("calibrate", tiny_directory, "-o", tmp_path / "out", *SMALL, *flags), *phrases)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_a_flag_value_outside_its_list_is_a_usage_error(tiny_directory):
    done = calibrate(tiny_directory, "--strategy", "per_head")
    assert done.exit_code == 2
    assert "'tensor', 'attn_head', 'channel'" in done.stderr


def test_no_such_model(tmp_path):
    one_line_error(calibrate("./gone"), "model './gone' does not exist")
    one_line_error(calibrate("org/gone"), "model 'org/gone'", "the Hub cannot be reached")


def test_the_default_dataset_without_a_network_names_the_way_out(tiny_directory):
    flags = ["--seq-len", "32", "--samples", "4"]
    one_line_error(
        fp8kv("calibrate", tiny_directory, *flags),
        "ultrachat_200k",
        "--dataset builtin:python-docs",
    )


def test_an_output_that_exists(tiny_directory, tmp_path):
    calibrate(tiny_directory, "-o", tmp_path / "out", "--quiet")
    one_line_error(calibrate(tiny_directory, "-o", tmp_path / "out"), "exists; add --overwrite")
    assert calibrate(tiny_directory, "-o", tmp_path / "out", "--overwrite").exit_code == 0
    one_line_error(calibrate(tiny_directory, "-o", tiny_directory, "--overwrite"), "would mix with")


def test_nan_weights_name_layer_tensor_and_sample(tiny_directory, tmp_path):
    file = tiny_directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    done = calibrate(tiny_directory, "-o", tmp_path / "out")
    one_line_error(done, "model.layers.1.self_attn: V holds NaN or Inf in sample ")
    assert not (tmp_path / "out").exists()


def test_a_truncated_weight_file(tiny_directory):
    file = tiny_directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    one_line_error(calibrate(tiny_directory), "model.safetensors' is damaged: its tensors end at")


def test_a_full_disk_leaves_nothing_behind(tiny_directory, tmp_path):
    def limit():  # no file may grow beyond 64 KiB: what a full disk looks like to a writer
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    arguments = (tiny_directory, "-o", tmp_path / "out", "--weights", "copy", *SMALL)
    running = process(*arguments, preexec_fn=limit)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 2
    assert f"fp8kv: cannot write '{tmp_path / 'out'}'" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def heed_interrupts():
    # a shell's background jobs, this test among them, are told to ignore SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 2)])
def test_a_signal_in_the_middle_leaves_nothing_behind(sent, status, tiny_directory, tmp_path):
    endless = ("--samples", "20000", "--seq-len", "64", "--batch-size", "1", "--dataset", "random")
    screen, stderr = pty.openpty()  # the bar is drawn on terminals only
    command = [*CLI, "calibrate", str(tiny_directory), "-o", str(tmp_path / "out"), *endless]
    running = subprocess.Popen(command, stderr=stderr, preexec_fn=heed_interrupts)
    os.close(stderr)  # so that reading ends, with EIO, when the process does
    shown = b""
    while b"tokens/s" not in shown:
        shown += os.read(screen, 4096)
    running.send_signal(sent)
    with suppress(OSError):
        while chunk := os.read(screen, 4096):
            shown += chunk
    running.wait(timeout=60)
    assert running.returncode == status
    assert b"; nothing was written" in shown.splitlines()[-1]
    assert b"Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def test_debug_shows_the_traceback():
    assert isinstance(calibrate("./gone", "--debug").exception, InputError)
    assert isinstance(calibrate("./gone").exception, SystemExit)


def test_recipes_lists_the_catalogue_and_shows_one():
    listed = fp8kv("recipes")
    assert "qkv-attn_head" in listed.stdout
    shown = fp8kv("recipes", "tgi-kv_scale")
    assert shown.stdout.startswith("# Text Generation Inference")
    one_line_error(fp8kv("recipes", "nope"), "no recipe named 'nope'")


def test_doctor_names_what_it_found():
    done = fp8kv("doctor")
    for what in ("Python", __version__, "torch", "triton", "GPU", "builtin:smollm2"):
        assert what in done.stdout


@pytest.mark.parametrize("program", [app, calibrate_main, eval_main])
def test_every_command_line_says_its_version(program):
    done = CliRunner().invoke(program, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"fp8kv {__version__}\n")


def test_help_lists_every_flag_of_the_design():
    shown = fp8kv("calibrate", "--help").stdout
    for flag in (
        *("--output", "--recipe", "--strategy", "--observer", "--targets", "--format", "--reduce"),
        *("--tp-size", "--dataset", "--samples", "--seq-len", "--batch-size", "--seed", "--device"),
        *("--dtype", "--fp8-dtype", "--headroom", "--weights", "--overwrite", "--set", "--quiet"),
        *("--json", "--debug", "--trust-remote-code"),
    ):
        assert flag in shown


def test_help_shows_what_matters_before_the_panels():
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


@pytest.mark.parametrize("columns", ["50", "80"])
def test_help_names_every_flag_in_full(columns):
    environment = os.environ | {"COLUMNS": columns, "TERMINAL_WIDTH": columns}
    command = [sys.executable, "-c", NAMES_CUT_IN_HELP]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == []


def test_completion_for_bash():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m calib --show-completion; exit $?"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "complete -o default -F" in done.stdout


@pytest.mark.parametrize("name", ["vllm", "vllm-nvfp4", "sglang-nvfp4"])
def test_the_table_shows_what_is_written(name, tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name)
    assert done.exit_code == 0, done.stderr
    written = load_file(tmp_path / "out/model-fp8kv-scales.safetensors")
    keys, values = (
        [f"{float(x):.4g}" for key, x in sorted(written.items()) if key.endswith(f"{which}_scale")]
        for which in "kv"
    )
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[3] for row in cells] == keys
    assert [row[4] for row in cells] == values
    said = {"vllm": "FP8 KV-cache scales", "vllm-nvfp4": "(absmax / 448)"}
    assert said.get(name, "(absmax / 2688)") in done.stdout.splitlines()[0]
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", name, "--json", "--overwrite")
    layers = json.loads(done.stdout)["layers"]
    assert [f"{layer['k_scale']:.4g}" for layer in layers] == keys
