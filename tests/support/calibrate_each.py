"""Calibrate several models in the same processes: a script for `torch.distributed.run`.

Arguments: pairs of a model and where its output goes.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from calib import job
from calib.capture.processes import joined_world
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
    with joined_world() as world:
        job.joined_world = lambda: nullcontext(world)  # processes meet once, for all models
        for model, output in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            job.run(model, load_recipe(None, RECIPE), Path(output))
