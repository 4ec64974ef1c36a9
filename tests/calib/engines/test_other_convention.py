"""Values of an NVFP4 cache that an engine loads, in its own convention and in the other one."""

import json

import pytest
from command_line import fp8kv
from measured_amax import save_amax
from scale_directories import NVFP4, PROJ, lines_of, model, simulated


def written(directory, divisor, **changes):
    producer = {"name": "fp8kv", "nvfp4_kv_divisor": divisor}
    return model(directory, names=PROJ, config=NVFP4 | {"producer": producer} | changes)


@pytest.mark.parametrize(
    ("engine", "divisor", "problem"),
    [
        ("vllm", 448, None),
        ("vllm", 2688, "6 times too small"),
        ("sglang", 2688, None),
        ("sglang", 448, "6 times too large"),
        ("vllm", 7, "not known"),
    ],
)
def test_an_engine_wants_one_of_them(engine, divisor, problem, tmp_path):
    found = simulated(written(tmp_path / "made", divisor), engine)
    assert {outcome.status for outcome in found.outcomes if outcome.letter != "q"} == {"loaded"}
    assert found.flag == "--kv-cache-dtype nvfp4"
    assert found.is_good == (problem is None)
    assert str(problem) in str(found.problem)
    if divisor != 7 and problem:
        to = found.problem.rsplit(" ", 1)[1]
        command = ("convert", tmp_path / "made", "--to", to, "-o", tmp_path / "out")
        assert fp8kv(*command).exit_code == 0
        assert simulated(tmp_path / "out", engine).is_good, "the way out is ours"


def test_of_engines_and_methods_that_were_not_run_with_them_nothing_is_known(tmp_path):
    directory = written(tmp_path / "modelopt", 448)
    for engine in ("aphrodite", "tgi", "tensorrt-llm"):
        found = simulated(directory, engine)
        assert {outcome.status for outcome in found.outcomes} == {"unknown"}, engine
        assert not found.is_good
    found = simulated(written(tmp_path / "fp8", 448, quant_method="fp8"), "vllm")
    assert "never run under fp8" in found.outcomes[0].reason
    # the table is of an NVFP4 cache
    said = lines_of(fp8kv("verify", directory))
    assert "NVFP4 cache" in said
    assert "values of an NVFP4 cache: absmax / 448 (fp8kv wrote it so)" in said


def test_sglang_needs_the_key_beside_fp8(tmp_path):
    directory = written(tmp_path / "fp8", 2688, kv_cache_quant_algo=None)
    found = simulated(directory, "sglang")
    assert not found.is_good
    assert "no kv_cache_quant_algo" in found.ignored[0][1]
    assert simulated(directory, "vllm").flag == "--kv-cache-dtype nvfp4"
    # and has a place beside NVFP4 weights
    changes = {"kv_cache_quant_algo": None, "quant_algo": "NVFP4"}
    assert simulated(written(tmp_path / "nvfp4", 2688, **changes), "sglang").is_good


@pytest.mark.parametrize("told", [448, 2688, 7])
@pytest.mark.parametrize("true", [448, 2688])
def test_statistics_overrule_what_the_files_tell(told, true, tmp_path):
    directory = written(tmp_path / "made", told)
    scales = {"k": (0.5, 0.25), "v": (0.125, 0.0625)}
    amax = {(i, x): [value * true] for x, values in scales.items() for i, value in enumerate(values)}
    given = ("--against", save_amax(amax, tmp_path / "stats"), "--engine", "vllm", "--json")
    done = fp8kv("verify", directory, *given)
    found = json.loads(done.stdout)
    assert found["nvfp4"]["divisor"] == true
    assert [fit["used"] for fit in found["against"]] == [pytest.approx({"k": 1.0, "v": 1.0})] * 2
    assert (done.exit_code == 0) == (true == 448 and told in (448, 7))
    assert bool(found["problems"]) == (told not in (true, 7))
