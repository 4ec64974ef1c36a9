"""The one workload of both benchmarks: SmolLM2-135M in bfloat16 over Python's own documentation."""

from dataclasses import dataclass
from pathlib import Path

import torch
from random_model import random_model
from transformers import AutoConfig, PreTrainedModel

from calib.choices import ObserverName
from calib.data import Batch, CalibrationData, load_data, make_batches, resolve_batch_size
from calib.files.model_directory import ModelDirectory
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import DataRecipe, ObserverRecipe, Recipe

MODEL = "builtin:smollm2"
DATASET = "builtin:python-docs"
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Workload:
    """A model in memory and what it shall read."""

    model: PreTrainedModel
    batches: list[Batch]

    @property
    def tokens(self) -> int:
        """Real tokens in all batches, without padding."""
        return sum(batch.num_tokens for batch in self.batches)


def make_recipe(samples: int, seq_len: int, observer: ObserverName = "absmax", device: str = "cpu") -> Recipe:
    """Return the recipe that differs from our defaults in data, dtype and observer only."""
    return Recipe(
        observer=ObserverRecipe(name=observer),
        device=device,
        dtype=DTYPE,
        data=DataRecipe(dataset=DATASET, samples=samples, seq_len=seq_len),
    )


def load_documents(checkpoint: ModelDirectory, recipe: Recipe) -> CalibrationData:
    """Read and tokenise the documents, in the order in which our job reads them."""
    tokenizer = load_tokenizer(checkpoint)
    return load_data(recipe.data, tokenizer, lambda: _model(checkpoint, recipe))


def load_workload(samples: int, seq_len: int, threads: int) -> Workload:
    """Load model and documents, in batches of the size that our job picks."""
    torch.set_num_threads(threads)
    recipe = make_recipe(samples, seq_len)
    checkpoint = find_model(MODEL)
    data = load_documents(checkpoint, recipe)
    batch_size = resolve_batch_size(recipe.data, "cpu")
    batches = make_batches(data.samples, batch_size, pad_id=0)
    return Workload(_model(checkpoint, recipe), batches)


def random_workload(config: Path, samples: int, seq_len: int) -> Workload:
    """Return a model of this shape and tokens, both random; on a CPU only a small one of its kind."""
    gpu = torch.cuda.is_available()
    model = random_model(AutoConfig.from_pretrained(config), small=not gpu)
    tokens = torch.randint(0, model.config.vocab_size, (samples, seq_len)).tolist()
    batch_size = resolve_batch_size(make_recipe(samples, seq_len).data, "cuda" if gpu else "cpu")
    return Workload(model, make_batches(tokens, batch_size, pad_id=0))


def _model(checkpoint: ModelDirectory, recipe: Recipe) -> PreTrainedModel:
    return load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
