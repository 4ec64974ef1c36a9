"""`fp8kv_calibration.json` and the README of an output: how it was made and how to serve it."""

import platform
import shlex
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.model.checkpoint import Checkpoint, fingerprint
from calib.choices import FormatName, Strategy
from calib.data import CalibrationData
from calib.export import FORMATS
from calib.recipe import Recipe
from calib.scales.summary import LayerSummary

if TYPE_CHECKING:
    from calib.output.finish import Result
    from calib.generate import Generated

NO_WEIGHTS = "No weights are here: put the source's weight files beside these before serving."

_VERSIONS = ("fp8kv", "torch", "transformers", "datasets", "safetensors")


def calibration_report(
    model: str,
    checkpoint: Checkpoint,
    recipe: Recipe,
    dataset: dict[str, Any],
    layers: list[LayerSummary],
    warnings: list[str],
    threads: int | None,
) -> dict[str, Any]:
    """The document saved with every result; its recipe, run again, gives the same scales."""
    return {
        "fp8kv_calibration": 1,
        "model": model,
        "checkpoint": fingerprint(checkpoint),
        "recipe": recipe.model_dump(mode="json"),
        "dataset": dataset,
        "versions": versions(),
        "threads": threads,
        "layers": [asdict(layer) for layer in layers],
        "warnings": warnings,
    }


def dataset_facts(data: CalibrationData) -> dict[str, Any]:
    """What the report says of the data."""
    return {
        "source": data.source,
        "fingerprint": data.fingerprint,
        "samples": len(data.samples),
        "tokens": data.num_tokens,
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that a result depends on."""
    return {"python": platform.python_version(), **{n: version(n) for n in _VERSIONS}}


def output_card(report: dict[str, Any], name: FormatName, path: Path) -> str:
    """The README section of one output directory."""
    recipe, dataset = report["recipe"], report["dataset"]
    about = (
        f"strategy `{recipe['strategy']}`, observer `{recipe['observer']['name']}`, "
        f"{recipe['fp8_dtype']}; {dataset['tokens']} tokens of {dataset['source']} in "
        f"{dataset['samples']} samples. Made by fp8kv {report['versions']['fp8kv']}."
    )
    without = recipe["export"]["weights"] == "none"
    lines = _card(report["model"], name, path, recipe["strategy"], about, without_weights=without)
    return "\n".join([*lines, *(f"- {warning}" for warning in report["warnings"])]) + "\n"


def rewritten_card(source: Path, name: FormatName, strategy: Strategy, path: Path) -> str:
    """The README section of scales that were converted or repaired."""
    model = source.resolve().name
    about = f"strategy `{strategy}`. Written by fp8kv {version('fp8kv')} from the scales there."
    return "\n".join(_card(model, name, path, strategy, about)) + "\n"


def _card(
    model: str,
    name: FormatName,
    path: Path,
    strategy: Strategy,
    about: str,
    *,
    without_weights: bool = False,
) -> list[str]:
    target = FORMATS[name]
    command = serve_command(name, path, per_head=holds_per_head(name, strategy))
    weights = "The weights are those of the source, bit for bit."
    if without_weights:
        weights = NO_WEIGHTS
    if not target.with_weights:
        weights = "No weights are here."
    return [
        f"# FP8 KV-cache scales for {model}",
        "",
        f"Format `{name}` for {target.engine}; {about} {weights}",
        "",
        *(["```bash", command, "```", ""] if command else []),
        *([] if not target.note else [f"Note: {target.note}.", ""]),
    ]


def closing_lines(result: "Result") -> list[str]:
    """What the summary says after its table: warnings, speed, where it is, how to serve it."""
    lines = [f"warning: {warning}" for warning in result.warnings]
    lines += ["", _speed(result), f"written to {result.output}"]
    if result.backup:
        lines.append(f"the files that were replaced are in {result.backup}")
    for name, directory in result.directories.items():
        per_head = holds_per_head(name, result.recipe.strategy)
        if FORMATS[name].note:
            lines.append(f"note ({name}): {FORMATS[name].note}")
        if FORMATS[name].with_weights and result.recipe.export.weights == "none":
            lines.append(f"note ({name}): {NO_WEIGHTS}")
        if FORMATS[name].serve:
            lines += [
                "",
                f"serve with {FORMATS[name].engine}:",
                f"  {serve_command(name, directory, per_head=per_head)}",
            ]
    return lines


def _speed(result: "Result") -> str:
    seconds = result.seconds
    if result.tokens_per_second is None:
        return f"statistics of {result.tokens:,} tokens"
    return (
        f"{result.tokens:,} tokens in {seconds['calibrate']:.1f} s "
        f"({result.tokens_per_second:,.0f} tokens/s); load {seconds['load']:.1f} s, "
        f"write {seconds['write']:.1f} s"
    )


def generation_lines(result: "Generated") -> list[str]:
    """What `fp8kv generate` says after the text."""
    fp8, plain = result.fp8, result.plain
    ratio = result.bytes_per_token / result.bytes_per_token_16bit
    lines = [
        "",
        f"{len(fp8.token_ids)} tokens in {fp8.seconds:.1f} s ({fp8.tokens_per_second:.1f} "
        "tokens/s, prompt included)",
        f"KV cache: {result.bytes_per_token:,} bytes a token in FP8, "
        f"{result.bytes_per_token_16bit:,} in 16 bits ({ratio:.2f}x)",
        f"{result.cached_tokens} tokens in blocks of {result.block_size}: "
        f"{_mib(result.cache_bytes)}; in 16 bits {_mib(result.cache_bytes_16bit)}",
    ]
    if plain is not None:
        speed = fp8.tokens_per_second / plain.tokens_per_second
        same = f"the first {result.same_tokens} of {len(fp8.token_ids)} tokens are the same"
        lines += [
            "",
            f"with a 16-bit cache ({plain.tokens_per_second:.1f} tokens/s; FP8 runs at "
            f"{speed:.2f}x): {same}",
            plain.text,
        ]
    return lines


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def serve_command(name: FormatName, path: Path, *, per_head: bool) -> str:
    """The exact command that serves an output directory, or "" where no engine does."""
    target = FORMATS[name]
    return target.serve.format(path=shlex.quote(str(path))) + (
        target.per_head_flags if per_head else ""
    )


def holds_per_head(name: FormatName, strategy: Strategy) -> bool:
    """Whether an output in this format holds per-head scales; the others were reduced."""
    return strategy == "attn_head" and strategy in FORMATS[name].strategies
