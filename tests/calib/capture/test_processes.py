"""Runs shared by processes, and runs that were killed, end in the very bits of one plain run."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from command_line import fp8kv, one_line_error
from families import save_model, tiny_model
from processes import ROOT, assert_same, launched, statistics

from calib.capture.processes import TIMEOUT

DATA = ("--dataset", "random", "--samples", 12, "--seq-len", 24, "--batch-size", 2)
COLLECTED = (
    "--observer", "mse", "--targets", "qkv", "--set", "means=true", "--device", "cpu",
    "--set", "data.skip_first=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """The statistics of one process that nothing disturbed."""
    out = tmp_path_factory.mktemp("plain") / "out"
    assert fp8kv("calibrate", model, "-o", out, *DATA, *COLLECTED).exit_code == 0
    return statistics(out)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_work_and_change_no_bit(count, model, plain, tmp_path):
    done = launched(count, model, "-o", tmp_path / "out", *DATA, *COLLECTED)
    assert done.returncode == 0, done.stderr
    assert_same(statistics(tmp_path / "out"), plain)
    assert done.stdout.count("written to") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_more_processes_than_batches_of_a_size_that_was_typed_is_one_clear_line(model, tmp_path):
    done = launched(
        2, model, "-o", tmp_path / "out", *DATA, "--samples", 2, "--seq-len", 48, "--device", "cpu"
    )
    assert "2 processes cannot share 1 batches; start fewer" in done.stderr
    assert done.returncode != 0
    assert [*tmp_path.iterdir()] == []


def test_a_batch_size_that_is_left_open_gives_every_process_work(model, tmp_path):
    few = ("--dataset", "random", "--samples", 3, "--seq-len", 80, *COLLECTED)
    done = launched(2, model, "-o", tmp_path / "out", *few)
    assert done.returncode == 0, done.stderr
    recipe = json.loads((tmp_path / "out/fp8kv_calibration.json").read_text())["recipe"]
    assert recipe["data"]["batch_size"] == 1
    alone = fp8kv("calibrate", model, "-o", tmp_path / "alone", *few, "--batch-size", 1)
    assert alone.exit_code == 0, alone.stderr
    assert_same(statistics(tmp_path / "out"), statistics(tmp_path / "alone"))
    none = launched(2, model, "-o", tmp_path / "none", *few, "--samples", 1)
    assert "2 processes cannot share 1 batches; start fewer" in none.stderr


def test_another_number_of_threads_is_recorded_and_does_not_go_on(model, tmp_path):
    out = tmp_path / "out"
    # four batches: on a busy machine threads that wait for each other take a second for each
    saved = killed_after_saving(model, out, signal.SIGKILL, samples=8, OMP_NUM_THREADS="2")
    long = (*DATA, *COLLECTED, "--set", "save_minutes=0", "--samples", 8, "--resume", "-o", out)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one_line_error(
            fp8kv("calibrate", model, *long),
            "another number of threads (2, now 1;", "OMP_NUM_THREADS",
        )  # fmt: skip
        assert saved.exists()
        torch.set_num_threads(2)
        assert fp8kv("calibrate", model, *long).exit_code == 0
    finally:
        torch.set_num_threads(before)
    assert json.loads((out / "fp8kv_calibration.json").read_text())["threads"] == 2


def test_ranks_with_different_recipes_stop(model, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "from calib.commands.app import calibrate_main\n"
        "sys.argv += ['--seed', os.environ['RANK']]\n"
        "calibrate_main()\n"
    )
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    command = [sys.executable, "-m", *launcher, model, "-o", tmp_path / "out", *DATA]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "different commands or recipes; start every one with the same command" in done.stderr
    assert not (tmp_path / "out").exists()


def test_nan_on_one_rank_ends_every_rank_with_its_error(tmp_path):
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.get_input_embeddings().weight[:] = float("nan")
    directory = save_model(broken, tmp_path / "broken")
    done = launched(2, directory, "-o", tmp_path / "out", *DATA, "--device", "cpu")
    assert done.returncode != 0
    assert done.stderr.count("holds NaN or Inf in sample") == 2
    assert not (tmp_path / "out").exists()


# the run itself, because whoever watches it from outside may look too late on a busy machine
KILLED = """
import os, sys
from calib.commands.app import main
from calib.capture.resume import SavedProgress

number, save, batches = int(sys.argv.pop(1)), SavedProgress.save_sometimes, []

def save_and_die(*arguments):
    save(*arguments)
    batches.append(1)
    if len(batches) == 3:
        os.kill(os.getpid(), number)

SavedProgress.save_sometimes = save_and_die
main()
"""


def killed_after_saving(model, out, signal_number, samples=400, **environment):
    """Start a run that saves after each batch, and is killed when it has saved three times."""
    command = [
        sys.executable, "-c", KILLED, int(signal_number), "calibrate", model, "-o", out, *DATA,
        *COLLECTED, "--set", "save_minutes=0", "--samples", samples,
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **environment},
    )  # fmt: skip
    assert done.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 2}[signal_number], done.stderr
    assert not out.exists()
    return out.parent / f".{out.name}.rank0.progress"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on_to_the_same_bits(signal_number, model, tmp_path):
    long = (*DATA, *COLLECTED, "--set", "save_minutes=0", "--samples", 400)
    whole = tmp_path / "whole"
    assert fp8kv("calibrate", model, "-o", whole, *long).exit_code == 0
    out = tmp_path / "out"
    saved = killed_after_saving(model, out, signal_number)
    assert saved.exists()
    saved.with_name(f"{saved.name}.1.partial").touch()  # as of a kill while it is written
    seen = []
    from calib.capture import loop as measure

    observe = measure._observe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_observe", lambda *a: (seen.append(1), observe(*a)))
        assert fp8kv("calibrate", model, "-o", out, *long, "--resume").exit_code == 0
    assert len(seen) == 200 - 3  # the rest, not everything
    assert_same(statistics(out), statistics(whole))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "whole"]


def test_another_command_does_not_go_on(model, tmp_path):
    out = tmp_path / "out"
    saved = killed_after_saving(model, out, signal.SIGKILL)
    long = (*DATA, *COLLECTED, "--set", "save_minutes=0", "--samples", 400, "--resume", "-o", out)
    one_line_error(fp8kv("calibrate", model, *long, "--seed", 7), "is of a run with another recipe")
    other = save_model(tiny_model("llama", num_hidden_layers=2), tmp_path / "other")
    one_line_error(fp8kv("calibrate", other, *long), "is of a run with another model")
    weights = model / "model.safetensors"
    before = weights.stat().st_mtime_ns
    os.utime(weights, ns=(before, before + 1))
    one_line_error(fp8kv("calibrate", model, *long), "with another state of the weight files")
    os.utime(weights, ns=(before, before))
    assert saved.exists()
    assert not out.exists()


def test_a_pass_layer_by_layer_does_not_go_on(model, tmp_path):
    options = (*DATA, *COLLECTED, "--offload", "layerwise", "--resume")
    one_line_error(fp8kv("calibrate", model, "-o", tmp_path / "out", *options), "saves no progress; leave")


TRAINER = """
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from calib import Recipe, scales_for
from calib.errors import InputError
from calib.capture.processes import surrounding_world

model, out = AutoModelForCausalLM.from_pretrained(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
rows = torch.arange(3, 127).repeat(2).view(4, 62)
mine = [row for row in rows[rank::2]]
recipe = Recipe(targets="qkv", observer={"name": "mse"}, headroom=1.25)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    together = scales_for(wrapped, mine, recipe=recipe, strategy="attn_head")
(out / f"said{rank}.txt").write_text("".join(str(each.message) for each in said))
alone = scales_for(model, mine, recipe=recipe, strategy="attn_head", gather=False)
everything = scales_for(model, [*rows], recipe=recipe, strategy="attn_head", gather=False)
torch.save((together, alone, everything), out / f"rank{rank}.pt")
for batches, options in (([] if rank else mine, {}), (mine, {"recipe": Recipe(headroom=1 + rank)})):
    try:
        scales_for(model, batches, **options)
    except InputError as error:
        (out / "errors.txt").open("a").write(f"{error}\\n")
with surrounding_world() as world:
    options = world.group._get_backend(torch.device("cpu")).options
    (out / f"timeout{rank}.txt").write_text(str(options._timeout.total_seconds()))
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_of_a_trainer_share_what_they_saw(model, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    command = [sys.executable, "-m", *launcher, model, tmp_path]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for together, _, everything in ranks:
        assert_same(together, everything)
    (_, first, _), (_, second, _) = ranks
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for rank in (0, 1):
        assert "only 248 tokens were read" in (tmp_path / f"said{rank}.txt").read_text()
    errors = (tmp_path / "errors.txt").read_text().splitlines()
    assert len(errors) == 4
    assert sum("no token was read" in error for error in errors) == 2
    assert sum("different models or recipes" in error for error in errors) == 2
    # no sooner than the processes of a command: one rank's batches may take long
    waits = {float((tmp_path / f"timeout{rank}.txt").read_text()) for rank in (0, 1)}
    assert waits == {TIMEOUT.total_seconds()}
