"""`--until 0.05 --headroom auto` beside the whole run: tokens read, cover, KL on held-out text.

SmolLM2 in float32. KL is of 24 documents that none of them has read, paired.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine, scratch_and_output, write_result

from calib.data import load_data
from calib.evaluate.measure import compare_variants
from calib.evaluate.statistics import estimate
from calib.evaluate.variants import Setup, Variant
from calib.job import run
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import Recipe, load_recipe
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_scales, load_stats

MODEL = "builtin:smollm2"
SAMPLES, HELD_OUT = 139, 24
GIVEN = {
    "device": "cpu",
    "dtype": "float32",
    "data.dataset": "builtin:python-docs",
    "data.seq_len": 512,
    "export.weights": "none",
}
UNTIL = {"data.until": 0.05, "headroom": "auto"}
# derived from the statistics of the whole run, and compared with its plain scales
DERIVED: dict[str, dict[str, Any]] = {
    "whole": {},
    "auto": {"headroom": "auto"},
}


def main() -> None:
    """Measure, print, write the JSON."""
    args = scratch_and_output(__doc__, "cover_until")
    result = {
        "machine": machine(),
        "model": MODEL,
        "cover": cover(args.scratch),
        "kl": divergences(args.scratch),
    }
    print(json.dumps(result, indent=2))
    write_result(args.output, result)


def calibrated(output: Path, samples: int, asked: dict[str, Any]) -> Path:
    """Run the job on the first `samples`, or on fewer if that is asked."""
    recipe = load_recipe(None, {**GIVEN, "data.samples": samples, **asked})
    run(MODEL, recipe, output, overwrite=True)
    return output


def cover(scratch: Path) -> dict[str, Any]:
    """How much of the whole run's amax the scales of a part hold, in each layer."""
    until = calibrated(scratch / "all-until", SAMPLES, UNTIL)
    whole = calibrated(scratch / "all", SAMPLES, {})
    found, held = load_stats(whole), load_scales(until)
    covers = [
        min(
            float((held.layers[name].k * 448 / layer.k.amax.max()).min()),
            float((held.layers[name].v * 448 / layer.v.amax.max()).min()),
        )
        for name, layer in found.layers.items()
    ]
    tokens = load_stats(until).tokens
    return {
        "tokens": tokens,
        "share_read": tokens / found.tokens,
        "layers_covered": float(np.mean([x >= 1 for x in covers])),
        "least_cover": min(covers),
        "said": json.loads((until / "fp8kv_calibration.json").read_text())["expected"],
    }


@torch.inference_mode()
def divergences(scratch: Path) -> dict[str, Any]:
    """KL of each kind of scales, and by how much it is higher than the whole run's."""
    seen = SAMPLES - HELD_OUT
    whole = load_stats(calibrated(scratch / "most", seen, {}))
    kinds = {name: derive_scales(whole, load_recipe(None, GIVEN | asked)) for name, asked in DERIVED.items()}
    kinds["until"] = load_scales(calibrated(scratch / "most-until", seen, UNTIL))
    kinds["16 samples"] = load_scales(calibrated(scratch / "few", 16, {}))
    recipe = load_recipe(None, {**GIVEN, "data.samples": SAMPLES})
    variants = [Variant(name, name, "given", scales) for name, scales in kinds.items()]
    found: dict[str, list[Any]] = {name: [] for name in kinds}
    setup, documents = _opened(recipe)
    for token_ids in documents[-HELD_OUT:]:
        measured = compare_variants(setup, torch.tensor(token_ids), variants)
        for name, each in found.items():
            each.append(measured[name].kl.double().numpy())
    plain = found["whole"]
    return {
        name: {
            "kl": estimate(each).model_dump(),
            "more_than_whole": estimate([a - b for a, b in zip(each, plain, strict=True)]).model_dump(),
        }
        for name, each in found.items()
    }


def _opened(recipe: Recipe) -> tuple[Setup, list[list[int]]]:
    checkpoint = find_model(MODEL)
    config = load_config(checkpoint)
    loaded = load_model(checkpoint, config, recipe.dtype, recipe.device)
    tokenizer = load_tokenizer(checkpoint)
    return Setup(loaded, tokenizer), load_data(recipe.data, tokenizer, lambda: loaded).samples


if __name__ == "__main__":
    main()
