"""Whether a model is calibrated in memory or layer by layer, and within which limits."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from calib.checkpoint import Checkpoint
from calib.data import Batch
from calib.errors import InputError
from calib.model import forget_kv_only_quantization, requested_dtype, uses_gpu
from calib.offload.layerwise import LayerwiseModel, Step, calibrate_layerwise
from calib.offload.memory import available_bytes, resident_bytes
from calib.offload.sizes import parse_size, show_size
from calib.progress import Progress
from calib.recipe import Recipe
from calib.stats import KVStats

# the rest is for activations, statistics and whatever else runs on the machine
_SHARE = 0.9


def resolve_offload(checkpoint: Checkpoint, config: PreTrainedConfig, recipe: Recipe) -> Recipe:
    """Return `recipe` with `offload` either none or layerwise.

    `auto` is layerwise where the weights do not fit: into `max_memory`, where given, otherwise
    into the memory that is free now, and that of the GPUs where the model runs on those.

    Raises:
        InputError: `none` was asked for and the weights do not fit into `max_memory`, or the
            dataset needs the model in memory and it is not.
    """
    chosen = recipe.offload
    if chosen != "layerwise":
        needed = _weight_bytes(checkpoint, config, recipe)
        fits = resident_bytes() + needed <= _SHARE * memory_limit(recipe)
        if chosen == "none" and recipe.max_memory and not fits:
            raise InputError(
                f"the weights take {show_size(needed)}, too much for --max-memory "
                f"{recipe.max_memory} with --offload none; use --offload layerwise"
            )
        stays = chosen == "none" or _is_quantised(config) or (fits and _fits_gpus(needed, recipe))
        chosen = "none" if stays else "layerwise"
    if chosen == "layerwise" and recipe.data.dataset == "self":
        raise InputError(
            "dataset 'self' is text that the model writes, for which it must be in memory; "
            "use real text, such as --dataset builtin:python-docs, or --offload none"
        )
    return recipe.model_copy(update={"offload": chosen})


def memory_limit(recipe: Recipe) -> int:
    """Bytes of resident memory that the process may take in all."""
    if recipe.max_memory:
        return parse_size(recipe.max_memory)
    return resident_bytes() + int(_SHARE * available_bytes())


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

    directory = scratch_directory(output)
    limit = memory_limit(recipe)
    return calibrate_layerwise(
        source, batches, recipe, limit=limit, directory=directory, on_step=step
    )


def scratch_directory(output: Path) -> Path:
    """Where hidden states go that do not fit in memory: TMPDIR where set, or beside `output`."""
    # the usual default, /tmp, is memory on many machines
    if os.environ.get("TMPDIR"):
        return Path(os.environ["TMPDIR"])
    return next(parent for parent in output.absolute().parents if parent.is_dir())


def _weight_bytes(checkpoint: Checkpoint, config: PreTrainedConfig, recipe: Recipe) -> int:
    stored = sum((checkpoint.path / shard).stat().st_size for shard in checkpoint.shards)
    wanted, held = requested_dtype(recipe), config.dtype
    if not isinstance(wanted, torch.dtype) or not isinstance(held, torch.dtype) or wanted == held:
        return stored
    # converting needs both, the file being mapped into memory meanwhile
    return stored + stored * wanted.itemsize // held.itemsize


def _fits_gpus(needed: int, recipe: Recipe) -> bool:
    if not uses_gpu(recipe):
        return True
    free = (torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    return needed <= _SHARE * sum(free)


def _is_quantised(config: PreTrainedConfig) -> bool:
    forget_kv_only_quantization(config)
    return getattr(config, "quantization_config", None) is not None
