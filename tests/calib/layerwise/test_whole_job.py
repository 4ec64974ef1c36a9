"""The command line, a real model, and the memory that a whole process takes."""

import json
import os
import subprocess
import sys

import pytest
from command_line import SMALL, calibrate, fp8kv, one_line_error, succeeded
from transformers import LlamaConfig, LlamaForCausalLM

from calib.data import load_data
from calib.files.names import STATS_FILE
from calib.models.load import load_tokenizer
from calib.models.sources import find_model


def test_a_real_model_gives_the_same_bits(smollm2_directory, saved_at):
    saved = saved_at(smollm2_directory)
    changes = {"data.dataset": "builtin:python-docs", "data.samples": 2, "data.seq_len": 24}
    recipe = saved.recipe(**{"observer.name": "mse", "means": True, "targets": "qkv", **changes})
    tokenizer = load_tokenizer(find_model(str(smollm2_directory)))
    samples = load_data(recipe.data, tokenizer, pytest.fail).samples
    batches = saved.batches([samples[0], samples[1][:23]])
    assert [bool(batch.attention_mask.all()) for batch in batches] == [False]
    saved.check(recipe, batches)


def test_a_job_gives_the_same_statistics_and_says_how_it_ran(tiny_directory, tmp_path):
    outs = {mode: tmp_path / mode for mode in ("none", "layerwise")}
    for mode, out in outs.items():
        limits = ["--max-memory", "64GiB"] if mode == "layerwise" else []
        succeeded(calibrate(tiny_directory, "--offload", mode, "-o", out, *limits))
        recipe = json.loads((out / "fp8kv_calibration.json").read_text())["recipe"]
        assert recipe["offload"] == mode
    one, other = (out / STATS_FILE for out in outs.values())
    assert one.read_bytes() == other.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {*outs, tiny_directory.name}


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--max-memory", "8 elephants"), "'8 elephants' is not an amount of memory"),
        (("--max-memory", "10MiB"), "10MiB of memory is too little"),
        (("--max-memory", "10MiB", "--offload", "none"), "use --offload layerwise"),
        (("--offload", "layerwise", "--dataset", "self"), "builtin:python-docs"),
        (("--offload", "layerwise", "--resume"), "saves no progress; leave --resume away"),
    ],
)
def test_mistakes_are_one_line(arguments, phrase, tiny_directory, tmp_path):
    one_line_error(fp8kv("calibrate", tiny_directory, "-o", tmp_path / "out", *SMALL, *arguments), phrase)
    assert [path.name for path in tmp_path.iterdir()] == [tiny_directory.name]


# in a new process: a fork has free memory of its parent's, which is not counted
MEASURE = """
import sys
from pathlib import Path
from calib.data import make_batches
from calib.models.sources import find_model
from calib.models.config import load_config
from calib.layerwise.loop import calibrate_layerwise, open_layers
from calib.layerwise.memory import resident_bytes
from calib.layerwise.weights import load_skeleton
from calib.recipe import load_recipe

recipe = load_recipe(None, {"device": "cpu"})
checkpoint = find_model(sys.argv[1])
model = load_skeleton(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
source = open_layers(model, checkpoint, recipe)
before = resident_bytes()
allowed, samples, tokens, size = map(int, sys.argv[2:])
batches = make_batches([[7] * tokens] * samples, size, pad_id=0)
limit = before + allowed
calibrate_layerwise(source, batches, recipe, limit=limit, directory=Path(sys.argv[1]))
status = Path("/proc/self/status").read_text()
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
print(peak - before)
"""


def peak(directory, *numbers):
    """Bytes that a pass takes at most, beside what its process takes anyway."""
    command = [sys.executable, "-c", MEASURE, str(directory), *map(str, numbers)]
    return int(subprocess.check_output(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))


def test_the_memory_limit_is_kept_by_weights(tmp_path):
    weights = write_llama(tmp_path, num_hidden_layers=12, hidden_size=1024, intermediate_size=2816)
    allowed = 110 << 20
    assert weights > 4 * allowed
    found = peak(tmp_path, allowed, 4, 16, 1)
    assert 2 * weights // 12 < found <= allowed  # two layers, one being read ahead


def test_the_memory_limit_is_kept_by_hidden_states(tmp_path):
    write_llama(tmp_path, num_hidden_layers=3, hidden_size=256, intermediate_size=64)
    allowed, samples, tokens = 64 << 20, 512, 128
    assert samples * tokens * 256 * 4 >= allowed
    # freed pages go back to the system a little later than new ones are taken
    slack = 16 << 20
    assert peak(tmp_path, allowed, samples, tokens, 16) <= allowed + slack
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


def write_llama(directory, **sizes):
    """Save a Llama of these sizes in small shards; return the bytes of its weights."""
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, vocab_size=100, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size="50MB")
    return sum(weight.nbytes for weight in model.parameters())
