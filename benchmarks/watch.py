"""FP8KV_WATCH in a real vLLM: false alarms, what an evaluation counts on the same text, and its cost.

watch.py DIR, an output of one scale per layer. All is random samples, as a server takes them, but where it is
compared with an evaluation. Leave the machine alone.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from watched_engine import CODE, DOCUMENTATION, Engine, by_head, by_name

from calib.capture.loop import calibrate
from calib.evaluate.layer_errors import read_layers
from calib.evaluate.served.watch_report import METRICS, expected_shares, read_watched, report_on
from calib.evaluate.variants import Setup, Variant
from calib.files.text import parse_condition
from calib.recipe import load_recipe
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_scales
from calib.scales.tail import poisson_interval
from calib.serving.push import push_scales
from calib.watching import harvest

LENGTH, CALIBRATED, CLEAN, DOCUMENTS = 512, 24, 20, 6
ALARM = parse_condition("clipped>0.01", METRICS)
RECIPE = load_recipe(None, {"device": "cpu"})
TURNS, REQUESTS, PROMPT, WRITTEN = 24, 6, 32, 100
LAST_CODE = 0x7E  # E4M3: 448; values from 432 round to it


def main() -> None:
    """Measure and print."""
    directory = Path(sys.argv[1])
    engine = Engine(directory, Path(tempfile.mkdtemp()))
    documentation = engine.prompts(DOCUMENTATION, LENGTH)
    engine.write_text(documentation[:1])
    _print_counts(engine, load_scales(directory), engine.prompts(CODE, LENGTH)[::230][:DOCUMENTS])
    print(f"tokens/s with watching over without: {_cost(engine, documentation)}", flush=True)
    rows = [[row] for row in documentation[::2][:CALIBRATED]]
    stats = calibrate(_model(directory, torch.float32), rows, RECIPE)
    good = derive_scales(stats, RECIPE)
    push_scales(engine.llm, by_name(good))
    alarms, runs = Counter[tuple[int, str]](), []
    for row in documentation[1::2][:CLEAN]:
        engine.begin()
        engine.files._earliest = float("inf")  # all is read at once
        engine.write_text([row])
        engine.files.write()
        report = report_on(read_watched(engine.out), ALARM, expected_shares(stats, good))
        alarms += Counter((alarm.layer, alarm.letter) for alarm in report.alarms)
        runs.append((max(row.clipped for row in report.rows), bool(report.alarms)))
    share = max(share for share, _ in runs)
    print(f"clean runs: {sum(alarm for _, alarm in runs)} of {len(runs)} alarm, {alarms}; most {share:.2%}")


def _model(directory: Path, dtype: torch.dtype) -> AutoModelForCausalLM:
    config = AutoConfig.from_pretrained(directory)
    vars(config).pop("quantization_config", None)
    return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype)


def _print_counts(engine: Engine, scales: KVScales, rows: list[list[int]]) -> None:
    """Compare clipped tokens, in the head that has most, with an evaluation in transformers.

    An evaluation counts what is beyond the last code's value, the plugin what has that code: so the
    evaluation's scales are smaller by what is rounded to it.
    """
    watch = engine.begin()
    with patch.multiple(harvest, MOST_COUNTED=10**6, _SHARE=1e9):
        for row in rows:
            engine.write_text([row])
        engine.files.write()
    share = _first_clipped(engine, watch) / 448 * (1 - 2**-9)  # in bfloat16 many equal the largest
    layers = {
        name: replace(layer, k=layer.k * share, v=layer.v * share) for name, layer in scales.layers.items()
    }
    variant = Variant("watched", "", "given", replace(scales, layers=layers))
    setup = Setup(_model(engine.directory, torch.bfloat16), engine.llm.get_tokenizer())
    read, _ = read_layers(setup, [(torch.tensor(row), None) for row in rows], [variant], with_errors=False)
    pairs = [*_pairs(engine, read["watched"])]
    outside = [pair for pair in pairs if not _is_inside(*pair)]
    print(f"code, {watch.tokens} tokens: {len(pairs) - len(outside)} of {len(pairs)} in the 95 % interval")
    print(f"outside: {outside}; most: {sorted(pairs)[-6:]} (counted, evaluated)", flush=True)


def _pairs(engine: Engine, evaluated: dict[int, Any]) -> Iterator[tuple[int, int]]:
    for layer in read_watched(engine.out).layers:
        k, v = evaluated[layer.layer].clipped.sum(0).amax(-1).tolist()
        assert layer.k
        assert layer.v
        yield max(layer.k.clipped), k
        yield max(layer.v.clipped), v


def _is_inside(counted: int, evaluated: int) -> bool:
    low, high = poisson_interval(evaluated)
    return low <= counted <= high


def _first_clipped(engine: Engine, watch: harvest.Harvest) -> float:
    """Return the smallest value, over the scale, that is stored as the last code.

    vLLM 0.32's kernel for CPUs cuts digits off, others round to the nearest.
    """
    _, layer = watch._groups[0][0]
    x = torch.full((1, layer.num_kv_heads, layer.head_size), 440 * layer._k_scale_float).bfloat16()
    block = torch.zeros(1, *layer.kv_cache.shape[1:], dtype=torch.uint8)
    engine.writes.write(layer.impl, layer, x, x, block, torch.zeros(1, dtype=torch.int64))
    return 432 if by_head(block)[0].max() == LAST_CODE else 448


def _cost(engine: Engine, rows: list[list[int]]) -> str:
    """Return tokens per second with watching over those without, turn by turn."""
    watch, seconds = engine.begin(), {True: list[float](), False: list[float]()}
    for turn in range(TURNS):
        is_on = bool(turn % 2)
        watch.slots.forget()
        engine.runner.fp8kv_harvest = watch if is_on else None
        begun = time.perf_counter()
        engine.write_text([row[:PROMPT] for row in rows[:REQUESTS]], WRITTEN)
        seconds[is_on].append(time.perf_counter() - begun)
    ratios = [off / on for off, on in zip(seconds[False][1:], seconds[True][1:], strict=True)]
    rate = REQUESTS * WRITTEN / median(seconds[False])
    values = " ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"median {median(ratios):.3f} of {values}; {rate:.0f} tokens/s, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
