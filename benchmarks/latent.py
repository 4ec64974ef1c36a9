"""FP8 caches of latents (MLA) on a real text model and its stress twin: 4,096 held-out tokens.

The model is SmolLM2 rewritten by latent_smollm2.py. KL is against the model with its own cache, in
float32; ratios are of the same documents, with an interval over these.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from caches import DATASET, MODEL, run_fp8kv, sums
from latent_smollm2 import write_latent_model
from machine import machine, print_figures, scratch_and_output, write_result

from calib.evaluate.inputs import SUITES, whole_text_only
from calib.evaluate.run import evaluate
from calib.evaluate.statistics import ratio
from calib.evaluate.summarize import Evaluation, summarize
from calib.models.sources import find_model
from calib.recipe import load_recipe

VARIANTS = ["none", "tensor", "mse", "e5m2", "k only", "v only"]
SUITE = whole_text_only(replace(SUITES["quick"], documents=16, calibration_samples=24))
PAIRS = (("tensor", "none"), ("fp8, baked", "none"), ("fp8, baked", "tensor"))


def main() -> None:
    """Write the models, measure, print, write the JSON."""
    args, facts = scratch_and_output(__doc__, "latent"), machine()
    model, twin = args.scratch / "latent", args.scratch / "twin"
    if not model.exists():
        write_latent_model(find_model(MODEL), model)
    run_fp8kv("stress", model, "-o", twin, "--overwrite")
    found: dict[str, Any] = {"machine": facts, "models": {}}
    models = (("latent SmolLM2", model, VARIANTS), ("its stress twin", twin, ["none", "tensor"]))
    for name, path, variants in models:
        found["models"][name] = figures(_evaluate(path, variants, ["all"]))
        write_result(args.output, found)
    scales, baked = args.scratch / "twin-scales", args.scratch / "twin-baked"
    data = ("--dataset", DATASET, "--dtype", "float32", "--samples", 24, "--seq-len", 256)
    run_fp8kv("calibrate", twin, *data, "--format", "fp8kv", "-o", scales, "--overwrite")
    run_fp8kv("bake", twin, "--scales", scales, "--for", "fp8", "-o", baked, "--overwrite")
    found["models"]["the twin, baked by the command"] = figures(_evaluate(baked, ["none"], []))
    write_result(args.output, found)
    print_figures(found["models"])


def _evaluate(model: Path, variants: list[str], caches: list[str]) -> Evaluation:
    choices = {"data.dataset": DATASET, "evaluation.caches": caches, "dtype": "float32"}
    recipe = load_recipe(None, choices | {"evaluation.variants": variants})
    return evaluate(str(model), recipe, suite=SUITE)


def figures(evaluation: Evaluation) -> dict[str, Any]:
    """KL of each row, bytes per token, and ratios of rows on the same documents."""
    report, measured = summarize(evaluation), evaluation.measured
    kl = {
        name: row.kl.model_dump() | {"bytes_per_token": row.bytes_per_token}
        for name, row in report.variants.items()
    }
    there = [pair for pair in PAIRS if measured.keys() >= {*pair}]
    ratios = {
        f"{one} / {other}": ratio(sums(measured[one]), sums(measured[other])).model_dump()
        for one, other in there
    }
    return {"kl": kl, "noise_floor": report.noise_floor, "ratios": ratios}


if __name__ == "__main__":
    main()
