"""What is predicted of SGLang; `make interop` asks its loader code about all directories."""

import pytest
from scale_directories import COMPRESSED, lines_of, model
from test_cli import fp8kv

from calib.engines.rules import choose_rules
from calib.engines.simulate import simulate
from calib.files.directory import open_scales

OLD, NEW = (choose_rules("sglang", version)[0] for version in ("0.5.9", "0.5.23"))
SCHEME = COMPRESSED["kv_cache_scheme"]
GROUP = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}
FP8 = {"quant_method": "fp8"}


def statuses(directory, rules):
    found = simulate(open_scales(directory), rules)
    return found.refused or {outcome.status for outcome in found.outcomes if outcome.letter != "q"}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({}, {"loaded"}),
        ({"strategy": "attn_head"}, {"default"}),
        ({"type": "int"}, {"default"}),
        ({"dynamic": True}, {"default"}),
        ({"symmetric": False}, {"default"}),
    ],
)
def test_a_scheme_it_does_not_know_is_ignored(scheme, expected, tmp_path):
    config = COMPRESSED | {"kv_cache_scheme": SCHEME | scheme}
    directory = model(tmp_path, config=config)
    assert statuses(directory, NEW) == expected
    assert statuses(directory, OLD) == {"default"}


def test_groups_without_weights_are_refused(tmp_path):
    directory = model(tmp_path, config=COMPRESSED | {"config_groups": {"attention": GROUP}})
    assert "'attention' without weights" in statuses(directory, NEW)
    assert statuses(directory, choose_rules("vllm", None)[0]) == {"loaded"}
    done = fp8kv("verify", directory, "--engine", "sglang")
    assert done.exit_code == 1
    assert "write it again with fp8kv convert --to vllm" in lines_of(done)


@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [(0.0, 0.0, {"default"}), (0.0, 0.5, "K scale of 0"), (0.5, 0.0, {"loaded"})],
)
def test_zeros_of_both_are_as_none(k, v, expected, tmp_path):
    found = statuses(model(tmp_path, k=(k, k), v=(v, v), config=FP8), NEW)
    assert found == expected or expected in found
