"""Batches as trainers hold them: all forms give the same scales; none is misread."""

from collections import UserDict

import pytest
import torch
from families import tiny_model, tiny_vision_language_model

from calib.capture.training import scales_for
from calib.data import Batch
from calib.errors import InputError
from calib.recipe import Recipe

# little text does for this
pytestmark = pytest.mark.filterwarnings("ignore:only .* tokens:UserWarning")
ROWS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(1))
TEXT = ROWS[:1, :18]
LEFT = torch.cat([torch.zeros(1, 6, dtype=torch.int64), TEXT], 1)
SHAPES = (
    r"token ids must be whole numbers \[B, T\], a list of rows \[T\], or a mapping of input_ids and "
    "attention_mask"
)
REAL = torch.tensor([[0] * 6 + [1] * 18])
POSITIONS = (REAL.cumsum(1) - 1).clamp(min=0)


class Rows:
    """A dataset without an iterator."""

    def __getitem__(self, index):
        return {"input_ids": ROWS[index]}  # an IndexError ends it


@pytest.mark.parametrize(
    "batches",
    [
        [TEXT[0]],
        [TEXT.int()],
        [TEXT[0].tolist()],
        [TEXT.tolist()],
        [{"input_ids": TEXT, "labels": ROWS}],
        [UserDict(input_ids=TEXT.tolist(), attention_mask=None)],
        [{"input_ids": LEFT, "attention_mask": REAL}],
        [{"input_ids": LEFT, "attention_mask": REAL, "position_ids": POSITIONS, "rewards": [1.0]}],
        [{"input_ids": LEFT.tolist(), "attention_mask": REAL.bool().tolist()}],
        [Batch(TEXT, torch.ones_like(TEXT), sample_ids=(0,), first_token=0)],
        [ROWS.numpy()],
        [[*ROWS.numpy()]],
        [{"input_ids": ROWS.numpy(), "position_ids": torch.arange(24)[None]}],
        Rows(),
    ],
)
def test_forms_of_batches(batches):
    model, few = tiny_model("llama"), Recipe(data={"allow_few_tokens": True})
    found = scales_for(model, batches, recipe=few)
    assert found in [scales_for(model, [rows], recipe=few) for rows in (TEXT, ROWS)]


def test_zeros_that_say_that_all_is_text():
    model = tiny_vision_language_model()
    text = {"input_ids": ROWS, "token_type_ids": torch.zeros_like(ROWS)}
    assert scales_for(model, [text]) == scales_for(model, [ROWS])
    text["token_type_ids"][0, 3] = 1
    with pytest.raises(InputError, match="token_type_ids can change"):
        scales_for(model, [text])


def test_rows_that_are_skipped_whole_are_left_out():
    model, recipe = tiny_model("llama"), Recipe(data={"skip_first": 3})
    found = scales_for(model, [ROWS[:, :3], ROWS], recipe=recipe)
    assert found == scales_for(model, [ROWS], recipe=recipe)
    with pytest.raises(InputError, match="no token was read that counts"):
        scales_for(model, [ROWS[:, :3]], recipe=recipe)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "no token was read that counts"),
        ([[]], rf"{SHAPES}, got \[\]"),
        ([[[], [1, 2]]], rf"{SHAPES}, got \[\[\], \[1, 2"),
        ([[ROWS, ROWS > 0]], rf"{SHAPES}, got a list of int64 \[4, 24\], bool \[4, 24\]"),
        ([(ROWS, ROWS)], rf"{SHAPES}, got a tuple of int64 \[4, 24\], int64"),
        ([ROWS > 0], rf"{SHAPES}, got bool \[4, 24\]; give a mask under attention_mask"),
        ({"input_ids": ROWS}, "batches must be a list or loader of batches, also for a single one"),
        (None, "batches must be a list or loader .* got None"),
        ([1, 2, 3], f"{SHAPES}, got 1"),
        ([ROWS.float()], f"{SHAPES}, got float32"),
        ([{"labels": ROWS}], f"{SHAPES}, got None"),
        ([{"input_ids": ROWS, "attention_mask": 2 * ROWS}], "attention_mask must be"),
        ([{"input_ids": ROWS, "attention_mask": ROWS[:, 1:]}], "attention_mask must be"),
        ([{"input_ids": ROWS, "position_ids": ROWS[:1]}], "position_ids can change K and V"),
        ([{"input_ids": ROWS, "seq_idx": ROWS}], "seq_idx can change K and V"),
        ([ROWS[None]], rf"{SHAPES}, got int64 \[1, 4, 24\]"),
        ([{"input_ids": ROWS, "inputs_embeds": ROWS.float()}], "inputs_embeds can change K and V"),
        ([ROWS, ROWS + 120], "batch 1: token id 2.. is not one of"),
        ([-ROWS], "batch 0: token id -"),
        ([torch.ones(300).int()], "300 tokens is longer than the model's 256"),
    ],
)
def test_what_would_be_misread_is_one_line(batches, words):
    model = tiny_model("llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # which hides no argument
    with pytest.raises(InputError, match=words) as refused:
        scales_for(model, batches)
    assert "\n" not in str(refused.value)
