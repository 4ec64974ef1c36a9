"""FP8KV_WATCH in a real vLLM: what the plugin reads out of its cache is what the engine has written there.

check_watch.py exact MODEL              a 16-bit cache: the largest values
check_watch.py codes DIR FP8KV          an FP8 cache: counts, alarms, faults and cost; DIR has one scale per layer
check_watch.py served DIR FP8KV WHEEL   the route, the command and the metrics of a server

What was written is counted by a scratch cache, which the backend's own writer fills with the same K and V.
FP8KV is the command, which may have an environment of its own.
"""

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from check_live import Check, text_of
from check_server import install, serving
from engine import generate, start, tell
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from calib.capture.loop import calibrate as measure
from calib.data.builtin import builtin_rows
from calib.evaluate.layer_errors import poisson_interval, read_layers
from calib.evaluate.variants import Setup, Variant
from calib.files.names import STATS_FILE, WATCH_FILE
from calib.files.text import parse_condition
from calib.recipe import load_recipe
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_scales, load_stats
from calib.serving import harvest, plugin
from calib.serving.push import push_scales
from calib.serving.watch_report import METRICS, read_watched, report_on

RECIPE = load_recipe(None, {"device": "cpu"})
ALARM = parse_condition("clipped>0.01", METRICS)
DOCUMENTATION, CODE = "builtin:python-docs", "builtin:code"
SMALL = {"max_model_len": 640, "num_gpu_blocks_override": 13, "max_num_batched_tokens": 192}
SHARE_OF_ROUNDING = 1.0
LOG: list[str] = []
Prompt = dict[str, list[int]]


class Writes:
    """What the backend's writer is given, counted per layer, K and V, and head."""

    def __init__(self) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Backend

        self.write = Backend.do_kv_cache_update
        Backend.do_kv_cache_update = lambda *call: self.note(*call)
        self.begin()

    def begin(self) -> None:
        self.tokens, self.calls = Counter[str](), Counter[str]()
        self.codes: dict[str, Tensor] = {}  # [2, H, 256]
        self.amax: dict[str, Tensor] = {}  # [2, H, D]

    def note(self, impl: object, layer, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        self.write(impl, layer, key, value, cache, slots)
        if cache.data_ptr() != layer.kv_cache.data_ptr():
            return  # the plugin looks where a block keeps what
        count, name = len(slots), layer.layer_name.removesuffix(".attn")
        assert bool((slots >= 0).all())
        self.tokens[name] += count
        self.calls[name] += 1
        amax = torch.stack([x[:count].abs().amax(0).float() for x in (key, value)])
        self.amax[name] = torch.maximum(amax, self.amax.get(name, amax))
        if cache.element_size() > 1:
            return
        _, heads, size, width = cache.shape
        scratch = torch.zeros(-(-count // size), *cache.shape[1:], dtype=cache.dtype)
        self.write(impl, layer, key, value, scratch, torch.arange(count))
        codes = torch.stack(
            [torch.bincount(row, minlength=256) for row in by_head(scratch.view(torch.uint8)).int()]
        )
        codes[:, 0] -= (len(scratch) * size - count) * width // 2
        self.codes[name] = codes.view(2, heads, 256) + self.codes.get(name, 0)


def by_head(cache: Tensor) -> Tensor:
    """A cache of CPU_ATTN as [2 * H, values]: of each block and head, K's half lies before V's."""
    return cache.view(*cache.shape[:2], 2, -1).permute(2, 1, 0, 3).flatten(2).flatten(0, 1)


def watched_engine(directory: Path, out: Path, **options: object) -> tuple[object, object]:
    """An engine in this process that watches into `out`, and its runner."""
    os.environ |= {"FP8KV_WATCH": str(out), "VLLM_LOGGING_LEVEL": "INFO"}
    logging.getLogger("vllm.fp8kv").addFilter(lambda record: LOG.append(record.getMessage()) or True)
    plugin.register_vllm()
    llm = start(directory, **SMALL | options)
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    return llm, runner


def begin(runner: object, writes: Writes) -> "harvest.Harvest":
    """Count anew, as an engine does that has just started."""
    watch = runner.fp8kv_harvest
    watch._slots.take()
    watch._begin()
    watch._next_read = watch._next_write = 0.0
    writes.begin()
    return watch


def prompts(llm: object, dataset: str, length: int) -> list[Prompt]:
    """Different stretches of a built-in text."""
    encode = llm.get_tokenizer().encode
    rows = [encode(row)[:length] for _, row in builtin_rows(dataset, length)]
    return [{"prompt_token_ids": row} for row in rows if len(row) == length]


def cut(given: list[Prompt], length: int) -> list[Prompt]:
    """The first so many tokens of each prompt."""
    return [{"prompt_token_ids": prompt["prompt_token_ids"][:length]} for prompt in given]


def write_text(llm: object, given: list[Prompt], tokens: int) -> None:
    """Let the engine read prompts, all at a time, and write so many tokens to each."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(given, options, use_tqdm=False)


def calibrated(
    directory: Path, rows: list[Prompt], dtype: torch.dtype
) -> tuple[AutoModelForCausalLM, object]:
    """The model without its scales, and statistics of `rows`."""
    config = AutoConfig.from_pretrained(directory)
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype)
    return model, measure(model, [[row["prompt_token_ids"]] for row in rows], RECIPE)


def check_exact(directory: Path) -> Iterator[Check]:
    """The largest values of a 16-bit cache, at the settings that everybody has."""
    out = Path(tempfile.mkdtemp())
    llm, runner = watched_engine(directory, out)
    writes, texts = Writes(), prompts(llm, DOCUMENTATION, 256)[:5]
    write_text(llm, texts[4:], 1)
    watch = begin(runner, writes)
    caches = {layer.layer_name.removesuffix(".attn"): layer.kv_cache for _, layer in watch._groups[0]}
    for cache in caches.values():
        cache.zero_()
    for text in texts[:4]:
        write_text(llm, [text], 1)
    watch.finish()
    stats = load_stats(out / STATS_FILE).layers
    watched = {name: torch.stack([layer.k.amax, layer.v.amax]) for name, layer in stats.items()}
    is_equal = all(torch.equal(watched[name], amax) for name, amax in writes.amax.items())
    yield "16 bits: the largest values that were written, bit for bit", is_equal, writes.tokens
    is_equal = all(
        torch.equal(watched[name].amax(-1).flatten(), by_head(cache).abs().amax(-1).float())
        for name, cache in caches.items()
    )
    yield "and those of the whole cache", is_equal and len(watched) == len(caches), len(caches)
    _, measured = calibrated(directory, texts[:4], torch.bfloat16)
    ratios = [
        (getattr(layer, letter).amax.amax(-1) / getattr(measured.layers[name], letter).amax.amax(-1))
        for (name, layer), letter in product(stats.items(), "kv")
    ]
    ratio = torch.stack(ratios)
    furthest = float((ratio - 1).abs().max())
    yield (
        "and within 1 % of calibration's, of each head",
        furthest < 0.01,
        (furthest, ratio.mean(), ratio.std()),
    )


def check_codes(directory: Path, fp8kv: Path) -> Iterator[Check]:
    """One engine with an FP8 cache."""
    out = Path(tempfile.mkdtemp(), "watch")
    out.write_text("in the way")
    llm, runner = watched_engine(directory, out)
    reference = text_of(llm)
    named = [line for line in LOG if line.startswith("fp8kv: the cache is not watched: ")]
    yield "a file in the way: named once, and the text is written", len(named) == 1 and reference, named
    out.unlink()
    del runner.fp8kv_harvest
    yield "watched, the same text", text_of(llm) == reference and runner.fp8kv_harvest, reference
    writes = Writes()
    documentation, code = prompts(llm, DOCUMENTATION, 512), prompts(llm, CODE, 512)
    with exhaustive():
        yield from check_counts(llm, runner, writes, documentation)
        yield from check_code(llm, runner, writes, directory, out, code[::80])
    yield from check_scales(llm, runner, writes, directory, out, fp8kv, documentation)
    yield from check_faults(llm, runner, writes, out, reference)
    print(measure_cost(llm, runner, documentation))


@contextmanager
def exhaustive() -> Iterator[None]:
    """Count all of an FP8 cache."""
    before = harvest.MOST_COUNTED, harvest._SHARE
    harvest.MOST_COUNTED, harvest._SHARE = 10**6, 1e9
    yield
    harvest.MOST_COUNTED, harvest._SHARE = before


def is_counted(watch: "harvest.Harvest", writes: Writes) -> tuple[bool, object]:
    """Whether each code that was written was counted once."""
    watch.read()
    layers = [(index, layer.layer_name.removesuffix(".attn")) for index, layer in watch._groups[0]]
    are_equal = [
        torch.equal(watch.counts[index].codes, writes.codes[name])
        and watch.counts[index].tokens == writes.tokens[name] == watch.tokens
        for index, name in layers
    ]
    seen = f"{watch.tokens} tokens in {min(writes.calls.values())} writes, {sum(are_equal)} layers"
    return all(are_equal) and len(layers) > 1, seen


def check_counts(llm: object, runner: object, writes: Writes, texts: list[Prompt]) -> Iterator[Check]:
    """No slot is missed or counted twice."""
    watch = begin(runner, writes)
    write_text(llm, texts[:1], 9)
    right, seen = is_counted(watch, writes)
    is_chunked = min(writes.calls.values()) > 9 and watch.tokens == 512 + 8
    yield "a prompt in parts: each code counted once", right and is_chunked, seen

    watch = begin(runner, writes)
    generate(llm, texts[0], temperature=0, max_tokens=9, ignore_eos=True)
    right, seen = is_counted(watch, writes)
    yield "a prompt that is cached: what was not", right and 8 <= watch.tokens < 512, seen

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    watch = begin(runner, writes)
    with patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as gave_way:
        write_text(llm, cut(texts[:6], 150), 150)
    right, seen = is_counted(watch, writes)
    yield "requests that give way: what is computed again too", right and gave_way.called, (seen, gave_way.call_count)


def check_code(
    llm: object, runner: object, writes: Writes, directory: Path, out: Path, texts: list[Prompt]
) -> Iterator[Check]:
    """Scales from documentation clip code as `fp8kv-eval --also` says, which counts beyond another value."""
    watch = begin(runner, writes)
    for text in texts:
        write_text(llm, [text], 1)
    watch.finish()
    counted = {layer.layer: (layer.k.clipped, layer.v.clipped) for layer in read_watched(out).layers}
    model, _ = calibrated(directory, texts[:1], torch.bfloat16)
    scales = load_scales(directory)
    layers = {
        name: replace(layer, k=layer.k * SHARE_OF_ROUNDING, v=layer.v * SHARE_OF_ROUNDING)
        for name, layer in scales.layers.items()
    }
    variant = Variant("watched", "", "given", replace(scales, layers=layers))
    documents = [torch.tensor(text["prompt_token_ids"]) for text in texts]
    read, _ = read_layers(Setup(model, llm.get_tokenizer()), documents, [variant], with_errors=False)
    pairs = [
        (watched, events)
        for index, layer in read["watched"].items()
        for watched, events in zip(counted[index], layer.clipped.sum(0).tolist(), strict=True)
    ]
    heads = [(ours, theirs) for pair in pairs for ours, theirs in zip(*pair, strict=True)]
    worst = [(max(watched), max(events)) for watched, events in pairs]
    outside = [pair for pair in worst if not is_inside(*pair)]
    print(sorted(worst)[-12:], [pair for pair in heads if not is_inside(*pair)])
    yield "code: clipped tokens in the interval of the evaluation's", not outside, outside


def is_inside(count: int, events: int) -> bool:
    low, high = poisson_interval(events)
    return low <= count <= high


def check_scales(
    llm: object, runner: object, writes: Writes, directory: Path, out: Path, fp8kv: Path, texts: list[Prompt]
) -> Iterator[Check]:
    """Good scales raise no alarm; too small ones of one layer do, once they are pushed."""
    _, stats = calibrated(directory, texts[::2][:24], torch.float32)
    good = derive_scales(stats, RECIPE)
    pushed = push_scales(llm, tensors(good))
    clean = []
    for text in texts[1::2][:20]:
        watch = begin(runner, writes)
        write_text(llm, [text], 32)
        watch.finish()
        clean.append(report_on(read_watched(out), ALARM))
    worst = max((row for report in clean for row in report.rows), key=lambda row: row.clipped)
    alarms = [report.alarm_layers for report in clean]
    is_counted = all(row.tokens == 512 for report in clean for row in report.rows)
    yield "20 clean runs: no alarm", not any(alarms) and is_counted and len(clean) == 20, (alarms, worst)

    tokens, before = watch.tokens, watch.fingerprint
    module = "model.layers.7.self_attn"
    layer = replace(good.layers[module], k=good.layers[module].k / 4)
    planted = push_scales(llm, tensors(replace(good, layers={**good.layers, module: layer})))
    is_new = watch.fingerprint == planted != before == pushed and (watch.tokens, watch.counts) == (0, {})
    yield "pushed scales: counting begins anew", is_new and tokens > 0, (planted, watch.tokens)
    watch = begin(runner, writes)
    write_text(llm, [{"prompt_token_ids": x["prompt_token_ids"][:100]} for x in texts[:5]], 300)
    watch.finish()
    done = subprocess.run([fp8kv, "watch", out, "--json"], stdout=subprocess.PIPE, text=True)
    said = json.loads(done.stdout)
    is_right = (done.returncode, said["alarm"], said["fingerprint"]) == (1, [7], planted)
    yield (
        "K's scale of layer 7 is a quarter: alarm",
        is_right and said["tokens"] <= 2000,
        (said["tokens"], max(said["layers"], key=lambda x: x["clipped"])),
    )
    push_scales(llm, tensors(load_scales(directory)))


def tensors(scales: KVScales) -> dict[str, Tensor]:
    """Scales by the names that engines load them by."""
    return {
        f"{name}.{letter}_scale": getattr(layer, letter)
        for name, layer in scales.layers.items()
        for letter in "kv"
    }


def check_faults(llm: object, runner: object, writes: Writes, out: Path, reference: str) -> Iterator[Check]:
    """A full disk, and a process that is killed as it writes."""
    watch = begin(runner, writes)
    before = [path.read_bytes() for path in (out / WATCH_FILE, out / STATS_FILE)]
    with full_disk(watch):
        text = text_of(llm)
        watch.finish()
    after = [path.read_bytes() for path in (out / WATCH_FILE, out / STATS_FILE)]
    yield (
        "a full disk: named, and the text is written",
        text == reference and "cannot write" in LOG[-1],
        LOG[-2:],
    )
    yield "and the files of before", before == after and runner.fp8kv_harvest is watch, ""
    text_of(llm)
    watch.finish()
    seen = read_watched(out).tokens
    yield "room again: written again", seen == watch.tokens > 0, seen

    states, rank = set(), out / "rank-0.safetensors"
    for _ in range(30):
        child = os.fork()
        while not child:
            watch.write()
        time.sleep(random.uniform(0.05, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _, layers = harvest.read_rank(rank)
        whole = len(read_watched(out).layers), len(load_stats(out / STATS_FILE).layers), len(layers)
        states.add((whole, rank.stat().st_mtime_ns))
    lengths = {whole for whole, _ in states}
    yield (
        "killed as it writes, 30 times: whole files",
        len(lengths) == 1 and len(states) > 20,
        (lengths, len(states)),
    )


@contextmanager
def full_disk(watch: "harvest.Harvest") -> Iterator[None]:
    """A file system without room where one can be mounted; else writes that fail as there."""
    small, directory = Path(tempfile.mkdtemp()), watch._directory
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", small]
    is_mounted = subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
    replace_file = os.replace
    if is_mounted:
        watch._directory = small
    else:
        os.replace = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
    try:
        yield
    finally:
        os.replace, watch._directory = replace_file, directory
        if is_mounted:
            subprocess.run(["umount", small], check=True)


def measure_cost(llm: object, runner: object, texts: list[Prompt]) -> str:
    """Tokens per second with watching over those without, turn by turn."""
    watch, rates = runner.fp8kv_harvest, {True: [], False: []}
    given = [{"prompt_token_ids": x["prompt_token_ids"][:32]} for x in texts[:6]]
    for turn in range(14):
        watch._slots.take()
        runner.fp8kv_harvest = watch if turn % 2 else None
        start = time.perf_counter()
        write_text(llm, given, 200)
        if turn > 1:
            rates[bool(turn % 2)].append(len(given) * 200 / (time.perf_counter() - start))
    ratios = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
    load = os.getloadavg()[0]
    return f"tokens/s, watched over not: {median(ratios):.3f} ({ratios}, {median(rates[False]):.0f} tokens/s, load {load:.1f})"


def check_served(directory: Path, fp8kv: Path, wheel: Path) -> Iterator[Check]:
    """A server."""
    packages, out = install(Path(tempfile.mkdtemp(), "packages"), str(wheel)), Path(tempfile.mkdtemp())
    variables = {"VLLM_PLUGINS": "fp8kv,interop_helper", "FP8KV_WATCH": str(out), "FP8KV_WATCH_SECONDS": "1"}
    options = ["--max-model-len", "512", "--num-gpu-blocks-override", "64"]
    with serving(directory.resolve(), packages, *options, **variables) as (url, log):
        if url is None:
            sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")
        written = 0
        for prompt in ("Rome was built on seven hills. " * 20, "Trees grow in the woods. " * 20):
            body = {
                "model": str(directory.resolve()),
                "prompt": prompt,
                "max_tokens": 200,
                "ignore_eos": True,
            }
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                usage = json.load(answer)["usage"]
            written += usage["total_tokens"] - 1
        with urllib.request.urlopen(f"{url}/v1/fp8kv/watch") as answer:
            document = json.load(answer)
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            metrics = answer.read().decode()
        done = subprocess.run([fp8kv, "watch", url, "--json"], stdout=subprocess.PIPE, text=True)
    yield "the route", 0 < document["tokens"] <= written, (document["tokens"], written)
    said = json.loads(done.stdout)
    yield (
        "the command",
        said["fingerprint"] == document["fingerprint"] and done.returncode in (0, 1),
        done.returncode,
    )
    names = [
        f'fp8kv_{x}_ratio{{layer="{layer}",tensor="{y}"}} '
        for x, layer, y in product(("clipped", "zero"), range(30), "kv")
    ]
    yield (
        "the metrics",
        all(x in metrics for x in [*names, "fp8kv_tokens_total "]),
        [x for x in metrics.splitlines() if "fp8kv_" in x][:9],
    )
    last = read_watched(out)
    yield "at the end, every token that was written", last.tokens == written, (last.tokens, written)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    check = {"exact": check_exact, "codes": check_codes, "served": check_served}[what]
    checks = check(*map(Path, arguments))
    tell((f"{name}: {str(seen)[:300]}", right) for name, right, seen in checks)
