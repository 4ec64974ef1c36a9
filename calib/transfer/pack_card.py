"""README.md of a pack: a model card of the Hub."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from calib.errors import InputError
from calib.files.names import CARD_FILE
from calib.files.pack import Pack
from calib.formats.card import front_matter, render_card
from calib.recipe import Recipe
from calib.scales.summary import LayerSummary
from calib.strict_yaml import read_yaml

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


def license_of(source: Path) -> str | None:
    """Return the license in the model's card, whose head an output's card repeats; None if unknown."""
    card = source / CARD_FILE
    text = front_matter(card.read_text(errors="replace")) if card.is_file() else ""
    try:
        head = read_yaml(text.strip().strip("-"), f"the head of '{card}'")
    except InputError:
        return None
    license = head.get("license") if isinstance(head, dict) else None
    return license if isinstance(license, str) and _LICENSE.fullmatch(license) else None


def pack_card(
    report: dict[str, Any], recipe: Recipe, layers: Sequence[LayerSummary], pack: Pack, license: str | None
) -> str:
    """Return the card of `pack`, whose calibration has this `report`."""
    data, versions = report["dataset"], report.get("versions") or {}
    head: dict[str, Any] = {"base_model": pack.base_model} if pack.base_model else {}
    head |= {"license": license} if license else {}
    head |= {"library_name": "fp8kv", "tags": ["fp8", "kv-cache", "fp8kv"]}
    facts = {
        "model": report["model"],
        "revision": pack.revision or "not known",
        "scales": f"{recipe.strategy}, {recipe.observer.name}, {recipe.fp8_dtype}",
        "data": f"{data['source']}, {data['samples']:,} samples, {data['tokens']:,} tokens",
        "fingerprint of the data": data.get("fingerprint", "not known"),
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items()),
    }
    card = render_card(
        "pack",
        model=pack.base_model or report["model"],
        facts=facts,
        evaluation=pack.evaluation,
        layers=layers,
        warnings=report["warnings"],
    )
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{card}"
