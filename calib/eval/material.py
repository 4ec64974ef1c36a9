"""What is read: held-out documents, prompts to continue, passkeys to find."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from calib.errors import InputError
from calib.eval.continuation import Passkey, make_passkeys
from calib.eval.suites import Suite


@dataclass(frozen=True)
class Material:
    """What is read: held-out documents, prompts to continue, passkeys to find."""

    documents: Sequence[Tensor]  # [T] each
    prompts: Sequence[Tensor]  # [T] each, all of one length
    new_tokens: int
    passkeys: Sequence[Passkey]
    layer_documents: int  # how many of the documents the per-layer errors are taken from
    long_documents: Sequence[Tensor] = ()  # [T] each, read with what engines can load

    @property
    def passkey_ids(self) -> list[int]:
        """The token ids of all passkeys' prompts."""
        return [token for passkey in self.passkeys for token in passkey.prompt.tolist()]


def make_material(
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sequence[int]],
    suite: Suite,
    *,
    seen: int,
    positions: int | None,
) -> Material:
    """Cut what `suite` reads out of `samples`; those it calibrates on come first.

    Args:
        tokenizer: the model's.
        samples: token ids.
        suite: how much is read.
        seen: samples that some of the scales were calibrated on, counted from the first.
        positions: of the model: no document is longer; None: no limit.

    Raises:
        InputError: there are too few samples.
    """
    documents = _held_out(samples, suite, max(seen, suite.calibration_samples))
    prompt_len = max(1, suite.seq_len // 8)
    prompts = [d[:prompt_len] for d in documents if len(d) >= prompt_len][: suite.prompts]
    lengths = [n for n in suite.passkey_tokens if n <= suite.seq_len]
    passkeys = make_passkeys(tokenizer, lengths, suite.passkey_depths)
    long = _long_documents(documents, min(suite.long_tokens, positions or suite.long_tokens))
    return Material(documents, prompts, suite.new_tokens, passkeys, suite.layer_documents, long)


def _held_out(samples: Sequence[Sequence[int]], suite: Suite, seen: int) -> list[Tensor]:
    held_out = samples[seen : seen + suite.documents]
    if len(held_out) < suite.documents:
        raise InputError(
            f"the dataset gives {len(samples)} samples of {suite.seq_len} tokens; scales are "
            f"calibrated on {seen} and this evaluation measures {suite.documents} others: use a "
            "larger dataset, or a smaller --samples or --seq-len"
        )
    return [torch.tensor(sample) for sample in held_out]


def _long_documents(documents: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Held-out documents joined; none if that is no longer than one of them."""
    joined = torch.cat([*documents])[:tokens]
    return [joined] if len(joined) > max(map(len, documents)) else []
