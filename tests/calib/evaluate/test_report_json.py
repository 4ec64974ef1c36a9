"""The fields of report.json: recomputed plainly, documented, read back as they were written."""

import json
import re
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from calib.evaluate.report import Report
from calib.files.strict_json import json_text
from calib.recipe import Recipe

pytestmark = pytest.mark.xdist_group("evaluate")
DOCS = Path(__file__).parents[3] / "docs"


def test_kl_by_position_adds_up_to_kl(small_evaluation, small_report):
    for name, row in small_report["variants"].items():
        bins = row["kl_by_position"]
        assert [(b["from"], b["to"], b["tokens"]) for b in bins] == [(0, 16, 48), (16, 32, 48), (32, 40, 24)]
        mean = np.average([b["value"] for b in bins], weights=[b["tokens"] for b in bins])
        np.testing.assert_allclose(mean, row["kl"]["value"], rtol=1e-6)
        documents = small_evaluation.measured[name].documents
        second = torch.cat([document.kl[16:32] for document in documents]).mean()
        np.testing.assert_allclose(bins[1]["value"], second.item(), rtol=1e-6)
        assert all(b["low"] <= b["value"] <= b["high"] for b in bins)


def test_texts_are_cut_where_they_leave_the_reference(small_evaluation, small_report):
    texts = small_report["texts"]
    assert texts["prompts"] == list(small_evaluation.texts.prompts)
    # one tensor alone and the controls write nothing
    assert set(texts["continuations"]) == {
        *("reference", "none", "e5m2", "tensor", "attn_head", "channel", "random"),
    }
    reference = texts["continuations"]["reference"]
    assert all(text["rest"] == "" and text["same_tokens"] == 6 for text in reference)
    for name, written in texts["continuations"].items():
        assert [t["same_tokens"] for t in written] == small_evaluation.measured[name].same_tokens
        for text, other in zip(written, reference, strict=True):
            assert other["same"].startswith(text["same"])


def test_conditions_are_recorded(small_recipe, small_report):
    assert small_report["versions"]["torch"] == version("torch")
    assert {"python", "fp8kv", "transformers"} <= set(small_report["versions"])
    assert small_report["machine"].strip()
    created = datetime.fromisoformat(small_report["created"])
    assert created.tzinfo is not None
    assert 0 <= (datetime.now(timezone.utc) - created).total_seconds() + 1 < 24 * 3600
    assert small_report["data"]["layer_documents"] == 2
    row = small_report["variants"]["channel"]
    assert (row["kind"], row["strategy"], row["fp8_dtype"]) == ("fp8", "channel", "e4m3fn")
    recipe = Recipe.model_validate(small_report["recipe"])
    assert recipe.data.seed == small_recipe.data.seed
    assert recipe.evaluation == small_recipe.evaluation
    assert recipe.data.seq_len == small_report["suite"]["seq_len"]


def test_every_field_is_documented_and_so_is_the_schema(small_report):
    variant = small_report["variants"]["tensor"]
    names = {*small_report, *small_report["data"], *variant, *variant["kl_by_position"][0]}
    names |= {*variant["layers"][0], *small_report["layers"][0]["k"]}
    names |= {*small_report["texts"], *small_report["texts"]["continuations"]["tensor"][0]}
    documented = (DOCS / "evaluation.md").read_text()
    assert {n for n in names if not re.search(rf"`[^`]*\b{n}\b[^`]*`", documented)} == set()
    schema = json_text(Report.model_json_schema(), indent=2) + "\n"
    assert (DOCS / "report.schema.json").read_text() == schema, (
        "python -m calib.evaluate.report > docs/report.schema.json"
    )


def test_a_report_read_back_is_the_same(small_report):
    written = json.dumps(small_report)
    assert json.dumps(Report.model_validate_json(written).to_json()) == written
    assert {"layers", "strategy", "passkey"}.isdisjoint(small_report["variants"]["bf16"])
    assert "tasks" not in small_report
