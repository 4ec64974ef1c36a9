"""Calibrations in several processes, forked from this one or started by torchrun, and their statistics."""

import os
import pickle
import subprocess
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from command_line import fp8kv
from safetensors.torch import load_file
from torch import distributed
from transformers import AttentionInterface, AttentionMaskInterface

from calib.scales.stats_file import load_stats

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As many as a fork has; and threads that wait for busy cores cost tiny tensors more than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def statistics(out):
    stats = load_stats(out)
    of_text = [*f"{stats.text.to_json()} {stats.text.sketch}".encode()]
    counts = {"counts": torch.tensor(stats.counts()), "text": torch.tensor(of_text)}
    return load_file(out / "fp8kv_stats.safetensors") | counts


def assert_same(found, expected):
    assert found.keys() == expected.keys() != set()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def launched(count, *arguments, **environment):
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", count)
    command = map(str, [sys.executable, "-m", *launcher, "-m", "calib", "calibrate", *arguments])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([*command], env=environment, **options)


def calibrate_forked(count, *arguments):
    def work(rank):
        done = fp8kv("calibrate", *arguments)
        return SimpleNamespace(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    return [result for _, result in forked(count, work)]


def forked(count, work):
    """Run `work(rank)` in forks, as torchrun does; return the exit status and the result or None of each."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as directory:
        files = [Path(directory, str(rank)) for rank in range(count)]

        def rank_of(rank):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            torch.set_num_threads(1)  # those of this process are not in a fork of it
            files[rank].write_bytes(pickle.dumps(work(rank)))

        ranks = [get_context("fork").Process(target=rank_of, args=(rank,)) for rank in range(count)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*may lead to deadlocks", DeprecationWarning)
            for rank in ranks:
                rank.start()
        for rank in ranks:
            rank.join(120)
            rank.kill()  # it hangs
            rank.join()
        results = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    return [(rank.exitcode, result) for rank, result in zip(ranks, results, strict=True)]


def held(model):
    """All that can be seen of a model, and of torch's state: objects, settings and values."""
    objects, weights = {}, dict(model.named_parameters())
    for name, module in model.named_modules():
        for key, value in vars(module).items():  # its own attributes, and tables of weights, buffers, hooks
            inner = value.items() if isinstance(value, dict) else [("", value)]
            objects |= {(name, key, place): each for place, each in inner}
    objects |= {(name, "grad"): weight.grad for name, weight in weights.items()}
    flags = {name: (w.requires_grad, w.dtype, w.device) for name, w in weights.items()}
    registries = [dict(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]
    settings = flags, registries, model.config.to_dict(), model.config._attn_implementation
    settings += (torch.is_grad_enabled(),)
    values = {**model.state_dict(), **dict(model.named_buffers()), "random": torch.get_rng_state()}
    return objects, settings, {name: tensor.clone() for name, tensor in values.items()}


def assert_as_before(model, before):
    (objects, settings, values), (old_objects, old_settings, old_values) = held(model), before
    assert objects.keys() == old_objects.keys()
    # compared by identity: what was replaced by its equal has been changed too
    assert [key for key in objects if objects[key] is not old_objects[key]] == []
    assert settings == old_settings
    assert values.keys() == old_values.keys()
    assert all(value.is_meta or torch.equal(value, old_values[name]) for name, value in values.items())
