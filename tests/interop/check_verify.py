"""Load every hand-made directory with real vLLM; compare what it holds with what we predict.

check_verify.py          exit 0 if `fp8kv verify` is right about every one
"""

import math
import sys
import tempfile
from pathlib import Path

from engine import load
from scale_cases import CASES, Case, write_case

sys.path.insert(0, str(Path(__file__).parents[2]))  # our package: what is used of it needs no torch

from calib.engines.rules import choose_rules
from calib.engines.simulate import Simulation, simulate
from calib.files.directory import open_scales

Held = dict[tuple[str, str], list[float]]


def held_by_vllm(directory: Path) -> Held | str:
    """The scales of each attention module as vLLM leaves them, or why it refused."""
    from vllm.model_executor.layers.attention import Attention

    try:
        model = load(directory, kv_cache_dtype="fp8")
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return {
        (module.layer_name.removesuffix(".attn"), letter): getattr(module, f"_{letter}_scale")
        .flatten()
        .tolist()
        for module in model.modules()
        if isinstance(module, Attention)
        for letter in "kvq"
    }


def difference(predicted: Simulation, held: Held | str) -> str | None:
    """What the prediction has wrong; None if nothing."""
    if isinstance(held, str) or predicted.refused:
        same = isinstance(held, str) == bool(predicted.refused)
        return None if same else f"predicted {predicted.refused or 'loading'}, vLLM: {held}"
    for outcome in predicted.outcomes:
        values = held[outcome.module, outcome.letter]
        wanted = list(outcome.values) * (len(values) // len(outcome.values))
        pairs = zip(wanted, values, strict=True)
        if not all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs):
            return f"{outcome.module} {outcome.letter}: predicted {wanted}, vLLM holds {values}"
    return None


def check(case: Case, directory: Path) -> bool:
    """Check one directory and print a line."""
    write_case(case, directory)
    held = held_by_vllm(directory)
    wrong = difference(simulate(open_scales(directory), choose_rules("vllm", None)[0]), held)
    seen = held if isinstance(held, str) else "loaded"
    print(f"{'WRONG' if wrong else 'OK'} {case.name}: {wrong or seen}", flush=True)
    return wrong is None


def main() -> None:
    chosen = [case for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        right = [check(case, Path(scratch, str(i))) for i, case in enumerate(chosen)]
    if not all(right):
        sys.exit(f"FAILED: {right.count(False)} of {len(right)} directories")
    print(f"OK: vLLM does what `fp8kv verify` predicts with {len(right)} directories")


if __name__ == "__main__":
    main()
