"""How far is `fp8kv recommend` from its bound: a bare forward for every variant and for the reference?

Everything runs in one process. A bare forward of the same tokens alternates with the passes of the
reference and of every variant, so that a machine that drifts slows all of them alike.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Cache

from calib import recommendation
from calib.evaluate import measure, run
from calib.evaluate.recommend import Wish
from calib.evaluate.variants import UNCHANGED, Setup, Variant
from calib.progress import SILENT
from calib.recipe import load_recipe

LIMIT = 1.3
_BARE = "bare forward"
_STEPS = {
    "open_inputs": "open",
    "_load_model_and_text": "load",
    "_calibrate": "calibrate",
    "_choose_variants": "choose variants",
    "_measure_variants": "measure",
    "summarize": "summarize",
}


class Stopwatch:
    """Seconds by stage: of all processors, and on the wall."""

    def __init__(self) -> None:
        self.cpu: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to `stage`."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[stage] += time.process_time() - cpu
        self.wall[stage] += time.perf_counter() - wall

    def wrap(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Return `function`, timed as a part of `stage`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.time(stage):
                return function(*args, **kwargs)

        return timed


def measure_stages(model: str, dataset: str) -> dict[str, Any]:
    """Run `recommend`; return seconds by stage, and how many times the bound they are in all."""
    watch, original, passes = Stopwatch(), measure._read, count()

    def read(setup: Setup, variant: Variant, token_ids: Tensor, cache: Cache) -> Tensor:
        bare_first = next(passes) % 2 == 0
        for is_bare in (bare_first, not bare_first):
            if is_bare:
                with watch.time(_BARE):
                    setup.model(input_ids=token_ids[None].to(setup.model.device), use_cache=False)
            else:
                kind = "reference" if variant is UNCHANGED else "variants"
                with watch.time(f"forward, {kind}"):
                    logits = original(setup, variant, token_ids, cache)
        return logits

    with ExitStack() as stack:
        for name, stage in _STEPS.items():
            module = recommendation if name == "summarize" else run
            stack.enter_context(patch.object(module, name, watch.wrap(getattr(module, name), stage)))
        stack.enter_context(patch.object(measure, "_read", read))
        for name, stage in (("ReferenceLogits", "softmax of the reference"), ("compare", "compare logits")):
            stack.enter_context(patch.object(measure, name, watch.wrap(getattr(measure, name), stage)))
        recipe = load_recipe(None, {"data.dataset": dataset})
        recommendation.run_recommendation(model, recipe, Wish(), progress=SILENT)
    return {clock: _ratios(seconds, next(passes)) for clock, seconds in vars(watch).items()}


def _ratios(seconds: Counter[str], passes: int) -> dict[str, Any]:
    """Relate the seconds of each stage to the bound, in which the bare forwards are all there is."""
    bound = seconds.pop(_BARE)
    seconds["measure"] -= bound
    total = sum(seconds[stage] for stage in _STEPS.values())
    parts = [stage for stage in seconds if stage not in _STEPS.values()]
    seconds["measure, the rest"] = seconds.pop("measure") - sum(seconds[part] for part in parts)
    return {"bound_s": bound, "passes": passes, "ratio": total / bound, "seconds": dict(seconds)}


def print_stages(result: dict[str, Any]) -> None:
    """Print a table of the stages, in shares of the bound."""
    table = Table("stage", "CPU, s", "of the bound", "wall, s", "of the bound")
    cpu, wall = result["cpu"], result["wall"]
    for stage in [*cpu["seconds"], None]:
        columns = []
        for clock in (cpu, wall):
            seconds = clock["seconds"][stage] if stage else clock["ratio"] * clock["bound_s"]
            columns += [f"{seconds:.1f}", f"{seconds / clock['bound_s']:.3f}"]
        table.add_row(stage or "in all", *columns)
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--dataset", default="builtin:python-docs")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print_stages(measure_stages(args.model, args.dataset))


if __name__ == "__main__":
    main()
