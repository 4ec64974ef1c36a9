"""`fp8kv_calibration.json` and the README of an output: how it was made and how to serve it."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from calib.choices import FormatName
from calib.data import CalibrationData
from calib.export import FORMATS
from calib.recipe import Recipe
from calib.summary import LayerSummary

_VERSIONS = ("fp8kv", "torch", "transformers", "datasets", "safetensors")


def calibration_report(
    model: str,
    recipe: Recipe,
    data: CalibrationData,
    layers: list[LayerSummary],
    warnings: list[str],
) -> dict[str, Any]:
    """The document saved with every result; its recipe, run again, gives the same scales."""
    return {
        "fp8kv_calibration": 1,
        "model": model,
        "recipe": recipe.model_dump(mode="json"),
        "dataset": {
            "source": data.source,
            "fingerprint": data.fingerprint,
            "samples": len(data.samples),
            "tokens": data.num_tokens,
        },
        "versions": {"python": platform.python_version(), **{n: version(n) for n in _VERSIONS}},
        "layers": [asdict(layer) for layer in layers],
        "warnings": warnings,
    }


def output_card(report: dict[str, Any], name: FormatName, path: Path) -> str:
    """The README section of one output directory."""
    recipe, dataset = report["recipe"], report["dataset"]
    target = FORMATS[name]
    lines = [
        f"# FP8 KV-cache scales for {report['model']}",
        "",
        f"Format `{name}` for {target.engine}; strategy `{recipe['strategy']}`, observer "
        f"`{recipe['observer']['name']}`, {recipe['fp8_dtype']}; {dataset['tokens']} tokens of "
        f"{dataset['source']} in {dataset['samples']} samples. Made by fp8kv "
        f"{report['versions']['fp8kv']}. The weights are those of the source, bit for bit.",
        "",
        *([] if not target.serve else ["```bash", serve_command(name, path), "```", ""]),
        *([] if not target.note else [f"Note: {target.note}.", ""]),
        *(f"- {warning}" for warning in report["warnings"]),
    ]
    return "\n".join(lines) + "\n"


def serve_command(name: FormatName, path: Path) -> str:
    """The exact command that serves an output directory, or "" where no engine does."""
    return FORMATS[name].serve.format(path=path)
