"""Load every hand-made directory with real vLLM; compare what it holds with what we predict.

check_verify.py             exit 0 if `fp8kv verify` is right about every one
check_verify.py --only DIR  the same of the checkpoints in DIR, every one of which must load
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from engine import ONE_GPU, Place, installed_engine, load
from scale_cases import CASES, PLACES, write_case

from calib.engines.simulate_loading import Simulation, simulate
from calib.files.cache_type import is_for_nvfp4
from calib.files.model_directory import open_model_directory

Held = dict[str, list[float]]  # "attention module, letter" -> scales, of one rank or of all
RANK = "--rank"
# what other tools wrote
GOLDEN = {
    f"{path.parent.parent.name}, {path.parent.name}": path.parent
    for path in sorted(Path(__file__).parents[1].glob("golden/*-*/*/config.json"))
}
# vLLM has no kernel for FP8 weights on every CPU, and none for NVFP4 weights
_WEIGHTS = ("fp8-kv", "fp8-nvfp4-kv", "nvfp4")


def held_by_vllm(directory: Path, place: Place, rank: int) -> Held | str:
    """The scales of each attention module as vLLM leaves them on a rank, or why it refused."""
    from vllm.model_executor.layers.attention import Attention

    try:
        cache = "nvfp4" if is_for_nvfp4(open_model_directory(directory, weights=False)) else "fp8"
        model = load(directory, place, rank, kv_cache_dtype=cache)
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return {
        f"{module.layer_name.removesuffix('.attn')} {letter}": getattr(module, f"_{letter}_scale")
        .flatten()
        .tolist()
        for module in model.modules()
        if isinstance(module, Attention)
        for letter in "kvq"
    }


def held_by_all(directories: Sequence[Path], place: Place) -> list[Held | str]:
    """The same of several directories, every rank in a process of its own."""
    if place.ranks == 1:
        # two processes share the work
        halves = [directories[::2], directories[1::2]]
        started = [_start(half, place, 0) for half in halves]
        first, second = map(_finish, started)
        return [held for pair in zip_longest(first, second) for held in pair][: len(directories)]
    with tempfile.TemporaryDirectory() as meeting:
        started = [_start(directories, place, rank, f"{meeting}/rendezvous") for rank in range(place.ranks)]
        return [_together(ranks) for ranks in zip(*map(_finish, started), strict=True)]


def _start(directories: Sequence[Path], place: Place, rank: int, meeting: str = "") -> subprocess.Popen[str]:
    arguments = [RANK, str(rank), str(place.ranks), str(int(place.fnuz)), *directories]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RENDEZVOUS": meeting}
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


def _finish(process: subprocess.Popen[str]) -> list[Held | str]:
    return json.loads(process.communicate()[0].splitlines()[-1])


def _together(ranks: Sequence[Held | str]) -> Held | str:
    refused = next((held for held in ranks if isinstance(held, str)), None)
    if refused is not None:
        return refused
    return {name: [value for held in ranks for value in held[name]] for name in ranks[0]}


def difference(predicted: Simulation, held: Held | str) -> str | None:
    """What the prediction has wrong; None if nothing."""
    if isinstance(held, str) or predicted.refused:
        same = isinstance(held, str) == bool(predicted.refused)
        return None if same else f"predicted {predicted.refused or 'loading'}, the engine: {held}"
    for outcome in predicted.outcomes:
        values = held[f"{outcome.module} {outcome.letter}"]
        wanted = list(outcome.values) * (len(values) // len(outcome.values))
        pairs = zip(wanted, values, strict=True)
        if not all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs):
            return f"{outcome.module} {outcome.letter}: predicted {wanted}, the engine holds {values}"
    return None


def check(directories: Mapping[str, Path], place: Place, *, must_load: bool = False) -> list[bool]:
    """Check directories in one place and print a line for each."""
    rules = installed_engine()
    right = []
    all_held = held_by_all([*directories.values()], place)
    for (name, path), held in zip(directories.items(), all_held, strict=True):
        predicted = simulate(open_model_directory(path, weights=False), rules, place)
        wrong = difference(predicted, held)
        if must_load and not predicted.is_good:
            wrong = wrong or "it does not load every scale"
        seen = held if isinstance(held, str) else "loaded"
        print(f"{'WRONG' if wrong else 'OK'} {place}: {name}: {wrong or seen}", flush=True)
        right.append(wrong is None)
    return right


def check_cases() -> list[bool]:
    """Check what is made by hand and what other tools wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        made = {case.name: write_case(case, Path(scratch, str(i))) for i, case in enumerate(CASES)}
        golden = {name: path for name, path in GOLDEN.items() if path.name not in _WEIGHTS}
        right = check(made | golden, ONE_GPU)
        for place, names in PLACES:
            right += check({name: made[name] for name in names}, place)
    return right


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        rank, ranks, fnuz = map(int, sys.argv[2:5])
        place = Place(ranks, bool(fnuz))
        print(json.dumps([held_by_vllm(Path(path), place, rank) for path in sys.argv[5:]]))
        return
    if sys.argv[1:2] == ["--only"]:
        found = {path.name: path for path in sorted(Path(sys.argv[2]).iterdir())}
        right = check(found, ONE_GPU, must_load=True)
    else:
        right = check_cases()
    if not all(right):
        sys.exit(f"FAILED: {right.count(False)} of {len(right)} directories")
    print(f"OK: vLLM does what `fp8kv verify` predicts with {len(right)} directories")


if __name__ == "__main__":
    main()
