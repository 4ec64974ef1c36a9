"""What an engine's model classes do with scales: the section `classes` of its file.

`make engines` writes it: every class that a small config can describe gets scales under every name,
through its own `load_weights`, and the scales that its attention layers then compute with are recorded.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from calib.files.names import pattern_of
from calib.files.scale_files import ScaleTensor

# name of a scale -> what becomes of it, and after a colon why
Fates = Mapping[str, str]
BOTH = "both"  # the first two names together
K_ALONE = "all with K alone"  # where both have one scale: V computes with 1.0
TRANSFORMERS = " transformers"  # after a kind of config: run by the engine's backend for transformers' code
ALL = "all"  # in a group: every name that it does not list
# how our formats can call a scale, the most usual first
NAMES = ("{module}.{x}_scale", "{module}.attn.{x}_scale", "{module}.{x}_proj.{x}_scale")
_PLAIN = NAMES[:2]


class Group(BaseModel):
    """Architectures that do the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architectures: tuple[str, ...]
    fates: dict[str, dict[str, str]]  # kinds of config, with commas -> name of a scale -> its fate


class Classes(BaseModel):
    """The model classes of one version of an engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    ran: str  # the day
    names: tuple[str, ...]  # that every class was run with
    groups: tuple[Group, ...]
    # `model.layers.N.self_attn` -> architectures that were run with attention modules of that name
    modules: dict[str, tuple[str, ...]]
    latent: tuple[str, ...]  # architectures that cache latents (MLA) in a layer like any other
    not_built: dict[str, str]  # architecture -> why it could not be run

    @cached_property
    def results(self) -> dict[str, dict[str, dict[str, str]]]:
        """The fates by architecture, kind of config and name."""
        results = dict[str, dict[str, dict[str, str]]]()
        for group in self.groups:
            fates = dict[str, dict[str, str]]()
            for kinds, own in group.fates.items():
                usual = dict.fromkeys(self.names, own[ALL]) if ALL in own else {}
                named = {name: fate for name, fate in own.items() if name != ALL}
                fates |= dict.fromkeys(kinds.split(", "), usual | named)
            results |= dict.fromkeys(group.architectures, fates)
        return results

    def fates(self, name: str | None, kind: str, modules: Iterable[str], engine: str) -> Fates | str:
        """Return what the class `name` does under a kind of config, or why that is not known.

        Without a kind, `""`, it is only said whether the class was run.
        """
        if name is None:
            return "not known: config.json does not name one architecture"
        if name in self.not_built:
            return f"not known for {name}: it could not be run here ({self.not_built[name]})"
        if name not in self.results:
            return f"not known for {name}: its class of {engine} {self.version} was never run"
        stranger = next((m for m in modules if name not in self.modules.get(pattern_of(m), ())), None)
        if stranger is not None:
            return f"not known for {name}: it was never run with attention called '{stranger[:80]}'"
        if not kind:
            return {}
        missing = f"not known for {name} with {kind}: its class was never run with it"
        return self.results[name].get(kind, missing)


def architecture(config: Mapping[str, Any]) -> str | None:
    """Return the one model class that config.json names."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    return name[:80] if isinstance(name, str) and name else None


def split_name(tensor: ScaleTensor, modules: Collection[str]) -> tuple[str | None, str]:
    """Split a scale's name into its attention module and what tables call it: `{module}.{x}_proj.{x}_scale`.

    The module is the scale's own or one around it; None where `modules` have neither.
    """
    inner, letters = tensor.parsed.module, tensor.parsed.letters
    middle = inner.rpartition(".")[0]
    module = next((m for m in (inner, middle, middle.rpartition(".")[0]) if m in modules), None)
    own = rf"(?<=[._]){letters}(?=_)" if len(letters) == 1 else "(?!)"
    return module, "{module}" + re.sub(own, "{x}", tensor.name.removeprefix(module or ""))


def find_fate(fates: Fates, name: str, beside: Collection[str]) -> str:
    """Return the fate of a scale whose module has others under the names `beside`; `unknown`: not run."""
    if name in _PLAIN and {*_PLAIN} <= {*beside}:
        name = BOTH
    return fates.get(name, "unknown")
