"""What `fp8kv inspect` says of a directory."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.scalefiles.file_names import JSON_FILE, MODELOPT_FILE
from calib.scalefiles.folder import ScaleDirectory, open_scales
from calib.scalefiles.reading import LayerScalesFound, Values, layers_of, value_problems

HEADINGS = ("layer", "K scale", "V scale", "Q scale", "type", "shape")


@dataclass(frozen=True)
class Inspection:
    """The scales of a directory, and what is wrong with them for any engine."""

    directory: ScaleDirectory
    layers: list[LayerScalesFound]
    problems: list[str]

    @property
    def strategy(self) -> str:
        """One scale per layer, or per head."""
        several = any(len(getattr(layer, x) or ()) > 1 for layer in self.layers for x in "kvq")
        return "attn_head" if several else "tensor"

    @property
    def formats(self) -> list[str]:
        """Whose names the scales have, most frequent first."""
        counts = Counter(t.parsed.dialect for layer in self.layers for t in layer.tensors)
        names: list[str] = [dialect for dialect, _ in counts.most_common()]
        return names + [JSON_FILE] * (self.directory.json is not None)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "directory": str(self.directory.path),
            "formats": self.formats,
            "strategy": self.strategy,
            "quantization": _quantization(self.directory),
            "layers": [
                {"layer": layer.layer, "k": layer.k, "v": layer.v, "q": layer.q}
                | {"tensors": {t.name: [t.file, t.dtype, t.shape] for t in layer.tensors}}
                for layer in self.layers
            ],
            "problems": self.problems,
        }


def inspect_directory(path: Path) -> Inspection:
    """Read the scales of `path`, whatever tool has written them.

    Raises:
        InputError: there are none, or a file is damaged.
    """
    directory = open_scales(path)
    layers = layers_of(directory)
    return Inspection(directory, layers, value_problems(layers) + _file_problems(directory))


def opening_lines(found: Inspection) -> list[str]:
    """What kind of scales these are."""
    directory = found.directory
    files = len(directory.files)
    index = "no index" if directory.index is None else "an index"
    lines = [
        f"{len(found.layers)} layers, {found.strategy}; names of {', '.join(found.formats)}",
        f"{files} safetensors file{'s' * (files != 1)}, {index}; {_quantization(directory)}",
    ]
    return lines


def table_rows(found: Inspection) -> list[tuple[str, ...]]:
    """A row per layer."""
    return [
        (
            str(layer.layer),
            show_scale(layer.k),
            show_scale(layer.v),
            show_scale(layer.q),
            ", ".join(sorted({t.dtype for t in layer.tensors})) or "JSON",
            ", ".join(sorted({str([*t.shape]) for t in layer.tensors})) or "-",
        )
        for layer in found.layers
    ]


def show_scale(values: Values | None) -> str:
    """One scale, or the least and the largest of several."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{min(values):.4g} to {max(values):.4g} ({len(values)})"


def _quantization(directory: ScaleDirectory) -> str:
    found = directory.quantization
    if found is None:
        return "no quantization_config"
    nested = found.get("quantization")
    where = MODELOPT_FILE if found is directory.modelopt else "quantization_config"
    inner = nested if isinstance(nested, dict) else found
    method = found.get("quant_method") or inner.get("quant_algo")
    scheme = found.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    return f"{where}: {method}, KV cache: {_scheme(scheme)}"


def _scheme(scheme: Any) -> str:
    if isinstance(scheme, dict):
        said = [key for key in ("type", "num_bits", "strategy") if key in scheme]
        return ", ".join(f"{key} {scheme[key]}" for key in said)
    return str(scheme) if scheme else "not mentioned"


def _file_problems(directory: ScaleDirectory) -> list[str]:
    unlisted = Counter(tensor.file for tensor in directory.tensors if not tensor.indexed)
    names = Counter(tensor.name for tensor in directory.tensors)
    twice = [name for name, count in names.items() if count > 1]
    missing = sorted({*(directory.index or {}).values()} - {*directory.files})
    problems = [
        f"{file} holds {count} scales and is not in the index: engines that read the index skip it"
        for file, count in unlisted.items()
    ]
    if twice:
        problems.append(f"{len(twice)} scales are there twice, such as '{twice[0]}'")
    if missing:
        problems.append(f"the index names {missing[0]}, which is not there")
    return problems
