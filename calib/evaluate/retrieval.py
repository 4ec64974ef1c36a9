"""Long documents that hide pairs of a name and a word, and ask for every word at their end."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from calib.errors import InputError

# no two begin alike, so that most tokenizers begin them with different tokens
_WORDS = (
    "apple", "bread", "copper", "dragon", "engine", "forest", "glass", "honey", "iron", "jacket", "lemon",
    "music", "night", "ocean", "paper", "river",
)  # fmt: skip
_NAMES = (
    "Alice", "Bob", "Carla", "David", "Emma", "Frank", "Gina", "Henry", "Ivan", "Julia", "Karl", "Laura",
    "Martin", "Nora", "Oscar", "Paula",
)  # fmt: skip


class LongDocument(NamedTuple):
    """A text with a question for each pair in it; the word that answers follows."""

    token_ids: Tensor  # [T] int64
    questions: Tensor  # [questions] int64, the position whose logits answer
    answers: Tensor  # [questions, words] int64, the first token of each word, the right one first

    def margins(self, logits: Tensor, start: int) -> Tensor:
        """Return by how many nats the right word leads the likeliest other: [answered questions] float64.

        `logits` [T, V] are those of the positions from `start` on; a question elsewhere has no row.
        """
        is_here = (self.questions >= start) & (self.questions < start + len(logits))
        answers = self.answers[is_here].to(logits.device)
        words = logits[(self.questions[is_here] - start).to(logits.device)].double().gather(1, answers)
        return (words[:, 0] - words[:, 1:].amax(1)).cpu()


def hide_pairs(tokenizer: PreTrainedTokenizerBase, text: Sequence[int], number: int) -> LongDocument:
    """Spread pairs evenly over `text`, token ids, and ask at its end; it is cut, so that its length stays.

    Which name has which word, and the order of the questions, follow from the document's `number`.
    Raises an InputError for a short text, or a tokenizer that does not tell the words apart.
    """
    chance = random.Random(number)
    words = chance.sample(_WORDS, len(_WORDS))
    lines = [[f"\n{name}: {word}\n" for word in words] for name in chance.sample(_NAMES, len(_NAMES))]
    lines_of = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in lines]  # by name and word
    pairs = [rows[i] for i, rows in enumerate(lines_of)]
    room = len(text) - 2 * sum(map(len, pairs))
    if room <= len(pairs):
        needed = len(text) - room + len(pairs) + 1
        raise InputError(f"no room for {len(pairs)} pairs and questions; give {needed} tokens or more")
    token_ids, cut = list[int](), 0
    for i, pair in enumerate(pairs):
        end = 1 + (room - 1) * (2 * i + 1) // (2 * len(pairs))
        token_ids += [*text[cut:end], *pair]
        cut = end
    token_ids += text[cut:room]
    questions, answers = [], []
    for i in chance.sample(range(len(pairs)), len(pairs)):
        columns = enumerate(zip(*lines_of[i], strict=False))
        shared, first = next((column for column in columns if len({*column[1]}) > 1), (0, ()))
        if len({*first}) < len(words):
            raise InputError(
                "this tokenizer does not tell the words apart that are to be found; leave it out"
            )
        questions.append(len(token_ids) + shared - 1)
        answers.append([first[i], *first[:i], *first[i + 1 :]])
        token_ids += pairs[i]
    return LongDocument(torch.tensor(token_ids), torch.tensor(questions), torch.tensor(answers))
