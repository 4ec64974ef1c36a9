"""README.md of a pack: a model card of the Hub, with what was measured and how to use it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from calib.errors import InputError
from calib.files.names import CARD_FILE
from calib.files.pack import Pack
from calib.files.text import plain
from calib.formats.directory import front_matter
from calib.recipe import Recipe
from calib.scales.summary import LayerSummary
from calib.strict_yaml import read_yaml

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_TEXT = """# FP8 KV-cache scales for {model}

A calibration by fp8kv without weights. Put its scales beside your copy of the model, quantised or
not; OUTPUT is this repository's name, or a copy of its directory:

```bash
fp8kv apply OUTPUT MODEL
```

`apply` refuses a model whose norms, or weights for K and V, are not those that were measured.

"""
_FIGURES = (("kl", ".2g"), ("ppl_change", "+.2%"), ("top1", ".1%"))


def license_of(source: Path) -> str | None:
    """The license in the model's card, whose head an output's card repeats; None if unknown."""
    card = source / CARD_FILE
    text = front_matter(card.read_text(errors="replace")) if card.is_file() else ""
    try:
        said = read_yaml(text.strip().strip("-"), f"the head of '{card}'")
    except InputError:
        return None
    found = said.get("license") if isinstance(said, dict) else None
    return found if isinstance(found, str) and _LICENSE.fullmatch(found) else None


def pack_card(
    said: dict[str, Any], recipe: Recipe, layers: Sequence[LayerSummary], pack: Pack,
    license: str | None,
) -> str:  # fmt: skip
    """The card of `pack`, whose calibration's file is `said`."""
    known = {"base_model": pack.base_model, "license": license}
    front: dict[str, Any] = {key: value for key, value in known.items() if value}
    front |= {"library_name": "fp8kv", "tags": ["fp8", "kv-cache", "fp8kv"]}
    rows = [(layer.layer_idx, *_amax_and_scales(layer)) for layer in layers]
    return "".join(
        [
            f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n",
            _TEXT.format(model=_cell(pack.base_model or said["model"])),
            _table(("", ""), _facts(said, recipe, pack)),
            _measured(pack.evaluation),
            _table(("layer", "K amax", "V amax", "K scale", "V scale"), rows),
            *(f"- {_cell(warning)}\n" for warning in said["warnings"]),
        ]
    )


def _facts(said: dict[str, Any], recipe: Recipe, pack: Pack) -> list[tuple[str, str]]:
    data, versions = said["dataset"], said.get("versions") or {}
    facts = {
        "model": said["model"],
        "revision": pack.revision or "not known",
        "scales": f"{recipe.strategy}, {recipe.observer.name}, {recipe.fp8_dtype}",
        "data": f"{data['source']}, {data['samples']:,} samples, {data['tokens']:,} tokens",
        "fingerprint of the data": str(data.get("fingerprint", "not known")),
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items()),
    }
    return [(name, _cell(fact)) for name, fact in facts.items()]


def _amax_and_scales(layer: LayerSummary) -> list[str]:
    figures = (layer.k_amax, layer.v_amax, layer.k_scale, layer.v_scale)
    return [f"{figure:.4g}" for figure in figures]


def _measured(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    about = f"{evaluation['tokens']:,} held-out tokens of {_cell(evaluation['data'])}"
    rows = [
        (name, *(_interval(row[key], form) for key, form in _FIGURES))
        for name, row in evaluation["variants"].items()
    ]
    headings = ("FP8 cache", "KL, nats per token", "perplexity", "same top-1 token")
    return f"Measured on {about}, with 95 % intervals:\n\n{_table(headings, rows)}"


def _interval(figure: dict[str, float], form: str) -> str:
    value, low, high = (format(figure[key], form) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _table(headings: tuple[str, ...], rows: Iterable[Iterable[object]]) -> str:
    lines = [headings, *(map(str, row) for row in rows)]
    shown = [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join([shown[0], "|---" * len(headings) + "|\n", *shown[1:], "\n"])


def _cell(text: str) -> str:
    """Text from others without markup, in one line."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", plain(text))
