"""How many prompts tell an INT8 cache from FP8 at scale 1.0: by the margin, or by found and not found?

A prompt is a document with 16 questions; both caches and the model's own read the same prompts. For each
score: FP8 less INT8, mean over all questions with its interval over prompts; the share of draws of n prompts
whose interval leaves out 0; and how many prompts four draws of five would need, by the usual formula of
normal means. Where no difference is seen, that is for the largest one in the interval.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, write_result
from numpy.typing import NDArray

from calib.choices import REFERENCE
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.statistics import estimate, ratio
from calib.evaluate.summarize import summarize
from calib.recipe import load_recipe

MODEL, FP8, INT8 = "builtin:smollm2", "none", "int8_per_token_head"
_Z2 = (1.96 + 0.84) ** 2  # of an interval of 95 % that a difference is seen in with power .8
_DRAWS = 400
Scores = NDArray[np.float64]  # [prompts, questions]


def main() -> None:
    """Measure, count, write the JSON."""
    args, facts = _arguments(), machine()
    choices = {"data.dataset": "builtin:python-docs", "dtype": "float32"}
    recipe = load_recipe(None, choices | {"evaluation.caches": (INT8,), "evaluation.variants": (FP8,)})
    suite = Suite(12, 2, 256, 0, 0, (), (), 0, args.tokens, args.prompts)
    evaluation = evaluate(MODEL, recipe, suite=suite)
    margins = {
        name: np.stack([document.margins.numpy() for document in evaluation.measured[name].long_documents])
        for name in (REFERENCE, FP8, INT8)
    }
    own, fp8, int8 = margins.values()
    scores = {
        "margin": fp8 - int8,
        "how far the margin moved": np.abs(fp8 - own) - np.abs(int8 - own),
        "found": (fp8 > 0).astype(float) - (int8 > 0),
    }
    rows = summarize(evaluation).variants
    result: dict[str, Any] = {
        "machine": facts,
        "model": MODEL,
        "tokens": args.tokens,
        "prompts": len(own),
        "questions": own.size,
        "caches": {},
        "fp8_less_int8": {name: power(score) for name, score in scores.items()},
    }
    for name in margins:
        long = rows[name].long
        assert long is not None
        result["caches"][name] = long.model_dump(exclude={"kl_by_position"})
    write_result(args.output, result)
    for name, figures in result["fp8_less_int8"].items():
        print(name, figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=48)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "retrieval.json")
    return parser.parse_args()


def power(score: Scores) -> dict[str, Any]:
    """Return the difference, and how many prompts show it."""
    figure = estimate([*score])
    is_seen = figure.low > 0 or figure.high < 0
    size = abs(figure.value) if is_seen else max(abs(figure.low), abs(figure.high))
    spread = score.mean(1).var(ddof=1)
    rng = np.random.default_rng(0)
    shares = {}
    for prompts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48):
        if prompts <= len(score):
            draws = [score[rng.choice(len(score), prompts, replace=False)] for _ in range(_DRAWS)]
            shares[prompts] = float(np.mean([_is_told(draw) for draw in draws]))
    return {
        "difference": figure.model_dump(),
        "is_seen": is_seen,
        "prompts_needed": _Z2 * spread / size**2,
        "share_of_draws_that_tell": shares,
    }


def _is_told(score: Scores) -> bool:
    figure = ratio(score.sum(1), np.full(len(score), float(score.shape[1])))
    return figure.low > 0 or figure.high < 0


if __name__ == "__main__":
    main()
