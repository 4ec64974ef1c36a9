"""Which config a kernel gets: shipped tables, this machine's own, and how that is found."""

import json
from dataclasses import asdict
from itertools import product

import pytest
import torch
import tune_kernels
from paged import Case, build
from tune_kernels import write_table

from calib.bench.kernels import Case as BenchCase
from calib.bench.kernels import bench_cases
from calib.doctor import examine
from fp8kv_runtime import reference
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.kernels import tuning
from fp8kv_runtime.kernels.targets import INTERPRETER, TARGETS
from fp8kv_runtime.kernels.tuning import Config, ConfigRow, read_table, tuned_path

GPU = "NVIDIA H200"
NAMES = (GPU, "sm_90", "cuda")
INTERPRETED = (GPU, INTERPRETER.name, INTERPRETER.backend)


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    """Where this machine's table is while a test runs: nowhere yet."""
    path = tmp_path / "caches" / "tuning.json"
    monkeypatch.setenv("FP8KV_TUNING", str(path))
    tuning.forget_tuned()
    yield path
    monkeypatch.undo()
    tuning.forget_tuned()


@pytest.mark.parametrize("target", [*TARGETS.values(), INTERPRETER], ids=lambda t: t.name)
def test_a_config_is_shipped_for_every_head_dim_of_every_target(target):
    names = ("", target.name, target.backend)
    for kernel, bits in product(("decode", "extend"), (8, 16)):
        for head_dim in (32, 64, 80, 128, 192, 256):
            assert tuning.find_config(kernel, names, bits, head_dim).tile * head_dim <= 64 * 256
        with pytest.raises(ValueError, match="^head_dim 257 is more than the 256 that kernels handle$"):
            tuning.find_config(kernel, names, bits, 257)
    for head_dim in (64, 128, 256):  # queries in two parts have more than one warp
        assert tuning.find_config("decode", names, 8, head_dim, whole=False).num_warps > 1
    assert any(row.config.num_warps == 1 for row in tuning.shipped()["decode"])
    for changes, whole in (({}, True), ({"dtype": torch.float32}, False), ({"k_scales": "channel"}, False)):
        batch = build(Case((9,), **changes))
        assert tuning.query_is_whole(batch.query.dtype, batch.blocks.layout) == whole, changes


def test_this_machines_rows_go_first_and_hold_for_their_gpu_only(own_table):
    shipped = tuning.find_config("decode", NAMES, 8, 128)
    own = Config(tile=32, num_warps=2, num_stages=7, rows=16, per_processor=3, least=1)
    table = {"decode": (ConfigRow(GPU, 8, 128, own, over=64),), "extend": ()}
    write_table(own_table, table)
    assert [path.name for path in own_table.parent.iterdir()] == ["tuning.json"]
    assert read_table(own_table) == table
    tuning.forget_tuned()
    assert tuning.find_config("decode", NAMES, 8, 128) == own
    assert tuning.find_config("decode", NAMES, 8, 96) == own
    others = [("decode", NAMES, 16, 128), ("decode", NAMES, 8, 64), ("extend", NAMES, 8, 128)]
    assert all(tuning.find_config(*other) != own for other in others)
    assert tuning.find_config("decode", ("NVIDIA H100", *NAMES[1:]), 8, 128) == shipped


ROW = {"on": "x", "bits": 8, "head_dim": 64, "tile": 64, "num_warps": 4}
DAMAGED = {
    "{": "JSONDecodeError",
    "[]": "AttributeError",
    '{"decode": [{"on": "x", "bits": 8}]}': "KeyError: 'head_dim'",
} | {
    json.dumps({"decode": [ROW | {name: value}]}): f"ValueError: {name} must be {rule}"
    for name, value, rule in (
        ("tile", 48, "a power of two, got 48"),
        ("num_warps", True, "a positive integer, got True"),
        ("head_dim", "64", "a positive integer, got '64'"),
        ("num_stages", 0, "a positive integer, got 0"),
        ("bits", 4, "8 or 16, got 4"),
        ("over", -1, "an integer, 0 or more, got -1"),
    )
}


def test_a_damaged_table_is_named_in_one_line(own_table):
    own_table.parent.mkdir()
    batch = build(Case((9,)))
    for content, reason in DAMAGED.items():
        own_table.write_text(content)
        tuning.forget_tuned()
        with pytest.raises(AttentionError, match=r"^.*\); delete it, and the shipped configs hold$") as told:
            batch.attend("kernel")
        assert str(told.value).startswith(f"{own_table} is not a tuning table ({reason}")


def test_doctor_names_the_configs_in_force(own_table):
    assert dict(examine())["kernel configs"] == "those shipped"
    write_table(own_table, {"decode": (ConfigRow(GPU, 8, 128, Config(64, 4)),)})
    assert dict(examine())["kernel configs"] == f"1 tuned here, {own_table}; then those shipped"
    own_table.write_text("{")
    assert "is not a tuning table" in dict(examine())["kernel configs"]


def test_where_the_table_is(monkeypatch, tmp_path):
    monkeypatch.delenv("FP8KV_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned_path() == tmp_path / "fp8kv" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned_path() == tmp_path / ".cache" / "fp8kv" / "tuning.json"


def tuned(microseconds, attend=lambda out, config: out):
    """The row for reference decode on a clock that sees the config alone, and what was said."""

    def config():
        return tuning.find_config("decode", NAMES, 8, 128)  # the pinned one, whatever the place

    def decode(*arguments, num_splits=None):
        return attend(reference.decode_attention(*arguments), config())

    said, launchers = [], {"decode_attention": decode}
    clock = lambda run, captures: (run(), microseconds(config()))[1]  # noqa: E731
    cases = [BenchCase("decode_attention", "", n, num_heads=4, num_kv_heads=2) for n in ((30,), (9, 40))]
    made = tune_kernels.Tuner(INTERPRETED, torch.device("cpu"), launchers, clock, said.append)
    return made.tune("decode", tuple(cases)), said


def test_the_fastest_config_is_found_if_it_is_faster_by_more_than_noise():
    cost = {16: 5.0, 32: 3.0, 64: 2.0, 128: 4.0}
    row, _ = tuned(lambda c: cost[c.tile] + abs(c.num_warps - 8) + abs(c.per_processor - 3) + 1 / c.least)
    assert (row.on, row.bits, row.over, row.head_dim) == (GPU, 8, 64, 128)
    found = row.config
    assert (found.tile, found.num_warps, found.per_processor, found.least) == (64, 8, 3, 8)
    row, _ = tuned(lambda c: 99.0 if c.num_warps == 2 else 100.0)  # what may be noise changes nothing
    assert row.config == tuning.find_config("decode", INTERPRETED, 8, 128)
    # one warp with many programs is tried
    found = tuned(lambda c: c.tile + 9 * c.num_warps - c.per_processor)[0].config
    assert (found.tile, found.num_warps, found.per_processor) == (16, 1, 16)


def test_a_fast_config_that_is_wrong_or_does_not_compile_is_not_taken():
    def attend(out, config):
        if config.tile == 128:
            raise RuntimeError("out of resource: shared memory\nand more")
        return out * 1.01 if config.tile == 32 else out

    row, said = tuned(lambda c: {16: 20.0, 32: 1.0, 64: 10.0, 128: 2.0}[c.tile], attend)
    assert row.config.tile == 64
    assert any("tile 32" in line and "relative error 1" in line for line in said)
    assert any(line.endswith("out of resource: shared memory") for line in said)


def test_rows_found_anew_replace_those_of_the_same_place():
    old = [ConfigRow(GPU, 8, d, Config(64, 4), over=d // 2) for d in (64, 128)]
    other = ConfigRow("NVIDIA L4", 8, 128, Config(64, 4), over=64)
    new = ConfigRow(GPU, 8, 128, Config(32, 2), over=64)
    table = tune_kernels.merge_tables({"decode": (*old, other), "extend": (other,)}, {"decode": [new]})
    assert table == {"decode": (new, old[0], other), "extend": (other,)}


def test_tuning_writes_what_later_launches_use(monkeypatch, own_table, device):
    """The script's way, kernels in the interpreter, with two configs to choose from."""
    few = {"_TILES": (32, 64), "_ROWS": (64,), "_PROGRAMS": (2,), "_LEAST": (4,)}
    for name, values in (few | {"_WARPS": dict.fromkeys(tune_kernels.KERNELS, (4,))}).items():
        monkeypatch.setattr(tune_kernels, name, values)
    monkeypatch.setattr(tune_kernels, "gpu_name", lambda _: GPU)
    # every config is still checked; its time is its tile
    times = lambda _, kernel, config, cases: [config.tile] * len(cases)  # noqa: E731
    monkeypatch.setattr(tune_kernels.Tuner, "_times", times)
    said, on = [], torch.device(device)
    with torch.inference_mode():
        assert tune_kernels.tune(bench_cases((4, 2, 64), 16, on), on, None, said.append) == own_table
    assert said[-1].endswith(" of the time")
    rows = json.loads(own_table.read_text())
    for kernel in ("decode", "extend"):
        assert [(row["bits"], row["tile"]) for row in rows[kernel]] == [(8, 32), (16, 32)]
    assert asdict(tuning.find_config("extend", INTERPRETED, 8, 64)).items() <= rows["extend"][0].items()
