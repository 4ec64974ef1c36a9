"""The house: its rooms, the floors that they lie on (pyproject.toml), and what they import of each other."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import tomllib  # type: ignore[import-not-found]  # this tool runs on 3.11

ROOT = Path(__file__).parents[1]
PACKAGES = ("calib", "fp8kv_runtime")


def floors() -> list[set[str]]:
    """Return the rooms of each floor, lowest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["calib"])
    return [{"fp8kv_runtime"}, *({room.strip() for room in layer.split("|")} for layer in reversed(layers))]


def sources() -> list[Path]:
    """Return the files of the shipped code."""
    return [
        *(file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))),
        ROOT / "cli.py",
    ]


def room(path: Path) -> str:
    """Return the room of a file: `models` of `calib/models/load.py`, `job` of `calib/job.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "calib" and len(parts) > 1 else parts[0]


@cache
def room_graph() -> dict[str, set[str]]:
    """Return the rooms that each room imports."""
    graph = grimp.build_graph(*PACKAGES)
    names = (name.removeprefix("calib.") for name in graph.find_children("calib"))
    rooms: dict[str, set[str]] = {name: set() for name in (*names, "fp8kv_runtime")}
    for importer in graph.modules - {"calib"}:
        here = _room_of_module(importer)
        for imported in graph.find_modules_directly_imported_by(importer) - {"calib"}:
            rooms[here] |= {_room_of_module(imported)} - {here}
    return rooms


def _room_of_module(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "calib" else parts[0]


def top_level_imports(file: Path) -> Iterator[str]:
    """Yield the packages that `file` imports when it is imported itself."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
