"""FP8KV_WATCH in a real vLLM: what the plugin reads out of its cache is what the engine has written there.

check_watch.py exact MODEL DTYPE        a cache in 16 bits, or 32: the largest values
check_watch.py codes DIR FP8KV          an FP8 cache: counts, alarms, faults; DIR has one scale per layer
check_watch.py served DIR FP8KV WHEEL RANKS   the route, the command and the metrics of a server
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from check_live import Check
from check_server import install, serving
from engine import generate, tell
from transformers import AutoModelForCausalLM
from watched_engine import DOCUMENTATION, LOG, Engine, by_head, by_name

from calib.capture.loop import calibrate as measure
from calib.engines.loaded_scales import fingerprint
from calib.evaluate.served.watch_report import read_watched
from calib.files.names import STATS_FILE, WATCH_FILE
from calib.recipe import load_recipe
from calib.scales.stats_file import load_scales, load_stats
from calib.serving.push import push_scales
from calib.watching import harvest

NEAR = {"bfloat16": 0.03, "float16": 0.01, "float32": 0.01}  # to what transformers computes


def check_exact(directory: Path, dtype: Path) -> Iterator[Check]:
    """The largest values, at the settings that everybody has."""
    engine = Engine(directory, Path(tempfile.mkdtemp()), dtype=str(dtype))
    rows = engine.prompts(DOCUMENTATION, 256)[:5]
    engine.write_text(rows[4:])
    watch = engine.begin()
    caches = {layer.layer_name.removesuffix(".attn"): layer.kv_cache for _, layer in watch._groups[0]}
    for cache in caches.values():
        cache.zero_()
    for row in rows[:4]:
        engine.write_text([row])
    engine.files.write()
    stats = load_stats(engine.out / STATS_FILE).layers
    watched = {name: torch.stack([layer.k.amax, layer.v.amax]) for name, layer in stats.items()}
    is_equal = all(torch.equal(watched[name], amax) for name, amax in engine.writes.amax.items())
    yield f"{dtype}: the largest values that were written, bit for bit", is_equal, watch.tokens
    largest = {name: by_head(cache).abs().amax(-1).float() for name, cache in caches.items()}
    is_equal = all(torch.equal(amax, watched[name].amax(-1).flatten()) for name, amax in largest.items())
    yield "and those of the whole cache", is_equal and len(watched) == len(caches) > 1, len(caches)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, str(dtype)))
    measured = measure(model, [[row] for row in rows[:4]], load_recipe(None, {}))
    ratios = [
        getattr(layer, letter).amax.amax(-1) / getattr(measured.layers[name], letter).amax.amax(-1)
        for (name, layer), letter in product(stats.items(), "kv")
    ]
    furthest = float((torch.stack(ratios) - 1).abs().max())
    yield "and near a calibration's on the same tokens, of each head", furthest < NEAR[str(dtype)], furthest


def check_codes(directory: Path, fp8kv: Path) -> Iterator[Check]:
    """One engine with an FP8 cache."""
    out = Path(tempfile.mkdtemp(), "watch")
    out.write_text("in the way")
    engine = Engine(directory, out)
    text, start = engine.text(), "fp8kv: the cache is not watched ("
    named = [line for line in LOG if line.startswith(start)]
    yield "a file in the way: named once, and the text is written", len(named) == 1 and bool(text), named
    out.unlink()
    harvest.watch_engine(engine.core, str(out))
    engine.watch = engine.runner.fp8kv_harvest
    is_watched = engine.text() == text and engine.runner.fp8kv_harvest
    yield "watched, the same text", bool(is_watched), text
    rows = engine.prompts(DOCUMENTATION, 512)
    with patch.multiple(harvest, MOST_COUNTED=10**6, _SHARE=1e9):
        yield from check_counts(engine, rows)
    yield from check_scales(engine, fp8kv, rows)
    yield from check_faults(engine, text)


def check_counts(engine: Engine, rows: list[list[int]]) -> Iterator[Check]:
    """No slot is missed, and none is counted twice."""
    watch, writes = engine.begin(), engine.writes
    engine.write_text(rows[:1], 9)
    right, seen = engine.is_counted()
    is_right = right and (watch.tokens, min(writes.calls.values())) == (512 + 8, 2 + 8)
    yield "a prompt in parts: each code counted once", is_right, seen
    engine.files.write()
    ratios, scales = [], load_scales(engine.directory).layers
    for name, layer in load_stats(engine.out / STATS_FILE).layers.items():
        largest, end = writes.amax[name], 448 * torch.stack([scales[name].k, scales[name].v])[..., None]
        ratios.append((torch.stack([layer.k.amax, layer.v.amax]) / largest)[largest < end])
    ends = min(x.min() for x in ratios), max(x.max() for x in ratios)
    yield "the largest values are at most a code too large", 0.9999 < ends[0] <= ends[1] < 1.13, ends
    watch = engine.begin()
    generate(engine.llm, {"prompt_token_ids": rows[0]}, temperature=0, max_tokens=9, ignore_eos=True)
    right, seen = engine.is_counted()
    yield "a prompt that is cached: what was not", right and watch.tokens == 128 + 8, seen
    watch, scheduler = engine.begin(), engine.llm.llm_engine.engine_core.engine_core.scheduler
    with patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as gave_way:
        engine.write_text([row[:150] for row in rows[:6]], 150)
    right, seen = engine.is_counted()
    is_right = right and gave_way.called and watch.tokens > 6 * (150 + 149)
    yield "requests that give way: what is computed again too", is_right, (seen, gave_way.call_count)


def check_scales(engine: Engine, fp8kv: Path, rows: list[list[int]]) -> Iterator[Check]:
    """Scales that are pushed begin anew; where one is too small the command says so."""
    watch, good, module = engine.begin(), load_scales(engine.directory), "model.layers.7.self_attn"
    engine.write_text(rows[:1])
    before, layer = watch.tokens, replace(good.layers[module], k=good.layers[module].k / 4)
    planted = push_scales(engine.llm, by_name(replace(good, layers={**good.layers, module: layer})))
    is_new = (fingerprint(watch._stored), watch.tokens, watch.counts) == (planted, 0, {})
    yield "pushed scales: counting begins anew", is_new and before == 512, planted
    watch = engine.begin()
    engine.write_text([row[:128] for row in rows[:4]], 120)
    engine.files.write()
    done = subprocess.run([fp8kv, "watch", engine.out, "--json"], stdout=subprocess.PIPE, text=True)
    said = json.loads(done.stdout)
    is_right = (done.returncode, said["fingerprint"]) == (1, planted) and 7 in said["alarm"]
    seen = said["alarm"], said["tokens"], [row["tokens"] for row in said["layers"][:1]]
    yield "K's scale of layer 7 a quarter: alarm", is_right and said["tokens"] <= 2000, seen
    push_scales(engine.llm, by_name(good))


def check_faults(engine: Engine, text: str) -> Iterator[Check]:
    """A full disk, and a process that is killed as it writes."""
    watch, files = engine.begin(), [engine.out / WATCH_FILE, engine.out / STATS_FILE]
    before = [path.read_bytes() for path in files]
    with full_disk(engine.files):
        is_same = engine.text() == text
        engine.files.write()
    is_right = is_same and "No space left on device" in LOG[-1]
    yield "a full disk: named, the text is written", is_right, LOG[-1]
    yield "and the files are those of before", before == [path.read_bytes() for path in files], ""
    engine.files.write()
    yield "room again: written", read_watched(engine.out).tokens == watch.tokens > 0, watch.tokens
    states = set()
    for _ in range(30):
        child = os.fork()
        while not child:
            engine.files.write()
        time.sleep(random.uniform(0.05, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        states.add((len(read_watched(engine.out).layers), len(load_stats(files[1]).layers)))
    is_right = len(states) == 1 and time.time() - files[0].stat().st_mtime < 60
    yield "killed as it writes, 30 times: whole files", is_right, states


@contextmanager
def full_disk(files: harvest.WatchFiles) -> Iterator[None]:
    """A file system without room, where one can be mounted; else what it says."""
    small, error = Path(tempfile.mkdtemp()), OSError(28, "No space left on device")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", small]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        with patch.object(os, "replace", side_effect=error):
            yield
    else:
        with patch.object(files, "directory", small):
            yield
        subprocess.run(["umount", small], check=True)


def check_served(directory: Path, fp8kv: Path, wheel: Path, ranks: Path) -> Iterator[Check]:
    """A server, in processes of its own, split over so many."""
    packages, out = install(Path(tempfile.mkdtemp(), "packages"), str(wheel)), Path(tempfile.mkdtemp())
    variables = {"VLLM_PLUGINS": "fp8kv,interop_helper", "FP8KV_WATCH": str(out), "FP8KV_WATCH_SECONDS": "1"}
    options, model = ["--max-model-len", "512", "--num-gpu-blocks-override", "64"], str(directory.resolve())
    # without the time vLLM kills its engine
    options += ["--shutdown-timeout", "60", "--tensor-parallel-size", str(ranks)]
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("0" * int(str(ranks)))
    with serving(model, packages, *options, **variables) as (url, log):
        if url is None:
            sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")

        def ask(path: str, **body: object) -> str:
            data, headers = json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
                return answer.read().decode()

        def complete(number: int) -> int:
            prompt = f"{number} times Rome was built on hills. " * 20
            body = {"model": model, "prompt": prompt, "max_tokens": 50, "ignore_eos": True}
            return json.loads(ask("/v1/completions", **body))["usage"]["total_tokens"] - 1

        written = 0
        for number in range(60):
            written += complete(number)
            document = json.loads(ask("/v1/fp8kv/watch"))
            if min(document["layers"][0]["k"]["tokens"]) >= 256:  # of fewer nothing is said
                break
        document = json.loads(ask("/v1/fp8kv/watch"))
        metrics = ask("/metrics")
        done = subprocess.run([fp8kv, "watch", url, "--json"], stdout=subprocess.PIPE, text=True)
        tokens = written + complete(60) + complete(61)
    yield "the route", document["tokens"] == written, (document["tokens"], written)
    said = json.loads(done.stdout)
    yield "the command", said["fingerprint"] == document["fingerprint"], (done.returncode, said["alarm"])
    each = product(("clipped", "saturated", "zero"), range(30), "kv")
    names = [f'fp8kv_{name}_ratio{{layer="{layer}",tensor="{letter}"}} ' for name, layer, letter in each]
    missing = [name for name in [*names, "fp8kv_tokens_total "] if name not in metrics]
    yield "the metrics", not missing, missing
    last = read_watched(out).tokens
    yield "at the end every token that was written", last == tokens, (last, tokens)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    check = {"exact": check_exact, "codes": check_codes, "served": check_served}[what]
    checks = check(*map(Path, arguments))
    tell((f"{name}: {str(seen)[:300]}", right) for name, right, seen in checks)
