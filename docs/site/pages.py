"""Parts of the reference, made from the code: each function returns Markdown."""

import json
from pathlib import Path
from typing import Any

from tables import schema_tables, table

ROOT = Path(__file__).parents[2]


def cli() -> str:
    """Every command with its arguments and flags, from Typer."""
    from typer.main import get_command

    from calib.commands.app import app

    group = get_command(app)
    commands = group.commands.items()  # type: ignore[attr-defined]
    return "\n".join(_command(f"fp8kv {name}", command) for name, command in commands)


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join((name, *command.collect_usage_pieces(context)))
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name not in _EVERYWHERE:
            is_argument = parameter.param_type_name == "argument"
            panel = "argument" if is_argument else parameter.rich_help_panel or "flag"
            panels.setdefault(panel, []).append((f"`{record[0]}`", record[1]))
    tables = (table((panel.lower(), "meaning"), rows) for panel, rows in panels.items())
    return "\n".join((f"## {name}\n", f"{command.help}\n", f"```text\n{usage}\n```\n", *tables))


_EVERYWHERE = ("help", "install_completion", "show_completion")


def python() -> str:
    """Public names of both packages, for mkdocstrings."""
    import calib
    import fp8kv_runtime

    return "\n".join(_package(package) for package in (calib, fp8kv_runtime))


def _package(package: Any) -> str:
    name = package.__name__
    homes = {each: package._HOMES.get(each, name) for each in package.__all__}
    return f"## {name}\n\n" + "\n".join(
        f"::: {home}.{each}\n    options:\n      heading: {name}.{each}\n      toc_label: {each}\n"
        for each, home in homes.items()
    )


def recipe() -> str:
    """Every key of a recipe."""
    from calib.recipe import Recipe

    schema = Recipe.model_json_schema()
    keys = {value["$ref"]: key for key, value in schema["properties"].items() if "$ref" in value}
    return schema_tables(schema, {ref.rpartition("/")[2]: key for ref, key in keys.items()})


def report() -> str:
    """Every field of report.json."""
    return schema_tables(json.loads((ROOT / "docs" / "report.schema.json").read_text()))


def models() -> str:
    """Families that the tests calibrate, and what engines do with scales of their classes."""
    from engines_page import class_rows
    from families import FAMILIES, HYBRIDS, LATENT
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    from calib.engines.catalogue import find_engine

    vllm, sglang = (find_engine(name).title for name in ("vllm", "sglang"))
    loads = {name: cells for name, *cells in class_rows(page="../engines.md")}
    kinds = {
        "K and V": FAMILIES,
        "K and V; other layers keep a state": HYBRIDS,
        "K and V; some layers share them": ("gemma3n_text",),
        "latents": LATENT,
    }
    rows = [
        (f"`{family}`", f"`{CLASSES[family]}`", kind, *loads.get(CLASSES[family], _UNKNOWN))
        for kind, families in kinds.items()
        for family in families
    ]
    titles = ("`model_type`", "class", "cached", f"{vllm}, per layer", "per head", "`modelopt`")
    return table((*titles, sglang), rows)


_UNKNOWN = ("not known",) * 4
