"""The command line as a user meets it: real files, and one line for each mistake."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys

import pytest
import torch
from command_line import SMALL, calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import edit_tensors, save_model, tiny_model
from safetensors.torch import load_file
from typer.testing import CliRunner

from calib import __version__
from calib.commands.app import app, calibrate_main, eval_main
from calib.errors import Fp8kvError, InputError
from calib.files.names import INDEX_FILE, SCALES_SHARD, STATS_FILE
from calib.scales.stats_file import load_stats

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
ADVICE = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"


def test_calibrate_prints_layers_speed_and_commands_that_run(tiny_directory, tmp_path):
    out = tmp_path / "out"
    done = succeeded(calibrate(tiny_directory, "-o", out, "--strategy", "attn_head"))
    for heading in ("layer", "K amax", "V scale"):
        assert heading in done.stdout
    assert "strategy attn_head, largest of each layer" in done.stdout
    assert "K smallest head" not in done.stdout  # each has a scale of its own
    one = calibrate(tiny_directory, "-o", tmp_path / "one", "--strategy", "tensor")
    assert "K smallest head" in succeeded(one).stdout
    assert "largest of each layer" not in one.stdout
    assert "128 tokens in" in done.stdout
    assert f"vllm serve {out} --kv-cache-dtype fp8" in done.stdout
    assert "random token ids" in done.stderr.lower()  # the warning about the data
    assert len(load_file(out / "model-fp8kv-scales.safetensors")) == 6
    next_command = done.stdout.splitlines()[-1].partition("fp8kv ")[2]
    assert next_command == f'generate {out} "The capital of France is" --compare'
    ran(*shlex.split(next_command))
    again = calibrate(tiny_directory, "-o", out, "--overwrite", "--set", "export.weights=none")
    assert again.stdout.splitlines()[-1].endswith(f"fp8kv verify {out}")


TITLES = {"vllm": "FP8 KV-cache scales", "vllm-nvfp4": "(absmax / 448)", "sglang-nvfp4": "(absmax / 2688)"}


@pytest.mark.parametrize(("name", "title"), TITLES.items())
def test_table_and_json_show_the_scales_that_are_written(name, title, tiny_directory, tmp_path):
    flags = ("-o", tmp_path / "out", "--format", name)
    done = succeeded(calibrate(tiny_directory, *flags))
    assert title in done.stdout.splitlines()[0]
    written = sorted(load_file(tmp_path / "out/model-fp8kv-scales.safetensors").items())
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if "│" in line]
    printed = json.loads(calibrate(tiny_directory, *flags, "--json", "--overwrite").stdout)
    for column, letter in ((3, "k"), (4, "v")):
        scales = [f"{float(x):.4g}" for key, x in written if key.endswith(f"{letter}_scale")]
        assert [row[column].strip() for row in rows] == scales
        assert [f"{layer[f'{letter}_scale']:.4g}" for layer in printed["layers"]] == scales
    assert [layer["layer_idx"] for layer in printed["layers"]] == [0, 1, 2]
    assert (printed["output"], printed["tokens"]) == (str(tmp_path / "out"), 128)
    assert set(printed["seconds"]) == {"load", "calibrate", "write"}
    assert printed["tokens_per_second"] == pytest.approx(128 / printed["seconds"]["calibrate"])
    assert printed["warnings"]


def test_names_of_directories_cannot_steer_the_terminal(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(Fp8kvError, "__init__", Exception.__init__)  # of more than one line, by such a name
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


def test_bad_numbers_are_named_by_the_row_of_the_file(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
    directory, data = save_model(model, tmp_path / "model"), tmp_path / "a.jsonl"
    lines = [" ".join(f"w{i + j}" for j in range(20)) for i in (3, 30, 70, 90)]  # the third has w77
    data.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    done = fp8kv(
        "calibrate",
        directory,
        "-o",
        tmp_path / "out",
        "--dataset",
        data,
        "--samples",
        4,
        "--seq-len",
        32,
        "--allow-few-tokens",
    )
    one_line_error(done, "K holds NaN or Inf in sample", "of those read (", "a.jsonl, line 3);")


def test_a_recipe_with_flags_and_set_on_top_into_the_default_output(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--recipe", "qkv-attn_head", "--set", "data.seed=7", "--set", "headroom=2.0")
    done = ran("calibrate", tiny_directory, *SMALL, *flags, "--batch-size", "2")
    out = tmp_path / "tiny-llama-fp8kv-attn_head"
    saved = json.loads((out / "fp8kv_calibration.json").read_text())["recipe"]
    assert (saved["targets"], saved["strategy"], saved["headroom"]) == ("qkv", "attn_head", 2.0)
    assert (saved["data"]["seed"], saved["data"]["batch_size"]) == (7, 2)
    assert "those of queries (Q) are in the files" in done.stdout
    assert "with scales of queries (Q)" in (out / "README.md").read_text()


def test_a_model_or_a_dataset_that_cannot_be_reached(tiny_directory):
    one_line_error(calibrate("./gone"), "model './gone' does not exist")
    one_line_error(calibrate("org/gone"), "model 'org/gone'", "the Hub cannot be reached")
    done = fp8kv("calibrate", tiny_directory, "--seq-len", "32", "--samples", "4")
    one_line_error(done, "ultrachat_200k", "--dataset builtin:python-docs")
    for flags, said in (
        (["--dataset", "builtin:wiki"], "no built-in dataset 'builtin:wiki'; built in: builtin:python-docs"),
        (["--set", "datta.seed=1"], "unknown key 'datta' (did you mean 'data'?)"),
        (["--targets", "qkv", "--format", "json"], "holds no query scales"),
    ):
        one_line_error(fp8kv("calibrate", tiny_directory, *SMALL, *flags), said)
    for arguments, said in (
        (("strip", "gone", "--output="), "after --output is empty"),
        (("verify", ""), "is empty"),
    ):
        done = fp8kv(*arguments)
        assert (done.exit_code, said in done.stderr) == (2, True)
    assert isinstance(calibrate("./gone", "--debug").exception, InputError)
    assert isinstance(calibrate("./gone").exception, SystemExit)


def test_weights_that_are_damaged_or_that_the_disk_has_no_room_for(tiny_directory, tmp_path):
    out, (soft, hard) = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file may grow beyond 64 KiB: what a full disk looks like to a writer
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        done = calibrate(tiny_directory, "-o", out, "--weights", "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line_error(done, f"cannot write '{out}'")
    file, name = tiny_directory / "model.safetensors", "model.layers.1.self_attn.v_proj.weight"
    edit_tensors(tiny_directory, lambda tensors: tensors[name][0, 0].fill_(torch.nan))
    one_line_error(calibrate(tiny_directory, "-o", out), "layers.1.self_attn: V holds NaN or Inf in sample ")
    file.write_bytes(file.read_bytes()[:-100])
    one_line_error(calibrate(tiny_directory, "-o", out), "model.safetensors' is cut short: it has ")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", INDEX_FILE])
def test_a_git_lfs_pointer_in_place_of_a_file_of_the_model(name, tiny_directory):
    (tiny_directory / name).write_text(POINTER)
    out = tiny_directory.with_name("out")
    done = fp8kv("calibrate", tiny_directory, *SMALL, "--dataset", "builtin:python-docs", "-o", out)
    one_line_error(done, f"'{tiny_directory / name}' {ADVICE}")


def test_git_lfs_pointers_in_place_of_text_and_scales_but_not_of_what_is_not_read(tiny_directory, tmp_path):
    for kind in (".jsonl", ".json", ".parquet", ".txt"):
        file = tmp_path / f"text{kind}"
        file.write_text(POINTER)
        one_line_error(fp8kv("calibrate", tiny_directory, *SMALL, "--dataset", file), f"'{file}' {ADVICE}")
    # many repositories hold the same weights in forms that their readers do not pull
    for name in ("pytorch_model.bin", "tokenizer.model"):
        (tiny_directory / name).write_text(POINTER)
    out = tmp_path / "out"
    succeeded(calibrate(tiny_directory, "-o", out))
    (out / STATS_FILE).write_text(POINTER)
    with pytest.raises(InputError, match=re.escape(f"'{out / STATS_FILE}' {ADVICE}")):
        load_stats(out)
    (out / SCALES_SHARD).write_text(POINTER)
    one_line_error(fp8kv("verify", out, "--engine", "vllm"), f"'{out / SCALES_SHARD}' {ADVICE}")
    # nothing of the user's own can be downloaded again
    (out / SCALES_SHARD).write_bytes(b"cut off")
    one_line_error(
        fp8kv("verify", out),
        "is damaged or incomplete: it has 7 bytes, too few",
        f"; put '{SCALES_SHARD}' back, or delete it and run",
    )
    (out / SCALES_SHARD).unlink()
    one_line_error(fp8kv("verify", out), f"names '{SCALES_SHARD}' for KV-cache scales, and it is missing")
    one_line_error(
        fp8kv("generate", out, "w3"), f"names '{SCALES_SHARD}', which is missing; put '{SCALES_SHARD}' back"
    )


def test_recipes_facts_of_the_machine_and_versions_are_shown():
    assert "qkv-attn_head" in fp8kv("recipes").stdout
    assert json_of("recipes")["tgi-kv_scale"].startswith("Scalar kv_scale")
    assert fp8kv("recipes", "tgi-kv_scale").stdout.startswith("# Text Generation Inference")
    assert json_of("recipes", "tgi-kv_scale")["export"]["formats"] == ["tgi"]
    one_line_error(fp8kv("recipes", "nope"), "no recipe named 'nope'; bundled: ")
    three = "did you mean 'qkv-attn_head', 'attn_head-mse' or 'attn_head-absmax'?"
    one_line_error(fp8kv("recipes", "attn-head"), three)
    assert "for '--dtype': 'x' is not one of 'auto'" in fp8kv("calibrate", "m", "--dtype", "x").stderr
    # the facts of doctor, and the version of every command line
    printed, found = fp8kv("doctor").stdout, json_of("doctor")
    for what in ("Python", "torch", "triton", "GPU", "builtin:smollm2"):
        assert what in printed
        assert what in found
    assert __version__ in printed
    for program in (app, calibrate_main, eval_main):
        done = CliRunner().invoke(program, ["--version"])
        assert (done.exit_code, done.stdout) == (0, f"fp8kv {__version__}\n")


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


def test_help_shows_what_matters_first_every_flag_in_full_on_a_narrow_screen_and_bash_completes_them():
    shown = fp8kv("calibrate", "--help").stdout
    order = "Options --output --recipe --strategy --format --dataset --samples --seq-len --device --evaluate "
    order += "--set Data --seed Scales --observer Output --overwrite Resources --max-memory"
    places = [shown.index(each) for each in order.split()]
    assert places == sorted(places)
    narrow = os.environ | {"COLUMNS": "50", "TERMINAL_WIDTH": "50"}  # read when they are imported
    completion = ["bash", "-c", f"{sys.executable} -m calib --show-completion; exit $?"]
    help, script = (
        subprocess.run(command, capture_output=True, text=True, env=narrow, check=True).stdout
        for command in ([sys.executable, "-c", NAMES_CUT_IN_HELP], completion)
    )
    assert help.split() == []
    assert "complete -o default -F" in script
