"""`--until`: where reading stops, the same for any number of processes and after a stop."""

import json
import re

import pytest
import torch
from command_line import fp8kv, one_line_error, ran
from families import tiny_model
from processes import assert_same, calibrate_forked, statistics

from calib.capture.attention import map_attention
from calib.capture.loop import calibrate
from calib.capture.processes import World
from calib.capture.resume import (
    FIRST_SAMPLES,
    FIRST_TOKENS,
    LOOKAHEAD,
    SavedProgress,
    Share,
    decision_points,
    read_until,
)
from calib.data import make_batches
from calib.recipe import Recipe
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_stats
from calib.scales.summary import covered_share

SAMPLES, SEQ_LEN, BATCH = 200, 100, 4
SHARE = 0.12  # which what is expected of these tokens falls below after some decisions, not all
DATA = (
    *("--dataset", "random", "--samples", SAMPLES, "--seq-len", SEQ_LEN, "--batch-size", BATCH),
    *("--device", "cpu", "--seed", 0, "--until"),
)


def random_batches(samples=SAMPLES, seq_len=SEQ_LEN, batch=BATCH):
    ids = torch.randint(64, (samples, seq_len), generator=torch.Generator().manual_seed(1))
    return make_batches(ids.tolist(), batch, pad_id=0)


def test_the_first_look_is_after_tokens_and_samples_enough_and_the_last_at_the_end():
    found = decision_points(random_batches())
    assert (found[0], found[-1]) == (-(-FIRST_TOKENS // (BATCH * SEQ_LEN)), SAMPLES // BATCH)
    assert found == sorted({*found})
    assert decision_points(random_batches(samples=40, seq_len=2048, batch=1))[0] == FIRST_SAMPLES
    assert decision_points(random_batches(samples=3)) == [1]
    # tokens that are not counted bring no look nearer
    skipping = make_batches([[7] * SEQ_LEN] * SAMPLES, BATCH, pad_id=0, skip_first=50)
    assert decision_points(skipping)[0] == -(-FIRST_TOKENS // (BATCH * 50)) > found[0]


def test_it_stops_where_what_is_expected_is_held_and_not_before_in_any_number_of_processes(model, tmp_path):
    out = tmp_path / "alone"
    printed = ran("calibrate", model, "-o", out, *DATA, SHARE).stdout
    stats, report = load_stats(out), json.loads((out / "fp8kv_calibration.json").read_text())
    recipe = Recipe.model_validate(report["recipe"])
    read, available = stats.tokens, SAMPLES * SEQ_LEN
    assert FIRST_TOKENS * 1.25 < read < available
    assert f"{read:,} of {available:,} tokens were read" in " ".join(printed.split())
    assert covered_share(stats, derive_scales(stats, recipe), LOOKAHEAD, SHARE) >= 0.95
    assert (report["dataset"]["tokens"], report["dataset"]["samples"]) == (read, read // SEQ_LEN)
    assert recipe.data.until == SHARE
    done = calibrate_forked(3, model, "-o", tmp_path / "out", *DATA, SHARE)
    assert [rank.exit_code for rank in done] == [0, 0, 0], done
    assert_same(statistics(tmp_path / "out"), statistics(out))


def test_a_run_that_goes_on_stops_where_it_would_have(tmp_path):
    model, batches = tiny_model("llama"), random_batches()
    attention, recipe = map_attention(model), Recipe(device="cpu", data={"until": SHARE})

    def read(saved, resume):
        told = []
        share = Share(model, batches, recipe, attention, saved, resume, told.append)
        stats, stop = read_until(share, batches, World(), recipe)
        assert sum(told) == stop.batches * BATCH * SEQ_LEN  # also of what was read before
        return stats, stop

    whole, stop = read(SavedProgress(tmp_path / "a", {}, every_seconds=3600), False)
    first, *_ = decision_points(batches)
    assert first < stop.batches < len(batches)
    for done in (1, first, first + 1):  # before, at and after the first look
        saved = SavedProgress(tmp_path / "b", {}, every_seconds=0)
        part = calibrate(model, batches[:done], recipe, attention=attention)
        saved.save_sometimes(lambda part=part: part, done)
        again, at = read(SavedProgress(tmp_path / "b", {}, every_seconds=3600), True)
        assert at == stop
        assert again.tensors().keys() == whole.tensors().keys()
        assert all(torch.equal(x, again.tensors()[name]) for name, x in whole.tensors().items())


def test_text_that_is_not_enough_is_all_read_and_said_so(model, tmp_path):
    done = ran("calibrate", model, "-o", tmp_path / "out", *DATA, 0.0001)
    printed = " ".join(done.stdout.split())
    assert "20,000 of 20,000 tokens were read" in printed
    held = re.search(r"in (\d+)% of layers, not in 95% as was asked: use more text, or --headroom", printed)
    assert int(held[1]) < 95


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--samples", "4"), "400 tokens are too few to tell what others may hold: calibrate"),
        (("--strategy", "channel", "--format", "fp8kv"), "say nothing of strategy 'channel'"),
        (("--observer", "mse"), "say nothing of observer 'mse'"),
        (("--offload", "layerwise"), "cannot stop early; leave --until away, or"),
    ],
)
def test_what_cannot_be_told_is_refused_before_the_model_reads(flags, message, model, tmp_path):
    refused = fp8kv("calibrate", model, "-o", tmp_path / "out", *DATA, SHARE, *flags)
    one_line_error(refused, message)
    assert not (tmp_path / "out").exists()
