"""What every model class of an engine does with KV scales, as the classes themselves did it.

`architectures/*.json` are written by `make engines`, which runs the engine's own `load_weights` and
what follows it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from calib.files.names import ScaleName, pattern_of
from calib.files.strict_json import read_object

# name of a scale -> what becomes of it, and after a colon why
Fates = Mapping[str, str]
BOTH = "both"  # the first two names together
K_ALONE = "all with K alone"  # where both have one scale: V computes with 1.0
OTHER = " transformers"  # after a kind of config: run by the engine's backend for transformers' code
# how our formats can call a scale, the most usual first
NAMES = ("{module}.{x}_scale", "{module}.attn.{x}_scale", "{module}.{x}_proj.{x}_scale")
_PLAIN = NAMES[:2]


class Group(BaseModel):
    """Architectures that do the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architectures: tuple[str, ...]
    results: dict[str, dict[str, str]]  # quantization config -> name of a scale -> its fate


class Classes(BaseModel):
    """The model classes of one version of an engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    version: str
    ran: str
    groups: tuple[Group, ...]
    not_built: dict[str, str]  # architecture -> why it could not be run
    # `model.layers.N.self_attn` -> architectures that were run with attention modules of that name
    modules: dict[str, tuple[str, ...]]
    latent: tuple[str, ...]  # architectures that cache latents (MLA) in a layer as any other

    @cached_property
    def results(self) -> dict[str, dict[str, dict[str, str]]]:
        """The results of each architecture."""
        return {name: group.results for group in self.groups for name in group.architectures}

    def fates(self, config: Mapping[str, Any], quantization: str, modules: Iterable[str] = ()) -> Fates | str:
        """What the class that config.json names does under a kind of config, or why none knows.

        Without a kind, `""`, it is only said whether the class was run.
        """
        name = architecture(config)
        if name is None:
            return "not known: config.json does not name one architecture"
        if name in self.not_built:
            return f"not known for {name}: it could not be run here ({self.not_built[name]})"
        if name not in self.results:
            return f"not known for {name}: its class of {self.engine} {self.version} was never run"
        other = next((m for m in modules if name not in self.modules.get(pattern_of(m), ())), None)
        if other is not None:
            return f"not known for {name}: it was never run with attention called '{other[:80]}'"
        if not quantization:
            return {}
        fates = self.results[name].get(quantization)
        if fates is None:
            return f"not known for {name} with {quantization}: its class was never run with it"
        return fates


@cache
def load_classes(engine: str) -> Classes:
    """The classes of an engine, by the name of its table."""
    file = Path(__file__).parent / "architectures" / f"{engine}.json"
    return Classes.model_validate(read_object(file))


def architecture(config: Mapping[str, Any]) -> str | None:
    """The one model class that config.json names."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    return name[:80] if isinstance(name, str) and name else None


def naming(tensor: str, parsed: ScaleName, module: str) -> str:
    """The name of a scale of `module` as the tables have it: `{module}.{x}_proj.{x}_scale`."""
    own = rf"(?<=[._]){parsed.letters}(?=_)" if len(parsed.letters) == 1 else "(?!)"
    return "{module}" + re.sub(own, "{x}", tensor.removeprefix(module))


def owner(parsed: ScaleName, modules: Collection[str]) -> str | None:
    """The attention module whose scale a name is: its own, or one around it."""
    own = parsed.module
    around = (own, own.rpartition(".")[0], own.rpartition(".")[0].rpartition(".")[0])
    return next((module for module in around if module in modules), None)


def fate_of(fates: Fates, name: str, beside: Collection[str]) -> str:
    """The fate of a scale whose module has others under the names `beside`; `unknown`: not run."""
    if name in _PLAIN and {*_PLAIN} <= {*beside}:
        name = BOTH
    return fates.get(name, "unknown")
