"""Memory that is held, free and allowed, and whether a model fits or goes layer by layer."""

import ctypes
import platform
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from calib.errors import InputError
from calib.model.checkpoint import Checkpoint
from calib.model.load import requested_dtype, uses_gpu
from calib.model.quantized import is_quantized
from calib.recipe import Recipe
from calib.text import parse_size, show_size

# the rest is for activations, statistics and whatever else runs on the machine
_SHARE = 0.9
_GROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def resolve_offload(checkpoint: Checkpoint, config: PreTrainedConfig, recipe: Recipe) -> Recipe:
    """Return `recipe` with `offload` either none or layerwise.

    `auto` is layerwise where the weights do not fit into `max_memory`, or into the memory that is
    free now, that of the GPUs included.

    Raises:
        InputError: `none` was asked for and the weights do not fit into `max_memory`, or the
            dataset needs the model in memory and it is not.
    """
    chosen = recipe.offload
    if chosen != "layerwise":
        needed = _weight_bytes(checkpoint, config, recipe)
        fits = _fits_memory(needed, recipe) and _fits_gpus(needed, recipe)
        if chosen == "none" and recipe.max_memory and not fits:
            raise InputError(
                f"the weights take {show_size(needed)}, too much for --max-memory "
                f"{recipe.max_memory} with --offload none; use --offload layerwise"
            )
        stays = chosen == "none" or is_quantized(config) or fits
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


def _weight_bytes(checkpoint: Checkpoint, config: PreTrainedConfig, recipe: Recipe) -> int:
    stored = sum((checkpoint.path / shard).stat().st_size for shard in checkpoint.shards)
    wanted, held = requested_dtype(recipe), config.dtype
    if not isinstance(wanted, torch.dtype) or not isinstance(held, torch.dtype) or wanted == held:
        return stored
    # converting needs both, the file being mapped into memory meanwhile
    return stored + stored * wanted.itemsize // held.itemsize


def _fits_memory(needed: int, recipe: Recipe) -> bool:
    # on their way to a GPU weights pass through mapped files, whose pages can be given back
    passes_through = uses_gpu(recipe) and not recipe.max_memory
    return passes_through or resident_bytes() + needed <= _SHARE * memory_limit(recipe)


def _fits_gpus(needed: int, recipe: Recipe) -> bool:
    if not uses_gpu(recipe):
        return True
    # one of several processes has a GPU of its own; one alone has them all
    alone = not torch.distributed.is_initialized()
    gpus = range(torch.cuda.device_count()) if alone else [torch.cuda.current_device()]
    return needed <= _SHARE * sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)


def resident_bytes() -> int:
    """Resident memory of this process: its own pages and the mapped ones that it has touched."""
    held: int = psutil.Process().memory_info().rss
    return held


def available_bytes() -> int:
    """What this process can still take: of the machine's memory, or of its container's limit."""
    machine: int = psutil.virtual_memory().available
    return max(0, min([machine, *_container_available()]))


def give_back_free() -> None:
    """Return freed memory to the system, which glibc would keep, in pieces too small for reuse."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _container_available() -> list[int]:
    group = _GROUP.read_text().partition("0::/")[2].strip()
    here = _CGROUPS / group
    # the limit may be set on any group above
    return [room for path in (here, *here.parents) if (room := _group_room(path)) is not None]


def _group_room(path: Path) -> int | None:
    try:
        limit = (path / "memory.max").read_text().strip()
        held = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    # cached files are given back when memory is short
    return None if limit == "max" else int(limit) - int(held["anon"])
