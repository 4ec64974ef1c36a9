"""Which rows of a weight are looked at."""

import pytest

from calib.same_model.marks import sample_head_rows, sample_rows


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "grouped"),
    [
        pytest.param(71, 1, 64, False, id="Falcon 7B"),
        pytest.param(128, 8, 64, True, id="Falcon 40B"),
        pytest.param(48, 1, 128, False, id="StarCoder"),
        pytest.param(64, 64, 96, True, id="GPT-NeoX 20B"),
        pytest.param(40, 10, 128, False, id="Phi 4"),
        pytest.param(4, 2, 16, False, id="tiny"),
    ],
)
def test_keys_and_values_in_fused_weights(heads, kv_heads, head_dim, grouped):
    def letter(row):
        head, group = row // head_dim, heads // kv_heads + 2
        if grouped:
            return {group - 1: "v", group - 2: "k"}.get(head % group, "q")
        return "q" if head < heads else "k" if head < heads + kv_heads else "v"

    rows = (heads + 2 * kv_heads) * head_dim
    found = [letter(row) for row in sample_head_rows(rows, heads, head_dim)]
    assert min(found.count("k"), found.count("v")) >= 4
    assert len(found) <= 24


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_head_of_eight(head_dim):
    assert {row // head_dim for row in sample_rows(8 * head_dim, 8)} == {*range(8)}
