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
FEW = Recipe(data={"allow_few_tokens": True})
ROWS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(1))
LEFT = torch.cat([torch.zeros(1, 6, dtype=torch.int64), ROWS[:1, :18]], 1)
SHAPES = (
    r"token ids must be whole numbers \[B, T\], a list of rows \[T\], or a mapping of input_ids and "
    "attention_mask"
)
REAL = torch.tensor([[0] * 6 + [1] * 18])
POSITIONS = (REAL.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(
    "batch",
    [
        ROWS[0, :18],
        ROWS[:1, :18].int(),
        ROWS[0, :18].tolist(),
        ROWS[:1, :18].tolist(),
        {"input_ids": ROWS[:1, :18], "labels": ROWS},
        UserDict(input_ids=ROWS[:1, :18].tolist(), attention_mask=None),
        {"input_ids": LEFT, "attention_mask": REAL},
        {"input_ids": LEFT, "attention_mask": REAL, "position_ids": POSITIONS, "rewards": [1.0]},
        {"input_ids": LEFT.tolist(), "attention_mask": REAL.bool().tolist()},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_forms_of_a_batch(batch):
    model = tiny_model("llama")
    found = scales_for(model, [batch], recipe=FEW)
    assert found == scales_for(model, [ROWS[:1, :18]], recipe=FEW)


@pytest.mark.parametrize(
    "batch",
    [
        ROWS.numpy(),
        [*ROWS.numpy()],
        {"input_ids": ROWS.numpy(), "position_ids": torch.arange(24)[None]},
    ],
    ids=["numpy", "rows of numpy", "one row of positions"],
)
def test_forms_of_many_rows(batch):
    model = tiny_model("llama")
    assert scales_for(model, [batch]) == scales_for(model, [ROWS])


def test_datasets_without_an_iterator():
    class Rows:
        def __getitem__(self, index):
            return {"input_ids": ROWS[index]}  # an IndexError ends it

    model = tiny_model("llama")
    assert scales_for(model, Rows()) == scales_for(model, [ROWS])


def test_a_wrapped_forward_hides_nothing():
    model = tiny_model("llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(InputError, match="inputs_embeds can change"):
        scales_for(model, [{"input_ids": ROWS, "inputs_embeds": ROWS.float()}])


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


def test_a_batch_of_a_calibration_stays_as_it_is():
    model, ids = tiny_model("llama"), ROWS[:1, :18]
    batch = Batch(ids, torch.ones_like(ids), sample_ids=(0,), first_token=0)
    assert scales_for(model, [batch], recipe=FEW) == scales_for(model, [ids], recipe=FEW)


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
    with pytest.raises(InputError, match=words) as refused:
        scales_for(tiny_model("llama"), batches)
    assert "\n" not in str(refused.value)
