"""compressed-tensors, which llm-compressor and AutoRound write: what each group of modules holds.

Source: `compressors/` and `quantization/` of compressed-tensors 0.17 and 0.20, which agree in what
is read here. `compressed_schemes.py` decodes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from calib.model.layouts.coded import ADVICE, CodedWeight, LayoutError, Module, section
from calib.model.layouts.compressed_schemes import Scheme

_CODES = ("weight_packed", "weight")
_CODE_DTYPES = ("F8_E4M3", "I8", "U8", "I32")


@dataclass(frozen=True)
class CompressedTensors:
    """Schemes by their targets, and the modules that are left alone."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...]

    label = "compressed-tensors"

    @classmethod
    def read(cls, says: dict[str, Any]) -> "CompressedTensors":
        """Read a `quantization_config` or a `compression_config`."""
        sparse = section(says, "sparsity_config").get("format", "dense")
        if says.get("transform_config") or sparse != "dense":
            raise LayoutError(f"transform_config or sparsity_config is set, {ADVICE}")
        if says.get("quantization_status", "compressed") != "compressed":
            raise LayoutError(f"quantization_status is not 'compressed', {ADVICE}")
        groups = section(says, "config_groups")
        schemes = tuple(
            (_strings(group, "targets"), Scheme.read(group, says.get("format")))
            for group in (section(groups, name) for name in groups)
            if group.get("weights") is not None
        )
        if not schemes:
            raise LayoutError(f"no group of config_groups has weights, {ADVICE}")
        return cls(schemes, _strings(says, "ignore"))

    def weights(self, module: Module) -> Iterable[CodedWeight]:
        """The weight of a module that holds codes; LayoutError if no group is about it."""
        found = (module.entries[part] for part in _CODES if part in module.entries)
        entry = next(found, None)
        if entry is None or entry.dtype not in _CODE_DTYPES:
            return
        if any(_is_named(module.name, pattern) for pattern in self.ignore):
            raise LayoutError(f"'{module.name}' holds codes, and its config.json ignores it")
        yield self._scheme(module.name).weight(module)

    def _scheme(self, name: str) -> Scheme:
        # exact names come before patterns, and both before classes, as in the library
        exact = {s for targets, s in self.schemes if name in targets}
        by_pattern = {s for targets, s in self.schemes if any(_is_named(name, t) for t in targets)}
        by_class = {s for targets, s in self.schemes if "Linear" in targets}
        found = exact or by_pattern or by_class
        if len(found) != 1:
            groups = "several groups are" if found else "no group is"
            raise LayoutError(f"'{name}' holds codes, and {groups} about it in config_groups")
        return found.pop()


def _is_named(name: str, target: str) -> bool:
    if not target.startswith("re:"):
        return name == target
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as error:
        raise LayoutError(f"'{target:.80}' is no regular expression: {error}") from None


def _strings(says: dict[str, Any], key: str) -> tuple[str, ...]:
    value = says.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise LayoutError(f"{key} {value!r:.80} is no list of names, {ADVICE}")
    return tuple(value)
