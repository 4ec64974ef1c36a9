"""Samples made without a dataset, by the model or by chance, to be compared with real text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calib.data.batches import resolve_batch_size
from calib.errors import InputError
from calib.models.load import check_token_ids, input_device
from calib.recipe import DataRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# samples in a row that ended at once; each costs a single token
MAX_EMPTY_SAMPLES = 200

# every setting that a model's own generation_config may use to bend its distribution
PLAIN_SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


def sample_from_model(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> list[list[int]]:
    """Let the model write each sample from BOS at temperature 1, up to `seq_len` tokens.

    Without a BOS token it starts from EOS, else from a random token. Samples that end at once are
    drawn again; a model that ends every one is refused. The caller's random state is left as it was.
    """
    from transformers import GenerationConfig

    eos = model.generation_config.eos_token_id
    ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    # what follows an end is cut off; the tokenizer's own padding may have no row in the embedding
    stop = {"max_new_tokens": recipe.seq_len - 1, "eos_token_id": sorted(ends) or None, "pad_token_id": 0}
    config = GenerationConfig(**stop, **PLAIN_SAMPLING)
    batch_size = resolve_batch_size(recipe, input_device(model).type)
    samples: list[list[int]] = []
    num_empty = 0
    # a model may be spread over several devices, and any of them may draw
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(gpus)):
        torch.manual_seed(recipe.seed)
        while len(samples) < recipe.samples:
            starts = _start_ids(min(batch_size, recipe.samples - len(samples)), tokenizer, model)
            mask = torch.ones_like(starts)
            rows = model.generate(starts, attention_mask=mask, generation_config=config).tolist()
            written = [row for row in rows if row[1] not in ends]
            for row in written:
                # position 0 starts the sample, and may be EOS itself
                end = next((i for i, token in enumerate(row) if i and token in ends), len(row))
                samples.append(row[: end + 1])
            num_empty = 0 if written else num_empty + len(rows)
            if num_empty >= MAX_EMPTY_SAMPLES:
                raise InputError(
                    "dataset 'self': the model ends every sample at its first token; use real "
                    "text, such as `--dataset builtin:python-docs`"
                )
    return samples


def sample_at_random(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> list[list[int]]:
    """Draw `seq_len` token ids per sample, each id of the vocabulary equally likely."""
    generator = torch.Generator().manual_seed(recipe.seed)
    shape = recipe.samples, recipe.seq_len
    samples: list[list[int]] = torch.randint(_num_ids(tokenizer, model), shape, generator=generator).tolist()
    return samples


def _start_ids(count: int, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Tensor:
    """Return the token that starts each sample, [count, 1]."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        return torch.randint(_num_ids(tokenizer, model), (count, 1)).to(input_device(model))
    check_token_ids([start], tokenizer, model)
    return torch.full((count, 1), start, device=input_device(model))


def _num_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    # embeddings may be padded beyond the vocabulary, and a tokenizer may know unused extra tokens
    return min(len(tokenizer), int(model.config.get_text_config().vocab_size))


# how to make samples from (recipe, tokenizer, model), and a warning about them
GENERATED: dict[str, tuple[Callable[..., list[list[int]]], str]] = {
    "self": (
        sample_from_model,
        "dataset 'self' is text that the model made up: it lacks what real prompts contain; "
        "it is there to be compared with real data",
    ),
    "random": (
        sample_at_random,
        "dataset 'random' is uniform random token ids, what vLLM's removed on-the-fly "
        "calibration used: they under-represent real text, so scales may come out wrong",
    ),
}
