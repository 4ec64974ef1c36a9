"""A run that was stopped ends in the bits of one that was not; progress is saved whole, or not at all."""

import json
import os
import signal
import sys
from functools import reduce

import pytest
import torch
from command_line import fp8kv, one_line_error
from families import LATENT, save_model, tiny_model
from processes import assert_same, forked, statistics

from calib.capture import loop
from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.capture.resume import SavedProgress, Share, progress_file, remove_progress
from calib.commands.app import main
from calib.data import make_batches
from calib.errors import InputError
from calib.recipe import load_recipe
from calib.scales.stats import STATISTICS, KVStats
from calib.scales.stats_file import save_stats

RECIPE = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
RUN = {"model": "m", "recipe": {"seed": 1}}
BATCHES = make_batches([list(range(3 + i, 40 + i)) for i in range(6)], 1, pad_id=0)
# eight batches, after each of which progress is saved
COMMAND = (
    *("--dataset", "random", "--samples", 16, "--seq-len", 24, "--batch-size", 2, "--device", "cpu"),
    *("--observer", "mse", "--targets", "qkv", "--set", "means=true", "--set", "data.skip_first=3"),
    *("--set", "save_minutes=0"),
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As many as a fork has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bits(stats):
    """Everything that was measured, by place."""
    return {name: tensor.numpy().tobytes() for name, tensor in stats.tensors().items()} | {"n": stats.tokens}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_statistics_add_up_to_the_same_bits_in_any_order_and_after_a_stop(family, tmp_path):
    model = tiny_model(family, **LATENT.get(family, {}))
    whole, *parts = (calibrate(model, read, RECIPE) for read in (BATCHES, *([batch] for batch in BATCHES)))
    assert len(bits(whole)) == 1 + 3 * (2 * len(STATISTICS) + 2)  # of K and V all, of Q two
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        assert bits(reduce(KVStats.merge, [parts[i] for i in order])) == bits(whole)

    path = progress_file(tmp_path / "out", 0)
    saved = SavedProgress(path, RUN, every_seconds=0)
    assert saved.load() == (None, 0)
    first, rest = (calibrate(model, read, RECIPE) for read in (BATCHES[:4], BATCHES[4:]))
    saved.save_sometimes(lambda: first, 4)
    found, batches = SavedProgress(path, RUN, every_seconds=0).load()
    assert batches == 4
    assert bits(found.merge(rest)) == bits(whole)
    assert found.latent == (family in LATENT)
    later = SavedProgress(progress_file(tmp_path / "out", 3), RUN, every_seconds=3600)
    later.save_sometimes(lambda: pytest.fail("statistics were taken before it was time"), 1)
    assert [file.name for file in tmp_path.iterdir()] == [".out.rank0.progress"]
    remove_progress(path)
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_file_is_refused(tmp_path, tiny_llama):
    path = progress_file(tmp_path / "out", 0)
    one = calibrate(tiny_llama, BATCHES[:1], RECIPE)
    SavedProgress(path, RUN, every_seconds=0).save_sometimes(lambda: one, 7)
    saved = SavedProgress(path, RUN, every_seconds=0)
    with pytest.raises(InputError, match="covers 7 batches of 6; it is damaged"):
        Share(tiny_llama, BATCHES, RECIPE, map_attention(tiny_llama), saved, resume=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot read statistics"):
        saved.load()
    save_stats(one, path)  # statistics, but no progress
    with pytest.raises(InputError, match="another model"):
        saved.load()


def killed_after_three_batches(model, out, number):
    """Start a command in a fork that kills itself: who watches from outside may look too late."""

    def work(rank):
        save, batches = SavedProgress.save_sometimes, []

        def save_and_die(*arguments):
            save(*arguments)
            batches.append(1)
            if len(batches) == 3:
                os.kill(os.getpid(), number)

        SavedProgress.save_sometimes = save_and_die
        sys.argv = ["fp8kv", "calibrate", str(model), "-o", str(out), *map(str, COMMAND)]
        main()

    ((status, _),) = forked(1, work)
    assert status == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 2}[number]
    assert not out.exists()
    saved = progress_file(out, 0)
    assert saved.exists()
    return saved


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on_to_the_same_bits(number, model, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert fp8kv("calibrate", model, "-o", whole, *COMMAND).exit_code == 0
    saved = killed_after_three_batches(model, out, number)
    saved.with_name(f"{saved.name}.1.partial").touch()  # as of a kill while it is written
    seen, observe = [], loop._observe
    monkeypatch.setattr(loop, "_observe", lambda *given: (seen.append(1), observe(*given)))
    assert fp8kv("calibrate", model, "-o", out, *COMMAND, "--resume").exit_code == 0
    assert len(seen) == 8 - 3  # the rest, not everything
    assert_same(statistics(out), statistics(whole))
    assert json.loads((out / "fp8kv_calibration.json").read_text())["threads"] == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "whole"]


def test_another_command_does_not_go_on(model, tmp_path):
    out = tmp_path / "out"
    saved = killed_after_three_batches(model, out, signal.SIGKILL)
    command = (*COMMAND, "--resume", "-o", out)
    one_line_error(fp8kv("calibrate", model, *command, "--seed", 7), "is of a run with another recipe")
    other = save_model(tiny_model("llama", num_hidden_layers=2), tmp_path / "other")
    one_line_error(fp8kv("calibrate", other, *command), "is of a run with another model")
    weights = model / "model.safetensors"
    before = weights.stat().st_mtime_ns
    os.utime(weights, ns=(before, before + 1))
    one_line_error(fp8kv("calibrate", model, *command), "with another state of the weight files")
    os.utime(weights, ns=(before, before))
    torch.set_num_threads(2)
    refused = fp8kv("calibrate", model, *command)
    torch.set_num_threads(1)
    one_line_error(refused, "another number of threads (1, now 2; see OMP_NUM_THREADS)")
    assert saved.exists()
    assert not out.exists()
