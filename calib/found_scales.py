"""Scales as they lie in a directory of any tool, by layer index, as tensors."""

from pathlib import Path

import torch
from torch import Tensor

from calib.files.directory import open_scales
from calib.files.layers import layers_of

# (layer_idx, "k" | "v" | "q") -> scale
Found = dict[tuple[int, str], Tensor]


def find_scales(directory: Path) -> Found:
    """The scales in `directory`, flat and unchecked.

    Raises:
        InputError: there are none, or a file cannot be read.
    """
    return {
        (layer.layer, letter): torch.tensor(values)
        for layer in layers_of(open_scales(directory))
        for letter in "kvq"
        if (values := getattr(layer, letter)) is not None
    }
