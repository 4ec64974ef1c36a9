"""From transformers' module names to the names in the checkpoint, which engines map themselves."""

from calib.errors import UnsupportedExportError
from calib.model.checkpoint import Checkpoint
from calib.scales.scales import KVScales, LayerScales


def by_prefix(scales: KVScales, checkpoint: Checkpoint) -> dict[str, LayerScales]:
    """The scales of all modules that engines ask about, by prefix of their names on disk.

    Raises:
        UnsupportedExportError: see `checkpoint_prefix`.
    """
    layers = scales.with_shared().items()
    return {checkpoint_prefix(module, checkpoint): layer for module, layer in layers}


def checkpoint_prefix(module: str, checkpoint: Checkpoint) -> str:
    """Find the prefix of an attention module's tensors in the checkpoint.

    The two differ where transformers renames on load: `model.language_model.layers.0.self_attn`
    for `language_model.model.layers.0.self_attn`. The prefix must end as the module does and share
    the most name parts with it, so that a vision tower's layer 0 is never taken for the text's.

    Raises:
        UnsupportedExportError: no prefix fits, or several fit equally well.
    """
    prefixes = _prefixes(checkpoint)
    if module in prefixes:
        return module
    ranked = sorted(((_likeness(module, prefix), prefix) for prefix in prefixes), reverse=True)
    if not ranked or ranked[0][0][0] < _TAIL or ranked[0][0] == ranked[min(1, len(ranked) - 1)][0]:
        raise UnsupportedExportError(
            f"cannot tell which tensors of '{checkpoint.path}' belong to {module}; "
            "its names match no layer of the loaded model"
        )
    return ranked[0][1]


# layers, index and the attention module itself must agree
_TAIL = 3


def _prefixes(checkpoint: Checkpoint) -> set[str]:
    # k_proj.weight and the like: the attention module is two levels above the tensor
    return {name.rsplit(".", 2)[0] for name in checkpoint.weight_map if name.count(".") >= _TAIL}


def _likeness(module: str, prefix: str) -> tuple[int, int]:
    parts, others = module.split("."), prefix.split(".")
    tail = 0
    while tail < min(len(parts), len(others)) and parts[-1 - tail] == others[-1 - tail]:
        tail += 1
    return tail, len(set(parts) & set(others))
