"""Calibrate several models in the same processes: a script for `torch.distributed.run`.

Arguments: pairs of a model and where its output goes.
"""

import sys
from pathlib import Path

from calib.job import run
from calib.recipe import load_recipe

RECIPE = {
    "data.dataset": "random",
    "data.samples": 6,
    "data.seq_len": 24,
    "data.batch_size": 2,
    "device": "cpu",
    "observer.name": "mse",
    "export.formats": ("fp8kv",),
}

if __name__ == "__main__":
    for model, output in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run(model, load_recipe(None, RECIPE), Path(output))
