"""Models loaded from directories, in memory and layer by layer."""

import pytest

from calib.errors import InputError
from calib.layerwise.weights import load_skeleton
from calib.models.config import load_config
from calib.models.load import load_model
from calib.models.sources import find_model

LOADERS = (load_model, load_skeleton)


def load(directory, loader=load_model, *, dtype="auto", device="cpu"):
    checkpoint = find_model(str(directory))
    return loader(checkpoint, load_config(checkpoint), dtype, device)


def refused(directory, message, *, error=InputError, loaders=LOADERS, **options):
    for loader in loaders:
        with pytest.raises(error, match=message):
            load(directory, loader, **options)
