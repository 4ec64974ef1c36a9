"""Tiny models on disk in several shards, calibrated in memory and layer by layer."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import one_thread  # noqa: F401  for all tests here

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.layerwise.loop import calibrate_layerwise, open_layers
from calib.layerwise.weights import load_skeleton
from calib.models.config import load_config
from calib.models.load import load_model
from calib.models.sources import find_model
from calib.recipe import load_recipe

GENERATOR = torch.Generator().manual_seed(1)
SAMPLES = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in (24, 23, 23, 11, 7)]


@dataclass
class Saved:
    """A model directory, calibrated as a test asks."""

    path: Path
    scratch: Path

    def recipe(self, **changes):
        return load_recipe(None, {"device": "cpu", **changes})

    def batches(self, samples=SAMPLES, size=2):
        return make_batches(samples, size, pad_id=0)

    def in_memory(self, recipe, batches):
        checkpoint = find_model(str(self.path))
        model = load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
        return calibrate(model, batches, recipe)

    def open(self, recipe):
        checkpoint = find_model(str(self.path))
        skeleton = load_skeleton(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
        return open_layers(skeleton, checkpoint, recipe)

    def by_layer(self, recipe, batches, limit=1 << 40, **options):
        source = self.open(recipe)
        self.scratch.mkdir(exist_ok=True)
        return calibrate_layerwise(source, batches, recipe, limit=limit, directory=self.scratch, **options)

    def check(self, recipe, batches):
        """Both ways agree in every bit; return the statistics."""
        found, expected = self.by_layer(recipe, batches), self.in_memory(recipe, batches)
        assert (found.shared, found.counts()) == (expected.shared, expected.counts())
        assert bits(found) == bits(expected)
        return found


def bits(stats):
    return {name: (x.dtype, x.shape, x.numpy().tobytes()) for name, x in stats.tensors().items()}


@pytest.fixture
def saved_at(tmp_path):
    return lambda directory: Saved(directory, tmp_path / "scratch")


@pytest.fixture
def save(saved_at, tmp_path):
    def save(model):
        model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
        return saved_at(tmp_path / "model")

    return save


@pytest.fixture
def llama(save, tiny_llama):
    return save(tiny_llama)
