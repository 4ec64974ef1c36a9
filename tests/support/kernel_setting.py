"""What tests of kernels run with: NaN in memory that no kernel has written, and small tiles."""

import json
import sys
from functools import partial

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_in_new_memory(monkeypatch):
    """What a launcher allocates and its kernel does not write is NaN, not whatever was there."""

    def filled(allocate, *args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if ".kernels." in caller and tensor.is_floating_point():
            tensor.fill_(torch.nan)
        return tensor

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(filled, getattr(torch, name)))


def table_of_small_tiles(directory):
    """Write a tuning table, for `FP8KV_TUNING`, with tiles of 32: short sequences have several."""
    decode = {"on": "interpreter", "head_dim": 256, "tile": 32, "num_warps": 4, "least": 1}
    rows, path = [decode | {"bits": bits} for bits in (8, 16)], directory / "small_tiles.json"
    path.write_text(json.dumps({"decode": rows, "extend": [row | {"pairs": 1} for row in rows]}))
    return path
