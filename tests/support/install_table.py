"""The table of docs/install.md: which versions were installed, and passed."""

import json
from pathlib import Path

INSTALLS = Path(__file__).parents[1] / "install" / "installs.json"
_SHOWN = ("torch", "transformers", "datasets", "accelerate", "numpy", "pydantic", "typer")
_WORDS = {"lowest-direct": "oldest", "highest": "newest"}


def installs():
    return json.loads(INSTALLS.read_text())["installs"]


def table():
    lines = [f"| Python | versions | {' | '.join(_SHOWN)} |", "|---" * (len(_SHOWN) + 2) + "|"]
    for row in installs():
        versions = " | ".join(row["versions"][name] for name in _SHOWN)
        lines.append(f"| {row['python']} | {_WORDS[row['resolution']]} | {versions} |")
    return "\n".join(lines)
