"""What engines' attention adds to an FP8 cache: `--attention` on a model and its stress twin.

4,096 held-out tokens, float32; KL is against the model with its own cache and attention. Ratios are
of the same documents, with an interval over these. The baked model, which is also what the twin
becomes, is served at scale 1.0, queries too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from caches import DATASET, MODEL, run_fp8kv, sums
from machine import machine, print_figures, scratch_and_output, write_result

from calib.choices import AttentionMode
from calib.evaluate.inputs import SUITES, whole_text_only
from calib.evaluate.run import evaluate
from calib.evaluate.statistics import ratio
from calib.evaluate.summarize import Evaluation, summarize
from calib.recipe import load_recipe

# Hopper's adds, one by one, would take hours
MODES: tuple[AttentionMode, ...] = tuple(m for m in get_args(AttentionMode) if "level" not in m)
# FlashAttention 3 alone takes a scale for each head
VARIANTS: dict[AttentionMode, tuple[str, ...]] = dict.fromkeys(MODES, ("none", "tensor"))
VARIANTS |= dict.fromkeys(("exact", "fa3"), ("none", "tensor", "attn_head", "qkv"))
BAKED = dict.fromkeys(("exact", "fa3", "vllm_triton_fp8"), ("none",))
SUITE = whole_text_only(replace(SUITES["quick"], documents=16, calibration_samples=24))


def main() -> None:
    """Make the models, measure, print; the JSON is written after every mode."""
    args, facts = scratch_and_output(__doc__, "engine_modes"), machine()
    twin = args.scratch / "twin"
    run_fp8kv("stress", MODEL, "-o", twin, "--overwrite")
    models: dict[str, tuple[object, dict[AttentionMode, tuple[str, ...]]]] = {
        "SmolLM2": (MODEL, VARIANTS),
        "its stress twin": (twin, VARIANTS),
        "SmolLM2, baked": (_baked(MODEL, args.scratch / "smollm2"), BAKED),
    }
    found: dict[str, Any] = {"machine": facts, "models": {}}
    for name, (model, modes) in models.items():
        measured: dict[str, Evaluation] = {}
        for mode, variants in modes.items():
            measured[mode] = _evaluate(model, mode, variants)
            found["models"][name] = figures(measured)
            write_result(args.output, found)
    print_figures(found["models"])


def _baked(model: object, scratch: Path) -> Path:
    """`model` as `fp8kv bake --for fp8` writes it, with scales from text that is not held out."""
    scales, baked = (scratch.with_name(f"{scratch.name}-{what}") for what in ("scales", "baked"))
    data = ("--dataset", DATASET, "--dtype", "float32", "--samples", 24, "--seq-len", 256)
    run_fp8kv("calibrate", model, *data, "--format", "fp8kv", "-o", scales, "--overwrite")
    run_fp8kv("bake", model, "--scales", scales, "--for", "fp8", "-o", baked, "--overwrite")
    return baked


def _evaluate(model: object, mode: AttentionMode, variants: tuple[str, ...]) -> Evaluation:
    choices = {"data.dataset": DATASET, "dtype": "float32", "evaluation.attention": mode}
    recipe = load_recipe(None, choices | {"evaluation.variants": variants})
    return evaluate(str(model), recipe, suite=SUITE)


def figures(measured: dict[str, Evaluation]) -> dict[str, Any]:
    """KL of every variant in every mode, and beside exact attention on the same documents."""
    rows = {
        (variant, mode): evaluation.measured[variant]
        for mode, evaluation in measured.items()
        for variant in VARIANTS["exact"]
        if variant in evaluation.measured
    }
    reports = {mode: summarize(evaluation) for mode, evaluation in measured.items()}
    kl = {f"{v}, {mode}": reports[mode].variants[v].kl.model_dump() for v, mode in rows}
    top1 = {f"{v}, {mode}": reports[mode].variants[v].top1.model_dump() for v, mode in rows}
    pairs = [(row, (row[0], "exact")) for row in rows if row[1] != "exact"]
    pairs += [(("qkv", mode), ("attn_head", mode)) for mode in ("exact", "fa3") if mode in measured]
    ratios = {
        f"{', '.join(one)} / {', '.join(other)}": ratio(sums(rows[one]), sums(rows[other])).model_dump()
        for one, other in pairs
        if {one, other} <= rows.keys()
    }
    return {"kl": kl, "top1": top1, "ratios": ratios, "noise_floor": reports["exact"].noise_floor}


if __name__ == "__main__":
    main()
