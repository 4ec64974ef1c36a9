"""Runs that processes share, that were stopped, or that end early have the very bits of one plain run."""

import json
import os
import re
import signal
import sys
import warnings
from functools import partial, reduce

import pytest
import torch
from command_line import fp8kv, one_line_error, ran
from families import LATENT, save_model, tiny_model
from processes import assert_same, calibrate_forked, forked, launched, one_thread, statistics  # noqa: F401
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from calib import Recipe, scales_for
from calib.capture import loop, resume
from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.capture.processes import TIMEOUT, World, surrounding_world
from calib.capture.resume import SavedProgress, Share, decision_points, progress_file, remove_progress
from calib.commands.app import main
from calib.data import make_batches
from calib.errors import InputError
from calib.recipe import load_recipe
from calib.scales.stats import STATISTICS, KVStats, derive_scales
from calib.scales.stats_file import load_stats, save_stats
from calib.scales.summary import covered_share

DATA = ("--dataset", "random", "--samples", 12, "--seq-len", 24, "--batch-size", 2, "--device", "cpu")
COLLECTED = ("--observer", "mse", "--targets", "qkv", "--set", "means=true", "--set", "data.skip_first=3")
# eight batches, after each of which progress is saved
COMMAND = (*DATA, "--samples", 16, *COLLECTED, "--set", "save_minutes=0")
RECIPE = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
RUN = {"model": "m", "recipe": {"seed": 1}}
BATCHES = make_batches([list(range(3 + i, 40 + i)) for i in range(6)], 1, pad_id=0)
SAMPLES, SEQ_LEN, BATCH = 200, 100, 4
SHARE = 0.12  # which what is expected of these tokens falls below after some decisions, not all
UNTIL = (*DATA, "--samples", SAMPLES, "--seq-len", SEQ_LEN, "--batch-size", BATCH, "--seed", 0, "--until")


def test_processes_of_torchrun_share_the_work_and_change_no_bit(model, tmp_path):
    done = launched(2, model, "-o", tmp_path / "out", *DATA, *COLLECTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    ran("calibrate", model, "-o", tmp_path / "plain", *DATA, *COLLECTED)
    assert_same(statistics(tmp_path / "out"), statistics(tmp_path / "plain"))


def test_an_open_batch_size_gives_every_process_work_and_one_that_was_typed_may_not(model, tmp_path):
    few = ("--dataset", "random", "--samples", 3, "--seq-len", 80, "--device", "cpu", *COLLECTED)
    for rank in calibrate_forked(2, model, "-o", tmp_path / "out", *few, "--batch-size", 4):
        assert rank.exit_code == 2
        assert "2 processes cannot share 1 batches; start fewer" in rank.stderr
    assert [*tmp_path.iterdir()] == []
    done = calibrate_forked(2, model, "-o", tmp_path / "out", *few)
    assert [rank.exit_code for rank in done] == [0, 0], done
    recipe = json.loads((tmp_path / "out/fp8kv_calibration.json").read_text())["recipe"]
    assert recipe["data"]["batch_size"] == 1
    ran("calibrate", model, "-o", tmp_path / "alone", *few, "--batch-size", 1)
    assert_same(statistics(tmp_path / "out"), statistics(tmp_path / "alone"))


def test_ranks_with_different_recipes_stop(model, tmp_path):
    def work(rank):
        return fp8kv("calibrate", model, "-o", tmp_path / "out", *DATA, "--seed", rank).stderr

    for _, said in forked(2, work):
        assert "different commands or recipes; start every one with the same command" in said
    assert not (tmp_path / "out").exists()


def test_nan_on_one_rank_ends_every_rank_with_its_error(tmp_path):
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.get_input_embeddings().weight[7] = float("nan")
    directory = save_model(broken, tmp_path / "broken")
    rows = [" ".join(f"w{i}" for i in range(start, start + 32)) for start in (10, 40, 70, 90)]
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(map(json.dumps, [*rows, "w7 w8"])))
    data = ("--dataset", text, "--seq-len", 32, "--batch-size", 1, "--device", "cpu")
    for rank in calibrate_forked(2, directory, "-o", tmp_path / "out", *data):
        assert rank.exit_code != 0
        assert "holds NaN or Inf in sample" in rank.stderr
    assert not (tmp_path / "out").exists()


def train(path, rank):
    """Measure in a trainer of two processes; return what each call gave, said and refused."""
    model = AutoModelForCausalLM.from_pretrained(path)
    distributed.init_process_group("gloo")
    rows = torch.arange(3, 127).repeat(2).view(4, 62)
    mine = [*rows[rank::2]]
    recipe = Recipe(targets="qkv", observer={"name": "mse"}, headroom=1.25, strategy="attn_head")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        together = scales_for(DistributedDataParallel(model), mine, recipe=recipe)
    alone, everything = (scales_for(model, part, recipe=recipe, gather=False) for part in (mine, [*rows]))
    refusals = []
    for batches, headroom in (([] if rank else mine, 1), (mine, 1 + rank)):
        with pytest.raises(InputError) as refused:
            scales_for(model, batches, recipe=Recipe(headroom=headroom))
        refusals.append(str(refused.value))
    with surrounding_world() as world:
        timeout = world.group._get_backend(torch.device("cpu")).options._timeout
    distributed.destroy_process_group()
    return together, alone, everything, " ".join(str(each.message) for each in said), refusals, timeout


@pytest.mark.filterwarnings("ignore:only .* tokens were read:UserWarning")
def test_ranks_of_a_trainer_share_what_they_saw(model):
    ranks = [result for _, result in forked(2, lambda rank: train(model, rank))]
    for together, _, everything, said, (no_text, other_recipe), timeout in ranks:
        assert_same(together, everything)
        assert "only 248 tokens were read" in said
        assert "no token was read" in no_text
        assert "different models or recipes" in other_recipe
        assert timeout == TIMEOUT  # no sooner than a command's processes: one rank's batches may take long
    first, second = (alone for _, alone, *_ in ranks)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def bits(stats):
    return {name: tensor.numpy().tobytes() for name, tensor in stats.tensors().items()} | {"n": stats.tokens}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_statistics_add_up_to_the_same_bits_in_any_order_and_after_a_stop(family, tmp_path):
    model = tiny_model(family, **LATENT.get(family, {}))
    whole, *parts = (calibrate(model, read, RECIPE) for read in (BATCHES, *([batch] for batch in BATCHES)))
    of_kv = len(STATISTICS) - 2  # all but modalities and what engines had at least; of Q two
    assert len(bits(whole)) == 1 + 3 * (2 * of_kv + 2)
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
        Share(tiny_llama, BATCHES, RECIPE, map_attention(tiny_llama), saved)
    whole, q = path.read_bytes(), one.tensors()["model.layers.0.self_attn", "q", "amax"].numpy()
    for bad, problem in (
        (whole[:-100], "is cut short: it has .* of .* bytes"),
        (whole.replace(q.tobytes(), (100 * q).tobytes()), "its values are not those that were written"),
    ):
        path.write_bytes(bad)
        with pytest.raises(InputError, match=f"{problem}.*; delete that file to start again"):
            saved.load()
    save_stats(one, path)  # statistics, but no progress
    with pytest.raises(InputError, match="another model"):
        saved.load()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on_to_the_same_bits_and_no_other_does(number, model, tmp_path, monkeypatch, capfd):
    whole, out, command = tmp_path / "whole", tmp_path / "out", (*COMMAND, "--resume")
    ran("calibrate", model, "-o", whole, *COMMAND)

    def work(rank):  # in a fork that kills itself: who watches from outside may look too late
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
    saved_said = "fp8kv: terminated; progress is saved: the same command with --resume goes on"
    assert (saved_said in capfd.readouterr().err) == (number == signal.SIGTERM)
    saved = progress_file(out, 0)

    def refused(said, *flags, of=model):
        one_line_error(fp8kv("calibrate", of, "-o", out, *command, *flags), said)
        assert (saved.exists(), out.exists()) == (True, False)

    lost = "give --resume to go on, or delete that file to start again"
    one_line_error(fp8kv("calibrate", model, "-o", out, *COMMAND, "--overwrite"), lost)
    other_process = progress_file(out, 1)
    other_process.touch()
    all_files = f"'{saved}', '{other_process}' are the progress of a run that was stopped"
    done = fp8kv("calibrate", model, "-o", out, *COMMAND)
    one_line_error(done, all_files, "or delete these files to start again")
    other_process.unlink()
    refused("is of a run with another recipe", "--seed", 7)
    with monkeypatch.context() as patch:
        patch.setattr("calib.capture.resume.versions", lambda _: {"torch": "1.0"})
        refused("another version of torch (2.")
    other = save_model(tiny_model("llama", num_hidden_layers=2), tmp_path / "other")
    with monkeypatch.context() as patch:  # before anything is loaded
        patch.setattr("calib.job.load_config", lambda *_: pytest.fail("loaded"))
        refused("is of a run with another model", of=other)
    weights = model / "model.safetensors"
    before = weights.stat().st_mtime_ns
    os.utime(weights, ns=(before, before + 1))
    refused("with another state of the weight files")
    os.utime(weights, ns=(before, before))
    torch.set_num_threads(2)
    refused("another number of threads (1, now 2; see OMP_NUM_THREADS)")
    torch.set_num_threads(1)
    saved.with_name(f"{saved.name}.1.partial").touch()  # as of a kill while it is written
    seen, observe = [], loop._observe
    monkeypatch.setattr(loop, "_observe", lambda *given: (seen.append(1), observe(*given)))
    ran("calibrate", model, "-o", out, *command)
    assert len(seen) == 8 - 3  # the rest, not everything
    done = fp8kv("calibrate", model, "-o", out, *command)
    one_line_error(
        done, f"the calibration in '{out}' is finished, and nothing is left to resume; add --overwr"
    )
    ran("calibrate", model, "-o", out, *command, "--overwrite")
    saved.touch()  # of a run with --overwrite that was stopped
    done = fp8kv("calibrate", model, "-o", out, *command)
    one_line_error(done, f"output '{out}' exists; add --overwrite")
    saved.unlink()
    over = ran("calibrate", model, "-o", tmp_path / "over", *command)
    assert "--resume found no saved progress, and began at the start" in " ".join(over.stdout.split())
    assert_same(statistics(out), statistics(whole))
    assert json.loads((out / "fp8kv_calibration.json").read_text())["threads"] == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "out", "over", "whole"]


def random_batches(samples=SAMPLES, seq_len=SEQ_LEN, batch=BATCH):
    ids = torch.randint(64, (samples, seq_len), generator=torch.Generator().manual_seed(1))
    return make_batches(ids.tolist(), batch, pad_id=0)


def test_the_first_look_is_after_tokens_and_samples_enough_and_the_last_at_the_end():
    found = decision_points(random_batches())
    assert (found[0], found[-1]) == (-(-resume.FIRST_TOKENS // (BATCH * SEQ_LEN)), SAMPLES // BATCH)
    assert found == sorted({*found})
    assert decision_points(random_batches(samples=40, seq_len=2048, batch=1))[0] == resume.FIRST_SAMPLES
    assert decision_points(random_batches(samples=3)) == [1]
    # tokens that are not counted bring no look nearer
    skipping = make_batches([[7] * SEQ_LEN] * SAMPLES, BATCH, pad_id=0, skip_first=50)
    assert decision_points(skipping)[0] == -(-resume.FIRST_TOKENS // (BATCH * 50)) > found[0]


def test_it_stops_where_what_is_expected_is_held_and_not_before_in_any_number_of_processes(model, tmp_path):
    out = tmp_path / "alone"
    printed = ran("calibrate", model, "-o", out, *UNTIL, SHARE).stdout
    stats, report = load_stats(out), json.loads((out / "fp8kv_calibration.json").read_text())
    recipe = Recipe.model_validate(report["recipe"])
    read, available = stats.tokens, SAMPLES * SEQ_LEN
    assert resume.FIRST_TOKENS * 1.25 < read < available
    assert f"{read:,} of {available:,} tokens were read" in " ".join(printed.split())
    assert covered_share(stats, derive_scales(stats, recipe), resume.LOOKAHEAD, SHARE) >= 0.95
    assert (report["dataset"]["tokens"], report["dataset"]["samples"]) == (read, read // SEQ_LEN)
    assert recipe.data.until == SHARE
    done = calibrate_forked(3, model, "-o", tmp_path / "out", *UNTIL, SHARE)
    assert [rank.exit_code for rank in done] == [0, 0, 0], done
    assert_same(statistics(tmp_path / "out"), statistics(out))


def test_a_run_that_goes_on_stops_where_it_would_have(tmp_path):
    model, batches = tiny_model("llama"), random_batches()
    attention, recipe = map_attention(model), Recipe(device="cpu", data={"until": SHARE})

    def read(saved):
        told, skips = [], []
        advance, skip = told.append, partial(skips.append, 1)
        share = Share(model, batches, recipe, attention, saved, advance, skip)
        assert len(skips) == len(told) == share.batches_read
        stats, stop = resume.read_until(share, batches, World(), recipe)
        assert sum(told) == stop.batches * BATCH * SEQ_LEN  # also of what was read before
        return stats, stop

    whole, stop = read(SavedProgress(tmp_path / "a", {}, every_seconds=3600))
    first, *_ = decision_points(batches)
    assert first < stop.batches < len(batches)
    for done in (1, first, first + 1):  # before, at and after the first look
        saved = SavedProgress(tmp_path / "b", {}, every_seconds=0)
        part = calibrate(model, batches[:done], recipe, attention=attention)
        saved.save_sometimes(lambda part=part: part, done)
        again, at = read(SavedProgress(tmp_path / "b", {}, every_seconds=3600))
        assert (at, bits(again)) == (stop, bits(whole))


def test_text_that_is_not_enough_is_all_read_and_said_so(model, tmp_path):
    printed = " ".join(ran("calibrate", model, "-o", tmp_path / "out", *UNTIL, 0.0001).stdout.split())
    assert "20,000 of 20,000 tokens were read" in printed
    held = re.search(r"in (\d+)% of layers, not in 95% as was asked: use more text, or --headroom", printed)
    assert int(held[1]) < 95


def test_what_cannot_be_told_is_refused_before_the_model_reads(model, tmp_path):
    for flags, message in (
        (
            ("--samples", "4"),
            "399 tokens, without repeated text, are too few to tell what others may hold: calibrate",
        ),
        (("--strategy", "channel", "--format", "fp8kv"), "say nothing of strategy 'channel'"),
        (("--observer", "mse"), "say nothing of observer 'mse'"),
        (("--offload", "layerwise"), "cannot stop early; leave --until away, or"),
    ):
        one_line_error(fp8kv("calibrate", model, "-o", tmp_path / "out", *UNTIL, SHARE, *flags), message)
        assert not (tmp_path / "out").exists()
