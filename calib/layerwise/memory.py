"""Memory that a process may take, whether a model fits, and how a pass over layers divides it."""

import ctypes
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from calib.capture.attention import AttentionMap
from calib.choices import DType, Offload
from calib.data import Batch
from calib.errors import InputError
from calib.files.model_directory import ModelDirectory
from calib.files.text import parse_size, show_size
from calib.layerwise.weights import Stages
from calib.models.config import layer_settings
from calib.models.load import requested_dtype, uses_gpu, weight_sources
from calib.models.quantized.detect import is_quantized
from calib.models.quantized.weights import split_weights
from calib.recipe import Recipe
from calib.scales.observers import NUM_BINS

# the rest is for activations, statistics and whatever else runs on the machine
_SHARE = 0.9
# tensors of a token's width alive at once inside a layer, measured on dense and on expert models
_COPIES = 3
_RESIDUALS = 4  # and of the hidden state and its norms
_GROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def resolve_offload(
    checkpoint: ModelDirectory, config: PreTrainedConfig, recipe: Recipe, *, resume: bool = False
) -> Offload:
    """Return `none` or `layerwise`, as `recipe` says; refuse what a pass layer by layer cannot do.

    `auto` is layerwise where the weights do not fit into `max_memory`, or into the memory that is
    free now, that of the GPUs included.
    """
    offload = recipe.offload
    if offload != "layerwise":
        needed, on_gpu = _weight_bytes(checkpoint, config, recipe.dtype), uses_gpu(recipe.device)
        fits = True
        # on their way to a GPU weights pass through mapped files, whose pages can be given back
        if not on_gpu or recipe.max_memory:
            fits = resident_bytes() + needed <= _SHARE * memory_limit(recipe.max_memory)
        if on_gpu:
            # one of several processes has a GPU of its own; one alone has them all
            alone = not torch.distributed.is_initialized()
            gpus = range(torch.cuda.device_count()) if alone else [torch.cuda.current_device()]
            fits &= needed <= _SHARE * sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
        if offload == "none" and recipe.max_memory and not fits:
            raise InputError(
                f"the weights take {show_size(needed)}, too much for --max-memory "
                f"{recipe.max_memory} with --offload none; use --offload layerwise"
            )
        offload = "none" if offload == "none" or is_quantized(config) or fits else "layerwise"
    problem = ""
    if offload == "layerwise" and recipe.data.dataset == "self":
        problem = (
            "dataset 'self' needs the model in memory, because the model writes the text; "
            "use real text, such as --dataset builtin:python-docs"
        )
    elif offload == "layerwise" and recipe.data.until is not None:
        problem = "--until: a pass layer by layer reads all text, and cannot stop early; leave --until away"
    elif offload == "layerwise" and resume:
        problem = "--resume: a pass layer by layer saves no progress; leave --resume away"
    if problem:
        raise InputError(f"{problem}, or use --offload none")
    return offload


def memory_limit(max_memory: str | None) -> int:
    """Return the bytes of resident memory that the process may take in all."""
    if max_memory:
        return parse_size(max_memory)
    return resident_bytes() + int(_SHARE * available_bytes())


def _weight_bytes(checkpoint: ModelDirectory, config: PreTrainedConfig, dtype: DType) -> int:
    if split_weights(checkpoint).label:
        return sum(source.nbytes for source in weight_sources(checkpoint, config, dtype).values())
    stored = sum((checkpoint.path / shard).stat().st_size for shard in checkpoint.shards)
    loaded, saved = requested_dtype(dtype), config.dtype
    if not isinstance(loaded, torch.dtype) or not isinstance(saved, torch.dtype) or loaded == saved:
        return stored
    # converting needs both, the file being mapped into memory meanwhile
    return stored + stored * loaded.itemsize // saved.itemsize


@dataclass(frozen=True)
class MemoryPlan:
    """A division of the memory that is left among the parts of a pass over the layers."""

    reads_ahead: bool  # whether the next layer is read while one computes
    hidden_bytes: int  # for what lies between two layers; more of it goes to disk
    ceiling: int  # resident bytes from which freed memory must be given back before a batch


def plan_memory(
    model: PreTrainedModel, stages: Stages, batches: Sequence[Batch], always: int, limit: int
) -> MemoryPlan:
    """Divide the memory that the process may still take: `limit` bytes, `always` of them taken.

    Refuse a limit under which one layer and one batch do not fit.
    """
    layers = [stage.tensors for stage in stages.layers]
    shapes = {batch.input_ids.shape for batch in batches}
    working = max(activation_bytes(model.config, model.dtype, layers, *shape) for shape in shapes)
    layer = max(stage.loaded_bytes for stage in stages.layers)
    converting = max(stage.converted_bytes for stage in stages.layers)
    embeddings = stages.embeddings.loaded_bytes
    always += stages.resident.nbytes

    def needed(layers: int) -> int:
        return always + max(embeddings, layers * layer + converting + working)

    if needed(1) > limit:
        enough = needed(1) * 21 // 20  # what is in use differs from run to run
        tokens = max(batch.input_ids.numel() for batch in batches)
        raise InputError(
            f"{show_size(limit)} of memory is too little: beside {show_size(always)} at any time, "
            f"one layer takes {show_size(layer + converting)} and a batch of {tokens} tokens "
            f"{show_size(working)}, the embeddings {show_size(embeddings)}; use --max-memory "
            f"{show_size(enough)} or more, or a smaller --batch-size"
        )
    reads_ahead = needed(2) <= limit
    return MemoryPlan(reads_ahead, limit - needed(1 + reads_ahead), limit - working // 4)


def statistics_bytes(attention: AttentionMap, recipe: Recipe) -> int:
    """Return the bytes of all histograms; other statistics are small beside them."""
    if not recipe.observer.needs_histogram:
        return 0
    modules = attention.cached.values()
    heads = sum(2 * m.num_kv_heads + m.num_heads * (recipe.targets == "qkv") for m in modules)
    return heads * NUM_BINS * torch.int64.itemsize


def activation_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    layers: Iterable[Mapping[str, Tensor]],
    rows: int,
    columns: int,
) -> int:
    """Estimate, on the safe side, the bytes of activations while the widest layer computes.

    `layers` has each layer's weights by name, of any shape; the batch has `rows` samples of `columns` tokens.
    """
    text = config.get_text_config(decoder=True)
    counts = layer_settings(config, "num_experts_per_tok")  # a list, where they differ in HunYuan's
    experts = max(max(n) if isinstance(n, list) else n or 1 for n in counts)
    width = max(sum(_width(*weight, experts) for weight in layer.items()) for layer in layers)
    width = _COPIES * width + _RESIDUALS * int(text.hidden_size)
    activations = rows * columns * width * dtype.itemsize
    # a mask per row; eager attention has its scores as float32 and as probabilities, per head
    heads = int(text.num_attention_heads) if text._attn_implementation == "eager" else 1
    return int(activations + rows * columns**2 * heads * (4 + 2 * dtype.itemsize))


def _width(name: str, weight: Tensor, experts: int) -> int:
    """Return the values per token that computing with `weight` makes."""
    if name.endswith("A_log"):
        return weight.numel()  # the state of every token, where Mamba has no kernel
    if weight.dim() == 2:
        return weight.shape[0]
    # fused experts [experts, ...], of which a token sees a few
    return max(weight.shape[1:]) * experts if weight.dim() == 3 else 0


def resident_bytes() -> int:
    """Return the resident memory of this process: its own pages and the mapped ones it has touched."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Return the bytes that this process can still take: of the machine, or of its container's limit."""
    rooms = [int(psutil.virtual_memory().available)]
    group = _CGROUPS / _GROUP.read_text().partition("0::/")[2].strip()
    for path in (group, *group.parents):  # the limit may be set on any group above
        try:
            limit = (path / "memory.max").read_text().strip()
            usage = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        except OSError:  # this group has no such files, as the root has none
            continue
        if limit != "max":
            rooms.append(int(limit) - int(usage["anon"]))  # cached files are dropped when memory is short
    return max(0, min(rooms))


def return_free_memory() -> None:
    """Return freed memory to the system, which glibc would keep, in pieces too small for reuse."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
