"""What `fp8kv bake` does to a real model: an INT8 cache with even channels, FP8 without scales.

Held-out text of the full suite, float32. KL is against the model that was baked, with its own
cache; ratios are of the same documents, with an interval over these.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine, write_result
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from calib.caches.rounding import CacheRounding, rounding
from calib.caches.types import Layers
from calib.data import load_data
from calib.divergence import divergence
from calib.evaluate.inputs import SUITES
from calib.evaluate.statistics import Values, estimate, ratio
from calib.evaluate.variants import fp8_rounding
from calib.generate import unit_scales
from calib.models.sources import builtin_model
from calib.recipe import load_recipe
from calib.scales.stats_file import load_scales
from fp8kv_runtime.hf import swap_attention

MODEL, DATASET = "builtin:smollm2", "builtin:python-docs"
SUITE = SUITES["full"]
# documents that the power in calib/rescale/factors.py was chosen on
CHOSEN_ON = 5


def main() -> None:
    """Calibrate, bake, measure, print, write the JSON."""
    args, facts = _arguments(), machine()
    scratch = args.scratch
    _calibrate(MODEL, scratch / "source-scales")
    _run("stress", MODEL, "-o", scratch / "twin", "--overwrite")
    _calibrate(scratch / "twin", scratch / "twin-scales")
    _bake("twin-scales", scratch / "twin", "twin-fp8", "fp8", scratch)
    _bake("source-scales", MODEL, "int8", "int8", scratch)
    kl = _measure(scratch)
    ratios = {
        "int8 baked / int8": ratio(*_sums(kl, "int8 baked", "int8")),
        "int8 baked / int8, on other documents": ratio(*_others(kl, "int8 baked", "int8")),
        "twin baked / calibrated": ratio(*_sums(kl, "twin baked, 1.0", "twin calibrated")),
    }
    found = {
        "machine": facts,
        "kl": {name: estimate(values).model_dump() for name, values in kl.items()},
        "ratios": {name: figure.model_dump() for name, figure in ratios.items()},
    }
    write_result(args.output, found)
    for name, figure in (found["kl"] | found["ratios"]).items():
        print(f"{name}: {figure['value']:.3g} [{figure['low']:.3g}, {figure['high']:.3g}]")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path("build/bake"))
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "bake.json")
    return parser.parse_args()


def _run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "calib", *map(str, arguments)], check=True)


def _calibrate(model: object, output: Path) -> None:
    samples = ("--samples", SUITE.calibration_samples, "--seq-len", SUITE.seq_len)
    flags = ("--strategy", "attn_head", "--dtype", "float32", "--format", "fp8kv", "--quiet")
    _run("calibrate", model, "--dataset", DATASET, *samples, *flags, "-o", output, "--overwrite")


def _bake(scales: str, model: object, output: str, purpose: str, scratch: Path) -> None:
    given = ("--scales", scratch / scales, "--for", purpose, "-o", scratch / output)
    _run("bake", model, *given, "--overwrite")


@torch.inference_mode()
def _measure(scratch: Path) -> dict[str, list[Values]]:
    """KL of every token by document, for each cache."""
    directory = builtin_model(MODEL)
    source = _model(directory)
    documents = list(_documents(source, AutoTokenizer.from_pretrained(directory)))
    expected = [_logits(source, each) for each in documents]
    twin_scales = fp8_rounding(load_scales(scratch / "twin-scales"))
    ones = fp8_rounding(unit_scales(source))
    int8 = rounding("int8_per_token_head", Layers({}, 0))
    caches: dict[str, tuple[Path, CacheRounding]] = {
        "int8": (directory, int8),
        "int8 baked": (scratch / "int8", int8),
        "twin calibrated": (scratch / "twin", twin_scales),
        "twin, 1.0": (scratch / "twin", ones),
        "twin baked, 1.0": (scratch / "twin-fp8", ones),
    }
    found = {}
    for name, (path, round_layer) in caches.items():
        model = _model(path)
        pairs = zip(documents, expected, strict=True)
        found[name] = [_kl(model, round_layer, each, reference) for each, reference in pairs]
    return found


def _model(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _documents(model: PreTrainedModel, tokenizer: Any) -> Iterator[Tensor]:
    """Load the documents of the suite, which nothing was calibrated on."""
    samples = SUITE.calibration_samples + SUITE.documents
    changes = {"data.dataset": DATASET, "data.samples": samples, "data.seq_len": SUITE.seq_len}
    data = load_data(load_recipe(None, changes).data, tokenizer, lambda: model)
    return map(torch.tensor, data.samples[SUITE.calibration_samples :])


def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens[None], past_key_values=DynamicCache()).logits[0]


def _kl(model: PreTrainedModel, round_layer: CacheRounding, tokens: Tensor, expected: Tensor) -> Values:
    def attend(
        original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        return original(module, query, *round_layer(module.layer_idx, key, value), *args, **kw)

    with swap_attention(model, attend):
        found = _logits(model, tokens)
    return divergence(expected, found).numpy()


def _sums(kl: dict[str, list[Values]], *names: str) -> Iterator[Values]:
    return (np.array([each.sum() for each in kl[name]]) for name in names)


def _others(kl: dict[str, list[Values]], *names: str) -> Iterator[Values]:
    """Return sums of the documents that no power was chosen on."""
    return (sums[CHOSEN_ON:] for sums in _sums(kl, *names))


if __name__ == "__main__":
    main()
