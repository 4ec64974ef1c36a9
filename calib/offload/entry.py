"""What a job calls: open a model whose weights stay in its checkpoint, and calibrate it."""

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from calib.data import Batch
from calib.errors import InputError
from calib.model.checkpoint import Checkpoint
from calib.offload.choice import memory_limit
from calib.offload.layerwise import LayerwiseModel, Step, calibrate_layerwise
from calib.offload.memory import resident_bytes
from calib.offload.probe import probe_layers, random_bytes
from calib.offload.shards import stored_tensors
from calib.offload.skeleton import execution_device
from calib.offload.stages import plan_stages
from calib.offload.weights import WeightLoader
from calib.progress import Progress
from calib.recipe import Recipe
from calib.scales.stats import KVStats
from calib.sizes import show_size


def open_layers(model: PreTrainedModel, checkpoint: Checkpoint, recipe: Recipe) -> LayerwiseModel:
    """Prove that `model`, made by `load_skeleton`, can run layer by layer, and find its weights.

    Raises:
        InputError: the memory is too small for a single layer.
        UnsupportedModelError: it cannot.
    """
    device = execution_device(recipe)
    _check_room(model, memory_limit(recipe))
    layout = probe_layers(model, device)
    mapping = get_model_conversion_mapping(model)
    stored = stored_tensors(checkpoint)
    stages = plan_stages(model, layout.layers, layout.unused, stored, mapping)
    return LayerwiseModel(model, device, layout, stages, WeightLoader(model, mapping, device))


def measure_layers(
    source: LayerwiseModel,
    batches: Sequence[Batch],
    recipe: Recipe,
    output: Path,
    progress: Progress,
) -> KVStats:
    """Calibrate layer by layer within the limits of `recipe`; see `calibrate_layerwise`."""

    def step(done: Step) -> None:
        progress.stage(done.label)
        progress.advance(done.batch.num_tokens / done.num_layers)

    return calibrate_layerwise(
        source,
        batches,
        recipe,
        limit=memory_limit(recipe),
        directory=scratch_directory(output),
        on_step=step,
    )


def scratch_directory(output: Path) -> Path:
    """Where hidden states go that do not fit in memory: TMPDIR where set, or beside `output`."""
    # the usual default, /tmp, is memory on many machines
    if os.environ.get("TMPDIR"):
        return Path(os.environ["TMPDIR"])
    return next(parent for parent in output.absolute().parents if parent.is_dir())


def _check_room(model: PreTrainedModel, limit: int) -> None:
    in_use, layer = resident_bytes(), random_bytes(model.get_decoder())
    if in_use + layer > limit:
        raise InputError(
            f"{show_size(limit)} of memory is too little: {show_size(in_use)} are in use and one "
            f"layer takes {show_size(layer)}, to which activations are added; use --max-memory "
            f"{show_size((in_use + layer) * 5 // 4)} or more"
        )
