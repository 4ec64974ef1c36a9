"""The README of an output: how it was made and how to serve it."""

import shlex
from pathlib import Path
from typing import Any

from calib.choices import FormatName, Reduce, Strategy
from calib.files.text import plain
from calib.formats import FORMATS

NO_WEIGHTS = "No weights are here: put the source's weight files beside these before serving."
_SAME = "The weights are those of the source, bit for bit."


def output_card(report: dict[str, Any], name: FormatName, path: Path, flags: str = "") -> str:
    """The README section of one output directory; `flags`: that serving needs besides."""
    recipe, dataset = report["recipe"], report["dataset"]
    origin = report.get("measured_on")
    about = f", measured on {origin['model']} and applied to this checkpoint" if origin else ""
    about += (
        f", observer `{recipe['observer']['name']}`, {recipe['fp8_dtype']}; {dataset['tokens']} "
        f"tokens of {dataset['source']} in {dataset['samples']} samples{_of_documents(dataset)}. "
        f"Made by fp8kv {report['versions']['fp8kv']}."
    )
    weights = NO_WEIGHTS if recipe["export"]["weights"] == "none" else _SAME
    strategy = strategy_held(recipe["strategy"], recipe["export"]["reduce"])
    card = format_card(report["model"], name, path, strategy, about, weights, flags)
    return card + "".join(f"- {plain(warning)}\n" for warning in report["warnings"])


def _of_documents(dataset: dict[str, Any]) -> str:
    """What the samples are of; reports of older versions do not say it."""
    if "documents" not in dataset:
        return ""
    return f" (documents: {dataset['documents']}; {dataset['unread_tokens']} tokens were left unread)"


def format_card(
    model: str, name: FormatName, path: Path, strategy: Strategy, about: str,
    weights: str = _SAME, flags: str = "",
) -> str:  # fmt: skip
    """The README section of scales in one format; `about` ends the sentence on their strategy."""
    target = FORMATS[name]
    command = serve_command(name, path, strategy, flags)
    weights = weights if target.with_weights else "No weights are here."
    engine = engine_of(name, flags)
    lines = [
        f"# {'NVFP4' if target.nvfp4 else 'FP8'} KV-cache scales for {plain(model)}",
        "",
        f"Format `{name}` for {engine}; strategy `{strategy}`{plain(about)} {weights}",
        "",
        *(["```bash", command, "```", ""] if command else []),
        *([f"Note: {target.note}.", ""] if target.note else []),
    ]
    return "\n".join(lines) + "\n"


def engine_of(name: FormatName, flags: str = "") -> str:
    """Who serves a format; `flags` that serving needs besides are vLLM's alone."""
    return "vLLM" if flags else FORMATS[name].engine


def serve_command(name: FormatName, path: Path, strategy: Strategy, flags: str = "") -> str:
    """The exact command that serves an output directory, or "" where no engine does."""
    target = FORMATS[name]
    command = target.serve.format(path=shlex.quote(str(path)))
    return command + target.per_head_flags * (strategy == "attn_head") + f" {flags}" * bool(flags)


def strategy_held(strategy: Strategy, reduce: Reduce | None) -> Strategy:
    """The strategy of scales in a file, after what was asked of it."""
    return "tensor" if reduce == "max" else strategy
