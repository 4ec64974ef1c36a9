"""Runs shared by processes end in the very bits of one plain run, and fail together."""

import json
import warnings

import pytest
import torch
from command_line import fp8kv, ran
from families import save_model, tiny_model
from processes import assert_same, calibrate_forked, forked, launched, statistics
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from calib import Recipe, scales_for
from calib.capture.processes import TIMEOUT, surrounding_world
from calib.errors import InputError

DATA = ("--dataset", "random", "--samples", 12, "--seq-len", 24, "--batch-size", 2, "--device", "cpu")
COLLECTED = ("--observer", "mse", "--targets", "qkv", "--set", "means=true", "--set", "data.skip_first=3")


def test_processes_of_torchrun_share_the_work_and_change_no_bit(model, tmp_path):
    done = launched(2, model, "-o", tmp_path / "out", *DATA, *COLLECTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    ran("calibrate", model, "-o", tmp_path / "plain", *DATA, *COLLECTED)
    assert_same(statistics(tmp_path / "out"), statistics(tmp_path / "plain"))


def test_more_processes_than_batches_of_a_size_that_was_typed_is_one_clear_line(model, tmp_path):
    for rank in calibrate_forked(2, model, "-o", tmp_path / "out", *DATA, "--samples", 2, "--seq-len", 48):
        assert rank.exit_code == 2
        assert "2 processes cannot share 1 batches; start fewer" in rank.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_batch_size_that_is_left_open_gives_every_process_work(model, tmp_path):
    few = ("--dataset", "random", "--samples", 3, "--seq-len", 80, "--device", "cpu", *COLLECTED)
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
