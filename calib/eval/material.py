"""Text of an evaluation: held-out documents, greedy continuations, passkeys."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from calib.eval.schema import Continuation, Suite
from calib.eval.variants import Setup
from calib.models.config import model_positions

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_ASK = "\nWhat is the pass key? The pass key is"


class Passkey(NamedTuple):
    """A prompt with a number hidden in it."""

    key: str
    prompt: Tensor  # [T]


class Material(NamedTuple):
    """Held-out documents, prompts to continue, passkeys to find."""

    documents: Sequence[Tensor]  # [T] each
    prompts: Sequence[Tensor]  # [T] each, all of one length
    new_tokens: int
    passkeys: Sequence[Passkey]
    layer_documents: Sequence[Tensor]  # those of the documents that per-layer errors are of
    long_documents: Sequence[Tensor]  # [T] each, read with what engines can load


def make_material(setup: Setup, held_out: Sequence[list[int]], suite: Suite) -> Material:
    """Make what `suite` reads of `held_out`, which are no longer than the model's positions."""
    documents = [torch.tensor(sample) for sample in held_out]
    prompt_len = max(1, suite.seq_len // 8)
    prompts = [d[:prompt_len] for d in documents if len(d) >= prompt_len][: suite.prompts]
    passkeys = make_passkeys(setup.tokenizer, suite)
    positions = model_positions(setup.model.config) or suite.long_tokens
    joined = torch.cat(documents)[: min(suite.long_tokens, positions)]
    long = [joined] if len(joined) > max(map(len, documents)) else []
    of_layers = documents[: suite.layer_documents]
    return Material(documents, prompts, suite.new_tokens, passkeys, of_layers, long)


def continue_greedily(setup: Setup, prompts: Sequence[Tensor], new: int) -> list[list[int]]:
    """Write `new` greedy tokens after each prompt [T]; all prompts have the same length."""
    ids = torch.stack(list(prompts)).to(setup.model.device)
    output = setup.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


def cut_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], same: int) -> Continuation:
    """Decode `ids`, cut after the first `same` tokens."""
    whole, start = tokenizer.decode(ids), tokenizer.decode(ids[:same])
    # a character of several tokens may be cut in two: it belongs to the rest
    start = start if whole.startswith(start) else start.rstrip("\ufffd")
    return Continuation(same_tokens=same, same=start, rest=whole.removeprefix(start))


def same_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the two first differ."""
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))


def make_passkeys(tokenizer: PreTrainedTokenizerBase, suite: Suite) -> list[Passkey]:
    """Make prompts of about the suite's lengths with a five-digit key at each of its depths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    lengths = [n for n in suite.passkey_tokens if n <= suite.seq_len]
    for length, depth in product(lengths, suite.passkey_depths):
        key = str(int(torch.randint(10_000, 99_999, (1,), generator=generator)))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key. "
        room = length - len(_ids(tokenizer, needle + _ASK))
        repeats = max(1, room // len(_ids(tokenizer, _FILLER)))
        before = round(repeats * depth)
        text = _FILLER * before + needle + _FILLER * (repeats - before) + _ASK
        found.append(Passkey(key, torch.tensor(_ids(tokenizer, text))))
    return found


def retrieve(setup: Setup, passkeys: Sequence[Passkey]) -> list[bool]:
    """Whether the model's continuation of each prompt starts with its key."""
    found: dict[int, bool] = {}
    for length in {len(passkey.prompt) for passkey in passkeys}:
        together = [i for i, passkey in enumerate(passkeys) if len(passkey.prompt) == length]
        new = max(len(_ids(setup.tokenizer, passkeys[i].key)) for i in together) + 2
        texts = continue_greedily(setup, [passkeys[i].prompt for i in together], new)
        for i, tokens in zip(together, texts, strict=True):
            found[i] = setup.tokenizer.decode(tokens).strip().startswith(passkeys[i].key)
    return [found[i] for i in range(len(passkeys))]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids
