"""What a running engine's cache holds: each slot counted once, files for commands, clipping as an alarm."""

import json
import os
import random
import shutil
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from command_line import fp8kv, one_line_error
from fake_server import web_server
from families import edit_json
from torch import nn

from calib import load_stats, save_stats
from calib.commands.engines import _show_share
from calib.engines.scale_fit import Limits, judge, measured_amax
from calib.errors import InputError
from calib.evaluate.served import client, watch_report
from calib.evaluate.served.watch_report import METRICS, read_expected, read_watched, report_on
from calib.files.stored_scales import StoredLayer
from calib.files.text import parse_condition
from calib.scales.cache_counts import (
    CacheCounts,
    WatchedLayer,
    code_table,
    join_heads,
    join_watched,
    watched_stats,
)
from calib.scales.observers import AbsMax
from calib.scales.scales import KVScales, LayerScales
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import open_calibration, smallest_scales
from calib.scales.tail import TAIL
from calib.serving import plugin
from calib.watching import harvest
from calib.watching.slots import BlockMap, layer_cache

HEADS, SLOTS, SIZE, BLOCKS, LAYERS = 2, 4, 8, 10, 2
SCALE = 0.5
RUNNER = "vllm.v1.worker.gpu_model_runner"


class Writer:
    """A backend that keeps K beside V, for each head the slots after each other."""

    cut_off = False

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        for part, x in enumerate((key, value)):
            if kv_cache.dtype == torch.uint8:
                x = (x.float() / SCALE).clamp(-448, 448)
                x = (x * 0.94 if self.cut_off else x).to(torch.float8_e4m3fn).view(torch.uint8)
            columns = slice(part * SIZE, (part + 1) * SIZE)
            kv_cache[slots // SLOTS, :, slots % SLOTS, columns] = x.to(kv_cache.dtype)


class Layer(nn.Module):
    """An attention layer of vLLM's with its cache, full of what nobody wrote."""

    def __init__(self, index, dtype):
        super().__init__()
        self.layer_name = f"model.layers.{index}.self_attn.attn"
        self.num_kv_heads, self.head_size = HEADS, SIZE
        self.kv_cache_dtype, self.impl = "fp8" if dtype == torch.uint8 else "auto", Writer()
        self.kv_cache = torch.full((BLOCKS, HEADS, SLOTS, 2 * SIZE), 0x35).to(dtype)
        for x in "kv":
            setattr(self, f"_{x}_scale", torch.tensor(SCALE))


@pytest.fixture
def engine(monkeypatch):
    """Makes the runner of a rank, which serves random steps; `written` is all that it wrote."""
    for name, values in {
        "vllm": {"__version__": "0.33.0"},
        "vllm.platforms": {"current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)},
    }.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(values)
    for name, value in {"MOST_COUNTED": 10**6, "_SHARE": 1e9, "MOST_WRITTEN": 40}.items():
        monkeypatch.setattr(harvest, name, value)
    monkeypatch.setenv("FP8KV_WATCH", "where the core writes")

    def make(dtype=torch.uint8, seed=0):
        class GPUModelRunner:
            def load_model(self):
                pass

            def execute_model(self, scheduler_output):
                slots = torch.tensor(scheduler_output.slots)
                for layer, written in zip(model, self.written, strict=True):
                    k, v = torch.randn(2, len(slots), HEADS, SIZE, generator=self.random) * 100
                    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
                    parts = layer.kv_cache[slots // SLOTS, :, slots % SLOTS].split(SIZE, -1)
                    written.append(torch.stack(parts, 1))

        module = ModuleType(RUNNER)
        module.GPUModelRunner = GPUModelRunner
        plugin._watch(module)
        model, runner = nn.ModuleList(Layer(i, dtype) for i in range(LAYERS)), GPUModelRunner()
        names, spec = [layer.layer_name for layer in model], SimpleNamespace(block_size=SLOTS)
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        vars(runner).update(
            written=[[] for _ in model], random=torch.Generator().manual_seed(seed), get_model=lambda: model,
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace()), fp8kv_scales={},
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            model_config=SimpleNamespace(dtype=torch.float32),
        )  # fmt: skip
        runner.worker = SimpleNamespace(model_runner=runner, discard=lambda tags: tags)
        harvest.watch(runner.worker)
        return runner

    return make


class Core:
    """vLLM's engine core, with the workers of some runners."""

    def __init__(self, *runners, **parallel):
        model = SimpleNamespace(model="there", get_total_num_kv_heads=lambda: len(runners) * HEADS)
        parallel = SimpleNamespace(**{"data_parallel_size": 1, "data_parallel_index": 0} | parallel)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model)
        self.model_executor = self
        self.runners, self.is_busy = runners, False
        self.scheduler = SimpleNamespace(has_unfinished_requests=lambda: self.is_busy)

    def collective_rpc(self, method, timeout=None):
        return [method(runner.worker) for runner in self.runners if method is not harvest.watch]

    def post_step(self, model_executed=True):
        return model_executed

    shutdown = post_step


def steps(count, seed):
    """Steps of a random scheduler: prompts in parts, prefixes found in the cache, requests that give way."""
    rng, free, running, names = random.Random(seed), [*range(1, BLOCKS)], {}, iter(range(10**6))
    for _ in range(count):
        finished = {name for name in running if rng.random() < 0.2}
        for name in finished:
            free += running.pop(name)[0]
        new, cached, scheduled, slots = [], [], {}, []
        for name in [*running, *(next(names) for _ in range(2))]:
            blocks, computed = running.get(name, ([], 0))
            tokens = rng.choice([1, 1, 3, 9])
            if not blocks and free and rng.random() < 0.3:  # a block of a prefix that somebody computed
                blocks, computed = [free.pop(0)], SLOTS
            added = []
            while (len(blocks) + len(added)) * SLOTS < computed + tokens and free:
                added.append(free.pop(rng.randrange(len(free))))
            if (len(blocks) + len(added)) * SLOTS < computed + tokens:  # no room: it gives way
                free += [*blocks, *added]
                running.pop(name, None)
                continue
            if name in running:
                cached.append((name, (added,) if added else None, computed))
            else:
                request = {"req_id": name, "block_ids": (blocks + added,), "num_computed_tokens": computed}
                new.append(SimpleNamespace(**request))
            blocks = blocks + added
            slots += [blocks[i // SLOTS] * SLOTS + i % SLOTS for i in range(computed, computed + tokens)]
            running[name], scheduled[name] = (blocks, computed + tokens), tokens
        ids, added, computed = zip(*cached, strict=True) if cached else ((), (), ())
        yield SimpleNamespace(
            finished_req_ids=finished, scheduled_new_reqs=new, num_scheduled_tokens=scheduled, slots=slots,
            total_num_scheduled_tokens=len(slots),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=ids, new_block_ids=added, num_computed_tokens=computed, resumed_req_ids=set()
            ),
        )  # fmt: skip


def serve(runner, seed=0, count=60):
    for step in steps(count, seed):
        runner.execute_model(scheduler_output=step)
    runner.fp8kv_harvest.read()
    return [torch.cat(written) for written in runner.written]


@pytest.mark.parametrize("seed", range(3))
def test_every_slot_that_a_step_wrote_is_counted_once(engine, seed):
    runner = engine(seed=seed)
    harvested = runner.fp8kv_harvest
    written = serve(runner, seed)
    assert harvested.tokens == len(written[0]) > 200
    for layer, x in enumerate(written):
        counts = harvested.counts[layer]
        assert counts.tokens == len(x)
        for part in range(2):
            for head in range(HEADS):
                codes = torch.bincount(x[:, part, head].flatten().long(), minlength=256)
                assert torch.equal(counts.codes[part, head], codes)


def test_the_largest_values_of_16_bits_of_all_ranks_are_exact(engine, tmp_path):
    runners = [engine(torch.bfloat16, seed) for seed in range(2)]
    harvest.watch_engine(core := Core(*runners), str(tmp_path / "watch"))
    ranks = [serve(runner) for runner in runners]
    assert core.post_step()
    stats = load_stats(tmp_path / "watch")
    for layer, tensors in enumerate(zip(*ranks, strict=True)):
        largest = torch.cat([x.abs().amax(0).float() for x in tensors], 1)
        part = stats.layers[f"model.layers.{layer}.self_attn"]
        assert torch.equal(torch.stack([part.k.amax, part.v.amax]), largest)
        assert (part.tokens, part.q, part.estimated) == (len(tensors[0]), None, ())
        assert all(torch.equal(x.least, x.amax.amax(1, keepdim=True)) for x in (part.k, part.v))
    assert read_watched(tmp_path / "watch").layers[0].k is None
    with pytest.raises(InputError, match="which holds no queries"):
        stats.scales(strategy="tensor", observer=AbsMax(), targets="qkv")
    # the statistics of two engines are one's
    one, two = tmp_path / "watch", shutil.copytree(tmp_path / "watch", tmp_path / "two")
    one_line_error(fp8kv("merge", one, one, "-o", tmp_path / "both"), "each of them once")
    same = f"'{one}' and '{two}' hold the same statistics; merge each once"
    one_line_error(fp8kv("merge", one, two, "-o", tmp_path / "both"), same)
    halves = {place: x / 2 for place, x in stats.tensors().items()}
    save_stats(stats.replace_tensors(halves, stats.counts()), two / "fp8kv_stats.safetensors")
    again = shutil.copytree(one, tmp_path / "again")
    same = same.replace(f"{two}", f"{again}")
    one_line_error(fp8kv("merge", one, two, again, "-o", tmp_path / "both"), same)
    done = fp8kv("merge", one, two, "-o", tmp_path / "of both")
    assert f"statistics of {2 * part.tokens:,} tokens; new scales: fp8kv repair DIR --stats '" in done.stdout
    edit_json(two / "fp8kv_watch.json", model="here")
    one_line_error(fp8kv("merge", one, two, "-o", tmp_path / "no"), "are of different models: here, there")
    for command in ("compare", "apply"):
        one_line_error(fp8kv(command, one, two), "statistics alone, as FP8KV_WATCH writes them: they are for")
    shown = json.loads(fp8kv("inspect", tmp_path / "of both", "--json").stdout)["layers"]
    assert shown[1]["v"] == pytest.approx((part.v.amax.amax(1) / 448).tolist())


def test_files_are_written_when_it_is_time_and_the_last_request_is_over(engine, tmp_path, monkeypatch):
    runner, now = engine(), SimpleNamespace(time=100.0)
    monkeypatch.setattr(harvest.time, "monotonic", lambda: now.time)
    harvest.watch_engine(core := Core(runner), str(tmp_path))
    tokens = 0
    turns = (0, True, True), (9, True, False), (0, False, True), (10, True, True)
    for seconds, is_busy, is_written in turns:
        now.time += seconds
        for step in steps(5, 0):
            runner.execute_model(step)
        core.is_busy = is_busy
        assert core.post_step(False) is False
        tokens = runner.fp8kv_harvest.tokens if is_written else tokens
        assert read_watched(tmp_path).tokens == tokens > 0
    # a machine that writes slowly: the engine rests a thousand times as long, also when it is idle again
    files = core.fp8kv_watch
    files._earliest, now.time, core.is_busy = now.time + 500, now.time + 400, False
    serve(runner)
    core.post_step()
    assert read_watched(tmp_path).tokens == tokens < runner.fp8kv_harvest.tokens
    files.write()  # as its route asks
    assert read_watched(tmp_path).tokens == runner.fp8kv_harvest.tokens
    tokens = runner.fp8kv_harvest.tokens
    serve(runner)
    assert read_watched(tmp_path).model == "there"  # a name of the Hub's, or a directory here, named in full
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert core.shutdown()
    assert read_watched(tmp_path).model == str(tmp_path / "there")
    assert read_watched(tmp_path).tokens == runner.fp8kv_harvest.tokens > tokens


def test_the_log_says_how_much_of_the_cache_is_watched_and_where(engine, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "vllm.fp8kv")
    monkeypatch.setattr(harvest, "_SHARE", 0.0025)
    for dtype, part in ((torch.uint8, "a sample, in 0.25% of the time"), (torch.bfloat16, "every token")):
        runner, directory = engine(dtype), tmp_path / str(dtype)
        for said in (f"watched ({part}); statistics go to {directory}", "not watched: AttributeError"):
            core, core.collective_rpc = Core(runner), lambda method, worker=runner.worker: [method(worker)]
            harvest.watch_engine(core, str(directory))
            assert [text.startswith(f"fp8kv: the cache is {said}") for text in caplog.messages] == [True]
            core.fp8kv_watch._lock.release()
            caplog.clear()
            runner.kv_cache_config = None


def test_latents_are_not_watched_and_the_log_says_so(engine, caplog):
    runner = engine()
    for layer in runner.get_model():
        layer.kv_lora_rank, layer.num_kv_heads, layer.kv_cache = 16, 1, layer.kv_cache[:, 0]
    assert harvest.watch(runner.worker) is None
    said = "no layer has a cache of K and V (latents are not watched)"
    assert caplog.messages == [f"fp8kv: the cache is not watched: {said}"]


def test_an_engine_goes_on_where_nothing_can_be_read_or_written(engine, tmp_path, caplog, monkeypatch):
    first, directory = engine(), tmp_path / "watch"
    harvest.watch_engine(core := Core(first), str(directory))
    serve(first)
    core.fp8kv_watch.write()
    whole = (directory / "fp8kv_watch.json").read_bytes()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    core.fp8kv_watch.write()
    core.fp8kv_watch.write()
    assert caplog.text.count("No space left on device") == 1
    assert (directory / "fp8kv_watch.json").read_bytes() == whole
    assert not [file for file in directory.iterdir() if "partial" in file.name]
    second = engine()
    second.fp8kv_harvest.before = lambda step: layer_cache(SimpleNamespace(kv_cache=None))
    for step in steps(2, 0):
        second.execute_model(step)
    assert second.fp8kv_harvest is None
    assert "the cache is not watched: the cache is not laid out" in caplog.text
    core.runners = (first, second)  # a rank that does not count: no file tells of an hour that is over
    monkeypatch.undo()
    core.fp8kv_watch.write()
    assert ": a worker does not count, and says why" in caplog.text
    assert [file.name for file in directory.iterdir()] == [".lock"]


def test_each_engine_has_a_directory_of_its_own_without_what_was_there(tmp_path, caplog, monkeypatch):
    write(tmp_path, watched(torch.ones(1, 2, HEADS, SIZE), 1.0))
    first, second = Core(), Core()
    harvest.watch_engine(first, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    harvest.watch_engine(second, str(tmp_path))
    said = f"another engine writes to {tmp_path}; give each a directory of its own"
    assert f"the cache is not watched (FP8KV_WATCH={tmp_path}): {said}" in caplog.text
    assert not hasattr(second, "fp8kv_watch")
    for text in ("often", "nan", "-1"):
        monkeypatch.setenv("FP8KV_WATCH_SECONDS", text)
        harvest.watch_engine(other := Core(), str(tmp_path / "other"))  # which goes on
        said = f"FP8KV_WATCH_SECONDS is '{text}'; give the seconds between two writes, such as 10"
        assert said in caplog.text
        assert not hasattr(other, "fp8kv_watch")
    monkeypatch.delenv("FP8KV_WATCH_SECONDS")
    # of data parallelism; engines of a dense model have a size of 1, and one that stays
    for name, size, index in (("data_parallel", 2, 1), ("elastic_ep_max_dp", 2, 0), ("data_parallel", 1, 2)):
        core = Core(**{f"{name}_size": size}, data_parallel_index=index)
        harvest.watch_engine(core, str(tmp_path))
        assert core.fp8kv_watch.directory == tmp_path / f"dp-{index}"


def test_other_scales_begin_anew_and_sleep_forgets(engine):
    counts = (runner := engine()).fp8kv_harvest
    for step in steps(9, 0):
        runner.execute_model(step)
    counts.check_scales()
    counts.read()
    assert counts.counts[0].tokens == counts.tokens > 0
    for step in steps(9, 1):
        runner.execute_model(step)
    before = counts.counts[0].tokens
    assert runner.worker.discard(2) == 2
    counts.read()
    assert counts.counts[0].tokens == before
    for layer in runner.get_model():
        layer._k_scale.fill_(0.25)
    counts.check_scales()
    assert (counts.tokens, counts.counts) == (0, {})


def test_of_an_fp8_cache_a_sample_is_read(engine, monkeypatch):
    monkeypatch.setattr(harvest, "MOST_COUNTED", 7)
    monkeypatch.setattr(harvest, "_SHARE", 1e-9)
    counts = (runner := engine()).fp8kv_harvest
    serve(runner)
    assert 0 < counts.counts[0].tokens <= 7  # and then nothing for a long time
    assert counts.tokens == sum(map(len, runner.written[0])) > 200


def test_a_writer_that_nobody_understands_is_refused(engine):
    layer = Layer(0, torch.uint8)
    scales = torch.full((2, HEADS), SCALE)
    block_map = BlockMap(layer, torch.float32, torch.float8_e4m3fn, scales)
    assert (block_map.shape, block_map.cuts_off) == ((2, HEADS, SLOTS, SIZE), False)
    with pytest.raises(ValueError, match="where Writer keeps K and V in a block cannot be told"):
        BlockMap(layer, torch.float32, torch.float8_e4m3fn, 8 * scales)
    wide = layer.kv_cache.new_zeros(BLOCKS, HEADS, SLOTS, 2 * SIZE + 8)
    for cache, words in ((layer.kv_cache[None], "not laid out as"), (wide, "holds more than K and V")):
        layer.kv_cache = cache
        with pytest.raises(ValueError, match=words):
            BlockMap(layer, torch.float32, torch.float8_e4m3fn, scales)
    layer = Layer(0, torch.uint8)
    layer.impl.cut_off = True
    assert BlockMap(layer, torch.float32, torch.float8_e4m3fn, scales).cuts_off
    layer.kv_cache_dtype = "int8_per_token_head"
    with pytest.raises(ValueError, match="a cache of int8_per_token_head makes its own scales"):
        harvest._fp8_type(layer)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_the_range_of_a_code_ends_where_the_next_one_begins(dtype):
    table = code_table(dtype)
    assert float(table.values[table.top]) == torch.finfo(dtype).max
    below = torch.nextafter(table.upper[:-1][: table.top], torch.zeros(()))
    assert torch.equal(below.to(dtype).view(torch.uint8).long(), torch.arange(table.top))
    # an engine that cuts digits off, as vLLM's on a CPU, has the next code for its upper end
    assert torch.equal(code_table(dtype, True).upper[: table.top], table.values[1 : table.top + 1])


def test_a_head_that_several_ranks_hold_counts_once():
    parts = [torch.full((2, 1, 3), float(head)) for head in (0, 0, 1, 1)]
    assert join_heads(parts, 2)[0, :, 0].tolist() == [0, 1]
    assert join_heads(parts, 4)[0, :, 0].tolist() == [0, 0, 1, 1]
    # ranks count samples of their own: shares are of a head's own tokens
    x = torch.randn(5000, 2, 1, SIZE, generator=torch.Generator().manual_seed(0))
    ranks = [watched(x[:n], 3 / 448) for n in (1000, 5000)]
    joined = join_watched(ranks, 2)
    assert joined.tokens.tolist() == [[1000, 5000]] * 2
    assert torch.equal(joined.clipped, torch.cat([rank.clipped for rank in ranks], 1))


def watched(x, scale, layer=0):
    """A layer whose cache has held x [S, 2, H, D] as E4M3."""
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return WatchedLayer(layer, CacheCounts.of(codes), torch.float8_e4m3fn, torch.full(x.shape[1:3], scale))


def test_amax_holds_what_was_seen_and_estimates_what_was_clipped():
    torch.manual_seed(0)
    tokens = torch.distributions.Exponential(0.05).sample((4000, 2, HEADS, 1)) + 1
    x = tokens * torch.linspace(-1, 1, SIZE)
    fits = watched(x, float(x.abs().max()) / 430)
    assert not fits.clipped.any()
    assert (fits.amax >= x.abs().amax(0)).all()
    assert (fits.amax <= x.abs().amax(0) * 9.5 / 8.5).all()  # the widest interval of E4M3
    # the head's largest tokens, from what is left of them at a third of the scale
    clips = watched(x, float(x.abs().max()) / 448 / 3)
    assert torch.equal(clips.clipped, (tokens[..., 0] > 432 * clips.scales).sum(0))
    assert (clips.amax.amax(-1) / x.abs().amax((0, 3)) - 1).abs().max() < 0.35
    # right scales, whose largest tokens end the range: nothing is beyond it
    exact = watched(x, float(x.abs().max()) / 448)
    assert exact.clipped.any()
    assert not exact.is_beyond.any()
    assert exact.amax.max() == exact.scales[0, 0] * 448
    half = CacheCounts.of(torch.zeros(3, 2, HEADS, SIZE, dtype=torch.uint8))
    assert half.add(half).codes[0, 0, 0] == 6 * SIZE
    zeros = WatchedLayer(0, half, torch.float8_e4m3fn, clips.scales).values("zero")
    assert zeros.tolist() == [[24] * HEADS] * 2
    # nothing is left that tells how far they are
    unknown = watched(x * 1e6, 1.0)
    assert unknown.is_unbounded.all()
    assert torch.equal(unknown.least, unknown.amax.amax(-1, keepdim=True))
    assert unknown.amax.max() == 448
    assert not clips.is_unbounded.any()
    stats = watched_stats({"model.layers.0.self_attn": unknown, "model.layers.1.self_attn": clips})
    marks = [(layer.estimated, layer.unbounded) for layer in stats.layers.values()]
    assert marks == [(("k", "v"), ("k", "v")), (("k", "v"), ())]
    assert smallest_scales(stats)[0].k == ()
    assert stats.merge(stats).layers["model.layers.0.self_attn"].unbounded == ("k", "v")


def test_codes_of_other_scales_refute_none_that_may_fit(tmp_path):
    """A code is of an interval, here of a scale for two heads: the smaller head's own may be in it."""
    torch.manual_seed(0)
    x = torch.randn(4000, 2, HEADS, SIZE) * torch.tensor([1.0, 0.29])[:, None]
    stats = watched_stats({"model.layers.0.self_attn": watched(x, float(x.abs().max()) / 448)})
    save_stats(stats.merge(stats), tmp_path / "fp8kv_stats.safetensors")
    traffic = open_calibration(tmp_path, needs_report=False)
    for factor, is_wrong in ((1.0, False), (1.13, True)):  # the widest interval is 1.118
        k, v = (tuple((amax / 448 / factor).tolist()) for amax in x.abs().amax((0, 3)))
        layers = [StoredLayer(0, k, v)]
        (fit,), findings = judge(layers, measured_amax(traffic, layers), Limits(448.0, 2**-9))
        assert fit.estimated == []
        assert max(fit.used.values()) > 1.005 * factor
        assert all(fit.sure[letter] <= factor * 1.001 < 1.13 * fit.sure[letter] for letter in "kv")
        assert (bool(findings), bool(fit.clipped)) == (is_wrong, is_wrong)
        assert all(x.text.endswith("times what its scale can hold, at least") for x in findings)
        assert _show_share(fit, "k").startswith("about ")


def write(directory, *layers):
    directory.mkdir(exist_ok=True)
    facts = dict.fromkeys(("engine", "fingerprint", "since"), "7") | {"written": harvest._now()}
    facts |= {"fp8kv_watch": 1, "model": str(directory), "tokens": 999}
    (directory / "fp8kv_watch.json").write_text(json.dumps(facts | {"layers": [x.to_json() for x in layers]}))
    return directory


def test_a_layer_that_clips_for_sure_is_an_alarm(tmp_path):
    x = torch.randn(1000, 2, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    calm, clipping = watched(x, 1 / 64), watched(x, 2 / 448, layer=7)
    write(tmp_path, calm, clipping)
    report = report_on(read_watched(tmp_path), parse_condition("clipped>0.01", METRICS), {})
    assert report.alarm_layers == [7]
    (row,) = [row for row in report.alarms if row.letter == "K"]
    assert row.clipped == pytest.approx(float(clipping.clipped[0].max()) / 1000)
    assert row.low < row.clipped < row.high
    # not where chance may do it
    limit = (row.low + row.clipped) / 2
    rows = report_on(read_watched(tmp_path), parse_condition(f"clipped>{limit}", METRICS), {}).alarms
    assert [row.letter for row in rows] in (["V"], [])
    write(tmp_path, watched(x, 1e6))
    assert report_on(read_watched(tmp_path), parse_condition("zero>0.5", METRICS), {}).alarms[0].zero == 1


def test_what_the_calibrations_own_tokens_have_is_no_alarm(tmp_path, monkeypatch):
    """V of the first layer depends on the token alone: a frequent one is the largest again and again."""
    tail = torch.full((HEADS, TAIL), 400.0)
    tail[0, :30] = 448.0
    part, rest = TensorStats(torch.ones(HEADS, SIZE), tail=tail), TensorStats(torch.ones(HEADS, SIZE))
    full = replace(part, tail=torch.full((HEADS, TAIL), 448.0), ties=torch.tensor([[0x43E0, 200]] * HEADS))
    stats = KVStats({"a": LayerStats(0, 1000, part, rest), "b": LayerStats(1, 1000, full, part)})
    one = torch.ones(1)
    scales = KVScales("tensor", "e4m3fn", {n: LayerScales(i, one, one) for i, n in enumerate("ab")})
    calibration = SimpleNamespace(stats=stats, recipe=lambda: None)
    (tmp_path / "fp8kv_stats.safetensors").touch()
    monkeypatch.setattr(watch_report, "open_calibration", lambda path: calibration)
    monkeypatch.setattr(watch_report, "derive_scales", lambda stats, recipe: scales)
    x = torch.full((1000, 2, HEADS, SIZE), 100.0)
    x[:50] = 448.0  # of 1,000 tokens; 30 were expected
    write(tmp_path, *(watched(x, 1.0, layer) for layer in range(2)))
    condition = parse_condition("clipped>0.01", METRICS)
    report = report_on(seen := read_watched(tmp_path), condition, *read_expected(tmp_path, seen))
    assert {(row.layer, row.letter): row.expected for row in report.rows} == {
        (0, "K"): 0.03, (0, "V"): None, (1, "K"): 0.2, (1, "V"): 0.03,
    }  # fmt: skip
    assert [(row.layer, row.letter) for row in report.alarms] == [(0, "V")]
    no_alarm = "{} clips 5.00%: no alarm, as {} was expected, and up to {} is allowed"
    some, all_ties = ("3.00%", "6.00%"), ("20.00%", "40.00%")
    cases = (("layer 0's K", *some), ("layer 1's K", *all_ties), ("layer 1's V", *some))
    assert report.notes == [no_alarm.format(*case) for case in cases]
    written = (tmp_path / "fp8kv_watch.json").read_bytes()
    with web_server(lambda request, _: request.answer(200, written)) as url:
        assert no_alarm.format(*cases[0]) in fp8kv("watch", url).stdout
        monkeypatch.setattr(client, "_LOCAL_HOSTS", ())  # as if on another machine: what lies here is not its
        done = fp8kv("watch", url)
        assert "no alarm" not in done.stdout
        command = f"fp8kv repair {tmp_path} --stats DIR -o NEW, where DIR is what FP8KV_WATCH names at"
        assert command in done.stderr
    x[:100] = 448.0
    write(tmp_path, *(watched(x, 1.0, layer) for layer in range(2)))
    report = report_on(seen := read_watched(tmp_path), condition, *read_expected(tmp_path, seen))
    assert [row.letter for row in report.alarms if row.layer == 0] == ["K", "V"]
    assert [note.split()[:3] for note in report.notes] == [["layer", "1's", "K"]]
    # engines may hold the largest head's scale for all: less is expected; with too small a scale no more
    for stored, expected in ((2.0, 0.0), (0.5, 0.03)):
        write(tmp_path, *(watched(x, stored, layer) for layer in range(2)))
        shares, difference = read_expected(tmp_path, read_watched(tmp_path))
        assert shares[0, "K"] == expected
        end = f"give in layers 0, 1: layer 0's K clips from {432 * stored:g}, and not from 432"
        assert difference == f"the engine's scales are not those that the statistics in '{tmp_path}' {end}"
        said = [fp8kv("watch", tmp_path, *flags).stdout for flags in ((), ("--model", tmp_path))]
        assert all(
            f"note: {difference}; what was expected may not hold for the engine's\n" in x for x in said
        )
    # no other ones: of a cache that cuts digits off, doubled, in bfloat16, the largest of a rank's heads
    heads = torch.tensor([1.0, 0.5])
    per_head = replace(scales, layers={n: LayerScales(i, heads, heads) for i, n in enumerate("ab")})
    for own, limits, edge, is_same in (
        *((scales, limit, edge, True) for limit, edge in ((432.0, 432.0), (448.0, 448.0), (433.0, 432.0))),
        *((scales, limit, 432.0, False) for limit in (436.0, 448.0, 464.0, 864.0, 216.0)),
        *((scales, limit, 232.0, limit == 464.0) for limit in (464.0, 232.0, 432.0)),
        *((per_head, torch.tensor(ends) * 216.0, 432.0, True) for ends in ([2, 1], [2, 2])),
        *((per_head, torch.tensor(ends) * 216.0, 432.0, False) for ends in ([1, 2], [1, 1])),
    ):
        edges = dict.fromkeys(range(2), edge)
        ends = {(i, x): torch.as_tensor(limits).expand(HEADS) for i in range(2) for x in "KV"}
        assert (watch_report._compare_limits(tmp_path, ends, edges, own) == "") == is_same
    ends, edges = {place: torch.full((HEADS,), 432.0) for place in ends}, dict.fromkeys(range(2), 432.0)
    ends[1, "V"] = 2 * ends[1, "V"]
    difference = watch_report._compare_limits(tmp_path, ends, edges, scales)
    assert "in layer 1: layer 1's V clips from 864" in difference
    write(tmp_path, *(watched(x, 1.0, layer) for layer in range(2)))
    limits = [
        replace(watched(x, 0.5), cuts_off=x_is_cut).to_json()["k"]["limit"][0] for x_is_cut in (False, True)
    ]
    assert limits == [216.0, 224.0]  # values from 432 round to 448
    # ties count where all of the tail is clipped; statistics that were saved without expect the tail alone
    few = replace(full, tail=torch.where(torch.arange(TAIL) < 100, full.tail, 400.0))
    rounded = replace(full, tail=full.tail * (1 - 2**-22) * 432 / 448)  # by the rounding of the scale
    for tail, expected in (
        (full, 0.2), (replace(full, ties=None), TAIL / 1000), (few, 0.1), (rounded, 0.2)
    ):  # fmt: skip
        of_tail = KVStats({"a": LayerStats(0, 1000, tail, rest), "b": LayerStats(1, 1000, rest, rest)})
        assert watch_report.expected_shares(of_tail, scales)[0, "K"] == expected
    # the counts of an engine whose scale is no number are told as before
    for wrong in (0.0, torch.inf, torch.nan):
        layer = replace(watched(x, 1.0, 1), scales=torch.full((2, HEADS), wrong))
        write(tmp_path, watched(x, 1.0), layer)
        assert [y.k.limit is None for y in read_watched(tmp_path).layers] == [False, True]
    write(tmp_path, *(watched(x, 1.0, layer) for layer in range(2)))
    # per channel, or old: it was given, and expects nothing
    calibration.stats = KVStats({"a": LayerStats(0, 1000, rest, rest), "b": LayerStats(1, 1000, rest, rest)})
    assert "give the calibration" not in fp8kv("watch", tmp_path, "--model", tmp_path).stdout
    calibration.stats = stats
    # a calibration of another model
    for layers, words in (
        ([watched(x, 1.0)], f"it lacks layers 1, and '{tmp_path}' caches K and V in 2 layers"),
        ([watched(x, 1.0, i) for i in range(3)], "it has a layer 2, and"),
        ([watched(x[:, :, :1], 1.0, i) for i in range(2)], "layer 0 has K heads 1, and 2 in"),
        ([watched(x[..., :4], 1.0, i) for i in range(2)], "layer 0 has K channels 8, and 16 in"),
    ):
        write(tmp_path, *layers)
        edit_json(tmp_path / "fp8kv_watch.json", model="m")
        done = fp8kv("watch", tmp_path, "--model", tmp_path)
        one_line_error(done, "'m' is of another model: ", words, "give --model its own calibration")
        assert fp8kv("watch", tmp_path).exit_code == 1  # without one, by the limit alone
    done = fp8kv("watch", write(tmp_path, *layers))  # whose engine's model it is not
    assert done.exit_code == 1
    assert "│        - │" in done.stdout
    limit_alone = "expected, give the calibration of this model with --model"
    assert f"{limit_alone} (not taken: '{tmp_path}' is of another model" in done.stdout
    (tmp_path / "fp8kv_stats.safetensors").unlink()
    assert fp8kv("watch", tmp_path).stdout.endswith(f"{limit_alone}\n")


def test_alarms_stand_above_expected_rows_that_clip_more(tmp_path, monkeypatch):
    x = torch.randn(1000, 2, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    write(tmp_path, *(watched(x, 3 / 448 if i == 7 else 2 / 448, i) for i in range(8)))
    expected = {(i, letter): 1.0 for i in range(7) for letter in "KV"}
    monkeypatch.setattr(watch_report, "read_expected", lambda *_: (expected, ""))
    done = fp8kv("watch", tmp_path)
    assert done.exit_code == 1
    assert [line[2:7].split() for line in done.stdout.splitlines()[6:9]] == [
        ["7", "K"],
        ["7", "V"],
        ["0", "K"],
    ]


def test_the_command_shows_the_worst_and_ends_with_1(tmp_path):
    tmp_path /= "a b"
    x = torch.randn(1000, 2, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    write(tmp_path, *(watched(x, 2 / 448 if i == 7 else 1 / 64, i) for i in range(8)))
    done = fp8kv("watch", tmp_path)
    assert done.exit_code == 1
    assert "7 K" in done.stdout.splitlines()[6]
    assert "and 4 more rows, which --json has" in done.stdout
    assert "failed: layer 7's" in done.stderr
    assert "failed: recalibrate layer 7; scales for this traffic: fp8kv repair" in done.stderr
    assert f"fp8kv repair '{tmp_path}' --stats '{tmp_path}' -o NEW" in done.stderr
    assert json.loads(fp8kv("watch", tmp_path, "--json").stdout)["alarm"] == [7]
    assert fp8kv("watch", tmp_path, "--follow", "--every", "0.1").exit_code == 1
    done = fp8kv("watch", tmp_path, "--fail-if", "clipped>0.99")
    assert (done.exit_code, "note: if the engine" in done.stdout) == (0, False)
    written = (datetime.now(timezone.utc) - timedelta(minutes=7)).isoformat(timespec="seconds")
    edit_json(tmp_path / "fp8kv_watch.json", written=written)
    done = fp8kv("watch", tmp_path, "--fail-if", "clipped>0.99")
    assert done.stdout.splitlines()[1] == f"999 tokens from 7 to {written}, 7 min ago"
    assert "note: if the engine still runs, ask it at its address (fp8kv watch http://HOST" in done.stdout
    # zeros: those that fail are shown, with digits, and what tells whether scales are too large
    zeros = write(tmp_path / "zeros", *(watched(x, 1.0 if i == 3 else 1 / 64, i) for i in range(8)))
    done = fp8kv("watch", zeros / "fp8kv_watch.json", "--fail-if", "zero>0.0001")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[6].startswith("│   3 ")
    assert "0.075%" in done.stdout.splitlines()[6]
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: layer 3's ")]
    assert all(" is 0 in 0.0" in line and line.endswith("% of its values") for line in failed)
    assert failed
    assert (
        f"see whether scales are too large in layer 3; fp8kv verify '{zeros}' --against '{zeros}'\n"
        in done.stderr
    )
    document = (tmp_path / "fp8kv_watch.json").read_bytes()
    with web_server(lambda request, _: request.answer(200, document)) as url:
        asked = fp8kv("watch", url, "--fail-if", "clipped>0.99").stdout
        assert ("7 min ago" in asked, "note: if the engine" in asked) == (True, False)
    for time, words in (("7", "Invalid isoformat string"), (written[:19], "no time zone")):
        edit_json(tmp_path / "fp8kv_watch.json", written=time)
        one_line_error(fp8kv("watch", tmp_path), "is not what the plugin writes", words)
    edit_json(tmp_path / "fp8kv_watch.json", written=written)
    one_line_error(fp8kv("watch", tmp_path, "--fail-if", "kl>1"), "METRIC one of clipped, zero")
    one_line_error(
        fp8kv("watch", tmp_path, "--fail-if", "a:zero>1"), "give one condition, clipped>SHARE or zero>SHARE"
    )
    one_line_error(fp8kv("watch", tmp_path, "--fail-if", "clipped>1"), "no share is above 1; write 0.01 for")
    write(tmp_path / "few", watched(x[:255], 2 / 448))
    done = fp8kv("watch", tmp_path / "few")
    assert done.exit_code == 1
    assert "failed: cannot judge layer 0: 255 tokens were counted, 256 are needed" in done.stderr
    for change, words in (
        ({"clipped": [256, 0]}, "more tokens are clipped than were counted"),
        ({"zero": [9999, 0]}, "more values are zero or saturated than were counted"),
        ({"tokens": [10**400, 255]}, "less than 9007199254740992"),
    ):
        path = write(tmp_path / "few", watched(x[:255], 2 / 448)) / "fp8kv_watch.json"
        document = json.loads(path.read_text())
        document["layers"][0]["k"] |= change
        path.write_text(json.dumps(document))
        one_line_error(fp8kv("watch", tmp_path / "few"), words)
    one_line_error(fp8kv("watch", tmp_path / "no"), "has no fp8kv_watch.json: give the directory")
    done = fp8kv("watch", tmp_path, "--model", tmp_path / "no")
    one_line_error(done, f"'{tmp_path / 'no'}' does not exist")
    for model in ({"model": ""}, {}):  # no directory, and not the current one
        (tmp_path / "fp8kv_watch.json").write_text(json.dumps({"fp8kv_watch": 1, "engine": "vllm"} | model))
        one_line_error(fp8kv("watch", tmp_path), "is not what the plugin writes (model: ")
