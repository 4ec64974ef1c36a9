"""Greedy text: how long it is the reference's, and whether it finds a passkey."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
_ASK = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Passkey:
    """A prompt with a number hidden in it."""

    tokens: int  # length of the prompt
    depth: float  # 0: at the start, 1: at the end
    key: str
    prompt: Tensor  # [T]


def continue_greedily(
    model: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int
) -> list[list[int]]:
    """`new_tokens` greedy tokens after each prompt [T]; all prompts have the same length."""
    ids = torch.stack(list(prompts)).to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


@dataclass(frozen=True)
class Continuation:
    """Greedy text after a prompt, cut where it leaves the reference's."""

    same: str
    rest: str  # empty: all of it is the reference's


def split_texts(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[Sequence[int]], same: Sequence[int]
) -> list[Continuation]:
    """The texts of `token_ids`, the first `same` tokens of each apart from the rest."""
    found = []
    for ids, count in zip(token_ids, same, strict=True):
        whole, start = tokenizer.decode(ids), tokenizer.decode(ids[:count])
        # a character of several tokens may be cut in two: it belongs to the rest
        start = start if whole.startswith(start) else start.rstrip("\ufffd")
        found.append(Continuation(start, whole.removeprefix(start)))
    return found


def same_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the two first differ."""
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))


def make_passkeys(
    tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], depths: Sequence[float]
) -> list[Passkey]:
    """Prompts of about `lengths` tokens with a five-digit key at each of `depths`."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        for depth in depths:
            key = str(int(torch.randint(10_000, 99_999, (1,), generator=generator)))
            needle = f"The pass key is {key}. Remember it. {key} is the pass key. "
            room = length - len(_ids(tokenizer, needle + _ASK))
            repeats = max(1, room // len(_ids(tokenizer, _FILLER)))
            before = round(repeats * depth)
            text = _FILLER * before + needle + _FILLER * (repeats - before) + _ASK
            ids = torch.tensor(_ids(tokenizer, text))
            found.append(Passkey(len(ids), depth, key, ids))
    return found


def retrieve(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passkeys: Sequence[Passkey]
) -> list[bool]:
    """Whether the model's continuation of each prompt starts with its key."""
    found: dict[int, bool] = {}
    for length in {passkey.tokens for passkey in passkeys}:
        together = [i for i, passkey in enumerate(passkeys) if passkey.tokens == length]
        new = max(len(_ids(tokenizer, passkeys[i].key)) for i in together) + 2
        texts = continue_greedily(model, [passkeys[i].prompt for i in together], new)
        for i, tokens in zip(together, texts, strict=True):
            found[i] = tokenizer.decode(tokens).strip().startswith(passkeys[i].key)
    return [found[i] for i in range(len(passkeys))]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids
