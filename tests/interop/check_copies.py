"""Spoil one copy after another of the scales that real vLLM holds; the plugin must name each.

check_copies.py DIR   exit 0 if the plugin says that all scales of DIR are in use, and 20 times,
                      with a copy of a random layer spoiled, which copy of which layer differs and
                      ends the server as FP8KV_REQUIRE_SCALES asks
"""

import logging
import os
import random
import re
import sys
from itertools import cycle, islice
from pathlib import Path

import torch
from engine import start
from outputs import read_output, report

from calib.files.names import layer_of
from calib.serving import plugin

TIMES = 20
# 1.0 is what was never filled; the others were filled from something else
SPOILED = (1.0, 2.0, 0.75)


def copies(letters: str) -> list[str]:
    """The names of what vLLM's attention layers hold; of Q there is none on the host."""
    kinds = {"k": ("", "_float", "_cpu"), "v": ("", "_float", "_cpu"), "q": ("", "_float")}
    return [f"_{x}_scale{kind}" for x in letters for kind in kinds[x]]


def start_with_plugin(directory: Path) -> tuple[object, str]:
    """The runner of an engine that holds `directory`, and what the plugin said as it loaded."""
    lines: list[str] = []
    logging.getLogger("vllm.fp8kv").addFilter(lambda r: lines.append(r.getMessage()) or True)
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    plugin.register_vllm()
    llm = start(directory)
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    return runner, lines[-1] if lines else "nothing"


def said_of(runner: object) -> str:
    """What the plugin says of a runner where it must end a server that drops scales."""
    try:
        plugin._guard("vllm", lambda: plugin._check_vllm(runner))
    except plugin.ScalesNotUsedError as error:
        return f"ends: {error}"
    return "goes on"


def spoil(layer: torch.nn.Module, copy: str, value: float) -> None:
    """Change one copy of a scale: 1.0, or the scale times another value."""
    held = getattr(layer, copy)
    spoiled = held * 0 + value if value == 1.0 else held * value
    setattr(layer, copy, spoiled)


def main() -> None:
    """Load, spoil and mend."""
    directory = Path(sys.argv[1])
    scales = read_output(directory).scales
    letters = "kvq" if any("q" in layer for layer in scales.values()) else "kv"
    total = 2 * len(scales)
    good = f"fp8kv: {total} of {total} KV scales in use, FP8 cache"
    runner, line = start_with_plugin(directory)
    problems = [] if line == good else [f"untouched: {line}"]
    os.environ["FP8KV_REQUIRE_SCALES"] = "1"
    layers = {
        layer_of(module.layer_name): module
        for module in runner.model.modules()
        if hasattr(module, "_k_scale")
    }
    chance = random.Random(0)
    named = 0
    for i, copy in enumerate(islice(cycle(copies(letters)), TIMES)):
        index = chance.choice(sorted(layers))
        held = getattr(layers[index], copy)
        spoil(layers[index], copy, SPOILED[i % len(SPOILED)])
        line = said_of(runner)
        setattr(layers[index], copy, held)
        used = total if copy[1] == "q" else total - 1
        start_of_line = f"ends: fp8kv: {used} of {total} KV scales in use, FP8 cache; "
        of_copy = f"{copy[1].upper()}'s copy {copy} is [^;]* in layer {index}"
        if re.fullmatch(re.escape(start_of_line) + of_copy, line):
            named += 1
        else:
            problems.append(f"{copy} of layer {index}: {line}")
    if (line := said_of(runner)) != "goes on":
        problems.append(f"mended: {line}")
    report(directory, problems, f"{good!r}; {named} of {TIMES} spoiled copies are named")


if __name__ == "__main__":
    main()
