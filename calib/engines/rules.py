"""The rules of one engine and version range, read from a YAML file beside this module."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from calib.engines.classes import Fates, architecture, load_classes
from calib.errors import InputError
from calib.files.cache_type import Divisor
from calib.files.names import pattern_of

# what happens to a scale without a place in the model
Fate = Literal["refused", "ignored"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Remap(_Strict):
    """A renaming: a pattern of names on disk, and the engine's name for them."""

    pattern: str
    to: str


class Method(_Strict):
    """How scales are read under one `quant_method`."""

    # see values.py; none: nothing is read
    kind: Literal["one_or_per_head", "scalar", "pair", "none"]
    why: str = ""  # where nothing is read
    # its kv_cache_scheme is refused unless type and num_bits are both right, or either is; or all
    # scales are ignored unless it is one of static FP8, one scale per layer
    scheme: Literal["both", "either", "tensor"] | None = None
    turns_fp8_on: bool = False  # no flag is needed where the config names an FP8 cache
    static_alone: bool = False  # and its kv_cache_scheme says `dynamic: false`
    algorithms: tuple[str, ...] = ()  # quant_algo must be there; it was run with these
    needs: tuple[str, ...] = ()  # keys without which the config is refused
    # how `kv_cache_group` of a Quark config names entries of its `layer_quant_config`
    cache_group: Literal["names", "patterns"] | None = None
    exclude_drops: bool = False  # attention that the config's `exclude` names has no place
    # where quant_algo MIXED_PRECISION leaves a place: a kv_cache_scheme of FP8, or NVFP4 layers
    mixed: Literal["scheme", "nvfp4"] | None = None
    needs_fp8_cache: bool = False  # without one in the config no layer has a place for scales
    groups_need_weights: bool = False  # in every one of config_groups
    through_bf16: bool = False  # values are rounded to the model's 16 bits
    doubles_fnuz: bool = False  # on MI300, as its FP8 type needs
    zero_is_absent: bool = False  # K and V of 0 are as if there were none
    reads_q: bool = True
    remap: tuple[Remap, ...] = ()  # before the engine's own


class Nvfp4(_Strict):
    """What an engine does with the calibrated value of an NVFP4 cache."""

    divisor: Divisor  # the value is to be absmax / this
    methods: tuple[str, ...]  # under which it was run
    flag: str  # what turns that cache on
    format: str = ""  # of ours, which holds what it wants
    other: str = ""  # what the other convention does there


class Rules(_Strict):
    """One engine."""

    engine: str
    versions: str
    since: str = ""  # the first version they hold for; none: all
    until: str = ""  # the first they no longer hold for
    source: str  # what was read, and when
    ran: bool  # whether the rules were compared with the engine itself
    # which safetensors files: those in the index, or all; or kv_cache_scales.json alone
    reads: Literal["index", "all", "json"]
    without_config: Fate = "ignored"  # scales in a checkpoint that has no quantization_config
    without_method: Method | None = None  # or how they are read there
    unknown: Fate = "ignored"  # scales whose module the model does not have
    methods: dict[str, Method] = {}  # by quant_method; "*": any other
    # the model classes whose loading of scales is known: a table in architectures/, or by reading
    # these; neither: it does not depend on the class
    classes: str = ""
    architectures: tuple[str, ...] = ()
    modules: str = "model.layers.N.self_attn"  # what their checkpoints call attention
    remap: tuple[Remap, ...] = ()
    first_remap: bool = False  # only the first pattern that fits is applied, not one after another
    serve: str = ""  # the command that serves {path}, without the flag
    flag: str  # what turns an FP8 cache on
    nvfp4: Nvfp4 | None = None  # None: not known
    latent: str = ""  # what becomes of scales of latents (MLA); none: not known
    latent_spoils: bool = False  # loaded ones make answers wrong
    latent_one: tuple[str, ...] = ()  # by reading, classes whose latents are cached at 1.0
    latent_refused: str = ""  # why there is no FP8 cache of latents
    latent_ways: tuple[str, ...] = ()  # what serves latents all the same
    other_flag: str = ""  # what chooses its backend for transformers' own code
    asked: str = ""  # the version that the user named
    per_head_flag: str = ""  # and what a scale per head needs besides
    note: str = ""
    # format -> what may surprise its user; {note} and {since} stand for the above
    formats: dict[str, str] = {}

    @property
    def title(self) -> str:
        """The engine and its version: the one that was asked for, else where its classes ran."""
        return f"{self.engine} {self.asked or self.classes_version or self.versions}"

    @property
    def classes_version(self) -> str | None:
        """The version whose classes were run."""
        return load_classes(self.classes).version if self.classes else None

    @property
    def is_of_classes(self) -> bool:
        """Whether this is the version whose classes were run."""
        ran = self.classes_version
        return ran is not None and (not self.asked or _parse(self.asked) == _parse(ran))

    @property
    def latent_fate(self) -> str:
        """What becomes of scales where latents are cached (MLA)."""
        return self.latent or f"whether {self.engine} computes with scales of latents is not known"

    def class_caches_latents(self, config: Mapping[str, Any]) -> bool:
        """Whether the class that config.json names was run and caches latents (MLA)."""
        return bool(self.classes) and architecture(config) in load_classes(self.classes).latent

    def fates(
        self, config: Mapping[str, Any], quantization: str, modules: Iterable[str] = ()
    ) -> Fates | str | None:
        """What the model's class does with scales, or why that is not known; None: all do alike.

        `modules` are attention modules, as the checkpoint names them.
        """
        if self.classes:
            if not self.is_of_classes:
                return f"not known: its classes were run at {self.classes_version} alone"
            return load_classes(self.classes).fates(config, quantization, modules)
        name = architecture(config)
        if not self.architectures:
            return None
        if name in self.architectures:
            other = next((m for m in modules if pattern_of(m) != self.modules), None)
            return other and f"not known: the rules were read for '{self.modules}', not '{other}'"
        return (
            f"not known for {name or 'a model whose config.json does not name one architecture'}: "
            f"the rules were read for {', '.join(self.architectures)}"
        )

    def target(self, name: str, method: Method | None) -> str:
        """The name that the engine looks for, for the tensor called `name` on disk."""
        for entry in (*(method.remap if method else ()), *self.remap):
            name, count = re.subn(entry.pattern, entry.to, name)
            if count and self.first_remap:
                break
        return name


@cache
def all_rules() -> dict[str, Rules]:
    """Every engine's rules, by file name."""
    files = sorted(Path(__file__).parent.glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: Rules.model_validate(yaml.safe_load(file.read_text())) for file in files}


def choose_rules(engine: str | None, version: str | None) -> list[Rules]:
    """The rules of `engine` at `version`, or of the newest version of every engine."""
    newest = _newest()
    if engine is None:
        if version:
            raise InputError(f"--version {version}: of which engine? Add --engine")
        return [*newest.values()]
    if engine not in newest:
        raise InputError(f"--engine {engine} is not one of {', '.join(newest)}")
    if version is None:
        return [newest[engine]]
    family = [rules for rules in all_rules().values() if rules.engine == newest[engine].engine]
    found = [rules for rules in family if _holds(rules, _parse(version))]
    if not found:
        known = "; ".join(rules.versions for rules in family)
        raise InputError(f"--version {version[:40]}: there are rules for {engine} {known}")
    return [rules.model_copy(update={"asked": version}) for rules in found]


def _newest() -> dict[str, Rules]:
    """The rules of every engine that begin at the latest version."""
    by_start = sorted(all_rules().items(), key=lambda item: _parse(item[1].since or "0"))
    last = {rules.engine: name for name, rules in by_start}
    return {name: rules for name, rules in all_rules().items() if last[rules.engine] == name}


def _holds(rules: Rules, version: Version) -> bool:
    after = not rules.since or version >= _parse(rules.since)
    return after and (not rules.until or version < _parse(rules.until))


def _parse(version: str) -> Version:
    """A version without what its builder adds: 0.32.0+cpu is 0.32.0."""
    try:
        return Version(Version(version).public)
    except ValueError:
        raise InputError(f"--version {version[:40]} is not a version such as 0.23.1") from None
