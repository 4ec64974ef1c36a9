"""A model that needs its scales, calibrated, and servers that answer from it."""

import json
from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch
from command_line import calibrate, fp8kv
from fake_server import serving
from families import save_model, tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its twin, and both calibrated; the tokenizer knows words of the texts."""
    root = tmp_path_factory.mktemp("served")
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # logits that depend on what is attended to
                parameter.mul_(6)
    tokenizer = save_model(model, root / "plain") / "tokenizer.json"
    document = json.loads(tokenizer.read_text())
    words = Counter(" ".join(topics.values()).split()).most_common(125)
    document["model"]["vocab"] = {"<pad>": 0, "<s>": 1, "</s>": 2} | {
        word: i for i, (word, _) in enumerate(words, 3)
    }
    tokenizer.write_text(json.dumps(document))
    assert fp8kv("stress", root / "plain", "-o", root / "twin").exit_code == 0
    for name in ("plain", "twin"):
        assert calibrate(root / name, "-o", root / f"{name}-fp8kv").exit_code == 0
    return root


@pytest.fixture
def fake(made):
    """The twin, served with its scales."""
    return serving(made, "twin", "scales")


@pytest.fixture
def directory(made):
    return made / "twin-fp8kv"
