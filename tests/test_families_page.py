"""docs/models.md: what runs again says the same, and mistakes are seen."""

import re

import families_page
import pytest
import transformers
from families_page import PAGE, row_cells, rows

from calib.capture.running_amax import RunningLayer
from calib.rescale import pipeline, weight_changes
from fp8kv_runtime.hf import attention

# of each kind of layers one
CHOSEN = ["llama", "falcon", "gpt_oss", "llama4", "gemma4", "gemma3n_text", "kimi_k25", "kimi_linear", "lfm2"]
CHOSEN += ["minimax", "minimax_m3_vl_text", "inkling_text", "mllama", "zamba2", "hrm_text", "diffllama"]
TEXT = PAGE.read_text()
OTHER = f"transformers {transformers.__version__.rpartition('.')[0]}." not in TEXT
pytestmark = pytest.mark.skipif(OTHER, reason="docs/models.md is of another version of transformers")
ROWS = {name: row for row, name in re.findall(r"^(\| `(\S+)` \| `.+)$", TEXT, re.MULTILINE)}
NAMES = [n if n in CHOSEN else pytest.param(n, marks=pytest.mark.nightly) for n in ROWS]
REASONS = re.findall(r"^(\d+)\. (.+(?:\n +.+)*)$", TEXT, re.MULTILINE)
REASONS = {" ".join(reason.split()): int(number) for number, reason in REASONS}


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_as_the_page_says(name):
    (row,) = rows([name])
    assert f"| {' | '.join(row_cells(row, dict(REASONS)))} |" == ROWS[name]


def test_every_family_has_a_row_and_none_is_wrong():
    assert ROWS.keys() == families_page.known_families().keys() > set(CHOSEN)
    assert "wrong" not in "".join(ROWS.values())
    # gemma4_text-shared is a size of a family
    count = f"{len({name.partition('-')[0] for name in ROWS})} families"
    assert all(count in (PAGE.parents[1] / page).read_text() for page in ("CHANGELOG.md", "docs/guide.md"))


MISTAKES = {
    (RunningLayer, "update"): (
        lambda right: lambda self, q, k, v, tokens: right(self, q, v, k, tokens),
        {"calibrate": "wrong: K of layer 0 is not", "layerwise": "wrong: K of layer 0 is not"},
    ),
    (attention, "convert_cache"): (
        lambda right: lambda cache, rows, scales: right(cache, rows, dict(list(scales.items())[:-1])),
        {"eval": "refused: eval and generate cannot run this model on an FP8 cache: the layers of"},
    ),
    (weight_changes, "head_changes"): (
        lambda right: lambda weights, factors: [*right(weights, factors)][:-1],
        {"bake": "wrong: logits are others"},
    ),
}


@pytest.mark.parametrize("place", MISTAKES)
def test_a_mistake_is_seen(place, monkeypatch):
    mistake, found = MISTAKES[place]
    monkeypatch.setattr(*place, mistake(getattr(*place)))
    monkeypatch.setattr(pipeline, "prove", lambda *_: None)
    (row,) = rows(["llama"])
    assert all(row.results[column].startswith(said) for column, said in found.items()), row.results
