"""Spoil one copy after another of the scales that real vLLM holds; the plugin must name each, and no other.

check_copies.py spoiled DIR   exit 0 if the plugin says that all scales of DIR are in use, and 50 times, with
    a copy of a random layer spoiled, which copy of which layer differs and ends the server as
    FP8KV_REQUIRE_SCALES asks; and if the backend stores and attends with the catalogue's copies
check_copies.py clean OUT     exit 0 if it names nothing, and counts every scale, in all 50 directories of
    `write_models.py clean OUT`, random layers of which stay in 16 bits; one of each kind is served
"""

import json
import logging
import os
import random
import re
import sys
from collections import defaultdict
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from types import SimpleNamespace

import torch
from engine import configure, installed_engine, load_configured, read_output, report, start

from calib.serving import plugin, vllm_worker
from calib.serving.engine_layers import vllm_attention

TIMES, SEED = 50, 50
# 1.0 is what was never filled; the others were filled from something else
SPOILED = (1.0, 2.0, 0.75)
COPIES = installed_engine().scale_copies
LARGEST = "(; [^;]* takes the largest of a layer's scales for all of its heads)?"  # with scales per head


def said_with(runner, layer: torch.nn.Module, names: list[str], factor: float) -> str:
    """What the plugin says while these copies are 1.0, or the scale times another factor."""
    held, line = {name: getattr(layer, name) for name in names}, "goes on"
    for name, scale in held.items():
        setattr(layer, name, scale**0 if factor == 1.0 else scale * factor)
    try:
        plugin.guard("vllm", lambda: vllm_worker.check(runner))
    except plugin.ScalesNotUsedError as error:
        line = f"ends: {error}"
    for name, scale in held.items():
        setattr(layer, name, scale)
    return line


def by(name: str) -> str:
    """What is said of the backend for CPUs, which reads the numbers."""
    if name[1] == "q":
        return ""
    return ", which CPU_ATTN reads," if name.endswith("_float") else ", which CPU_ATTN does not read,"


def copies_read(llm, layers: dict[int, torch.nn.Module]) -> dict[str, set[str]]:
    """The copies that arrive at the kernels, on storing and on attending, where all of them differ."""
    from vllm import _custom_ops

    numbers = {"tensor": 0.5, "float": 0.25, "cpu": 0.125}
    for layer, copy, x in product(layers.values(), numbers, "kv"):
        name = COPIES[copy].format(x=x)
        setattr(layer, name, getattr(layer, name) * 0 + numbers[copy])
    arrived = defaultdict(set)

    def watched(kernel: str, step: str) -> None:
        theirs = getattr(_custom_ops, kernel)

        def call(*args, **kwargs):
            arrived[step] |= {copy for copy, n in numbers.items() for x in "kv" if kwargs[f"{x}_scale"] == n}
            return theirs(*args, **kwargs)

        setattr(_custom_ops, kernel, call)

    watched("cpu_attn_reshape_and_cache", "write")
    watched("cpu_attention_with_kv_cache", "read")
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
    return dict(arrived)


def check_spoiled(directory: Path) -> None:
    scales, lines = read_output(directory).scales, logged()
    letters = "kvq" if any("q" in layer for layer in scales.values()) else "kv"
    total = 2 * len(scales)
    good = f"fp8kv: {total} of {total} KV scales in use, FP8 cache"
    llm = start(directory)
    problems = [] if lines[-1:] and lines[-1].startswith(good) else [f"untouched: {lines}"]
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    os.environ["FP8KV_REQUIRE_SCALES"] = "1"
    layers = vllm_attention(runner.model)
    chance = random.Random(0)
    # of Q there is none on the host
    copies = [n for x in letters for c in COPIES.values() if (n := c.format(x=x)) != "_q_scale_cpu"]
    cases = [([name], f"{name[1].upper()}'s copy {name}{by(name)} is [^;]*") for name in copies]
    cases = [*islice(cycle(cases), TIMES), (copies[:3], "K is twice the file's")]
    for (names, said), factor in zip(cases, cycle(SPOILED), strict=False):
        index = chance.choice(sorted(layers))
        line = said_with(runner, layers[index], names, 2.0 if len(names) > 1 else factor)
        is_read = len(names) > 1 or names[0] in ("_k_scale_float", "_v_scale_float")  # by CPU_ATTN
        start_of_line = f"ends: fp8kv: {total - is_read} of {total} KV scales in use, FP8 cache, fingerprint "
        if not re.fullmatch(f"{start_of_line}[0-9a-f]{{32}}{LARGEST}; {said} in layer {index}", line):
            problems.append(f"{names} of layer {index}: {line}")
    if (line := said_with(runner, layers[0], [], 1.0)) != "goes on":
        problems.append(f"mended: {line}")
    name = layers[0].attn_backend.get_name()
    backend, read = installed_engine().backends[name], copies_read(llm, layers)
    if read != {"write": {*backend.write}, "read": {*backend.read}}:
        problems.append(f"{name} reads {read}, not what the catalogue says")
    report(directory, problems, f"{good!r}; {TIMES} spoiled copies are named; {name} reads {read}")


def logged() -> list[str]:
    """The plugin's lines from now on."""
    lines = []
    logging.getLogger("vllm.fp8kv").addFilter(lambda record: lines.append(record.getMessage()) or True)
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    plugin.register_vllm()
    return lines


def runner_of(directory: Path, **options) -> SimpleNamespace:
    """What the plugin asks of a runner, for a model that vLLM only loads."""
    config = configure(directory, **options)
    model = load_configured(config)
    return SimpleNamespace(get_model=lambda: model, vllm_config=config, model_config=config.model_config)


def check_clean(out: Path) -> None:
    lines, chance, problems, skips = logged(), random.Random(SEED), [], 0
    homes = sorted(out.iterdir(), key=lambda home: "Mixtral" not in home.name)  # its groups do for all
    kinds = sorted(directory.name for directory in homes[0].iterdir() if directory.name != "source")
    served = {*zip(homes, kinds, strict=False)}
    cases = sorted(product(homes, kinds), key=lambda case: case not in served)
    for home, kind in cases:
        layers = range(json.loads((home / "source" / "config.json").read_text())["num_hidden_layers"])
        skipped = [*map(str, sorted(chance.sample(layers, chance.choice(layers))))]
        options = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": skipped}
        lines.clear()
        if (home, kind) in served:
            start(home / kind, **options)
        else:
            plugin.guard("vllm", partial(vllm_worker.check, runner_of(home / kind, **options)))
        total, skips = 2 * (len(layers) - len(skipped)), skips + bool(skipped)
        wanted = (
            f"fp8kv: {total} of {total} KV scales in use, FP8 cache(, {len(skipped)} layers? in 16 bits)?"
        )
        wanted += f", fingerprint [0-9a-f]{{32}}{LARGEST}"
        wanted += "; (rank 0: )?the model is baked: 1.0 is right" * (kind == "baked")
        if not lines or not all(re.fullmatch(wanted, line) for line in lines):
            problems.append(f"{home.name} {kind}, {skipped} in 16 bits: {lines}")
    problems += [] if len(cases) == TIMES else [f"{len(cases)} starts"]
    report(
        out, problems, f"{len(cases)} starts, {skips} with layers in 16 bits, {len(served)} served: no alarm"
    )


if __name__ == "__main__":
    {"spoiled": check_spoiled, "clean": check_clean}[sys.argv[1]](Path(sys.argv[2]))
