"""`fp8kv verify` elsewhere than on one GPU: tensor parallelism, MI300, and Aphrodite."""

import pytest
from command_line import fp8kv
from scale_directories import COMPRESSED, GOOD, lines_of, model

from calib.engines.catalogue import find_engine
from calib.engines.outcome import Place
from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory

PER_HEAD = COMPRESSED | {"kv_cache_scheme": COMPRESSED["kv_cache_scheme"] | {"strategy": "attn_head"}}


@pytest.mark.parametrize(
    ("ranks", "scales", "expected"),
    [
        (1, ([0.5, 0.25], [0.125, 1.0]), (0.5, 0.25)),
        (2, ([0.5, 0.25], [0.125, 1.0]), (0.5, 0.25)),
        # fewer KV heads than ranks: each is held twice
        (4, ([0.5, 0.25], [0.125, 1.0]), (0.5, 0.5, 0.25, 0.25)),
        # one value for two heads: broadcast on one GPU, nothing left for the second rank
        (1, ([0.5], [0.25]), (0.5, 0.5)),
        (2, ([0.5], [0.25]), None),
        (3, ([0.5, 0.25], [0.125, 1.0]), None),
    ],
)
def test_heads_are_split_over_ranks(ranks, scales, expected, tmp_path):
    directory = open_model_directory(model(tmp_path, k=scales, v=scales, config=PER_HEAD), weights=False)
    found = simulate(directory, find_engine("vllm"), Place(ranks))
    assert bool(found.refused) == (expected is None)
    assert expected is None or found.outcomes[0].values == expected


def test_a_model_that_cannot_be_split_is_refused(tmp_path):
    done = fp8kv("verify", model(tmp_path), "--engine", "vllm", "--tensor-parallel-size", "3")
    assert done.exit_code == 1
    assert "4 query heads and 2 KV heads cannot be split evenly over 3 GPUs" in lines_of(done)


@pytest.mark.parametrize(
    ("config", "factor", "good"),
    [({"quant_method": "modelopt", "quant_algo": "FP8"}, 2.0, True), (COMPRESSED, 1.0, False)],
)
def test_scales_are_doubled_where_fp8_ends_at_240_or_it_is_said(config, factor, good, tmp_path):
    directory = open_model_directory(model(tmp_path, config=config), weights=False)
    found = simulate(directory, find_engine("vllm"), Place(fnuz=True))
    assert found.outcomes[0].values == (0.5 * factor,)
    assert found.is_good == good
    done = fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz")
    assert done.exit_code == (0 if good else 1)
    assert "on one MI300" in done.stdout
    assert "on one GPU" in fp8kv("verify", tmp_path, "--engine", "vllm", "--fnuz", "--no-fnuz").stdout
    assert ("clipped at 0.54 of absmax" in lines_of(done)) == (not good)


def test_legacy_json_must_be_for_as_many_ranks(tmp_path):
    scales = {"0": GOOD["0"], "1": {"0": 0.125, "1": 1.0}}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": scales}
    document = {"model_type": "llama", "kv_cache": cache}
    directory = open_model_directory(
        model(tmp_path, k=None, v=None, config=None, json_file=document), weights=False
    )
    rules = find_engine("vllm", "0.4.2")
    assert simulate(directory, rules, Place(2)).outcomes[0].values == (0.5, 0.125)
    assert {o.status for o in simulate(directory, rules, Place(4)).outcomes} == {"default"}


def test_aphrodite_takes_a_scheme_that_is_half_right(tmp_path):
    scheme = COMPRESSED["kv_cache_scheme"] | {"type": "int"}
    directory = open_model_directory(
        model(tmp_path, config=COMPRESSED | {"kv_cache_scheme": scheme}), weights=False
    )
    assert simulate(directory, find_engine("vllm")).refused
    assert simulate(directory, find_engine("aphrodite")).is_good
