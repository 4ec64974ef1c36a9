"""Model, samples and statistics of an evaluation."""

import platform
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calib.data import CalibrationData, load_data, make_batches, resolve_batch_size
from calib.eval.given import samples_seen
from calib.eval.material import Material, make_material
from calib.eval.schema import Data, Suite
from calib.measure.loop import calibrate
from calib.model.devices import check_token_ids
from calib.model.load import model_positions
from calib.recipe import DataRecipe, ObserverRecipe, Recipe
from calib.scales.stats import KVStats

_RANDOM_SAMPLES = 4
_CPU_INFO = Path("/proc/cpuinfo")


def evaluation_recipe(recipe: Recipe, suite: Suite) -> Recipe:
    """Complete `recipe`: the suite's lengths, and all statistics that a variant may need."""
    data, other = recipe.data, recipe.evaluation.dataset
    if other is not None and other != data.dataset:
        data = DataRecipe(dataset=other, seed=data.seed)
    samples = suite.calibration_samples + suite.documents
    data = data.model_copy(update={"samples": samples, "seq_len": suite.seq_len})
    observer = ObserverRecipe(name="mse")  # its histogram is for a variant
    changes = {"data": data, "means": True, "targets": "qkv", "observer": observer}
    on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    if recipe.dtype == "auto" and on_cpu:
        # rounding activations to bfloat16 would hide most of what the cache changes
        changes["dtype"] = "float32"
    return recipe.model_copy(update=changes)


def load_material(
    recipe: Recipe,
    suite: Suite,
    scales: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
) -> tuple[CalibrationData, Material, list[str]]:
    """Load samples to calibrate on, and cut what is measured from those that no scale has seen."""
    seen, warnings = samples_seen(scales, recipe.data)
    samples = max(seen, suite.calibration_samples) + suite.documents
    wanted = recipe.data.model_copy(update={"samples": samples})
    data, positions = load_data(wanted, tokenizer, lambda: model), model_positions(model.config)
    material = make_material(tokenizer, data.samples, suite, seen=seen, positions=positions)
    check_token_ids(chain(*data.samples, material.passkey_ids), tokenizer, model)
    return data, material, warnings


def calibrate_on(
    model: PreTrainedModel, samples: Sequence[Sequence[int]], recipe: Recipe
) -> KVStats:
    """Statistics of `samples`."""
    batch_size = resolve_batch_size(recipe.data, model.device.type)
    return calibrate(model, make_batches(samples, batch_size, pad_id=0), recipe)


def calibrate_on_random_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> KVStats:
    """Statistics of random token ids."""
    data = recipe.data.model_copy(update={"dataset": "random", "samples": _RANDOM_SAMPLES})
    return calibrate_on(model, load_data(data, tokenizer, lambda: model).samples, recipe)


def describe(data: CalibrationData, material: Material, calibration_tokens: int) -> Data:
    """The text that is measured on, for the report."""
    documents = material.documents
    return Data(
        source=data.source,
        fingerprint=data.fingerprint,
        calibration_tokens=calibration_tokens,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        layer_documents=min(material.layer_documents, len(documents)),
        new_tokens=material.new_tokens,
    )


def machine(device: str) -> str:
    """Name of the GPU or CPU behind torch's `device`."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    # Linux alone leaves `platform.processor()` empty, or says no more than x86_64
    text = _CPU_INFO.read_text(errors="replace") if _CPU_INFO.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()
