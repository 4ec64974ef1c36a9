"""The catalogue of engines: a YAML file beside this module for each engine and range of versions.

`Engine` is the schema of such a file, `vllm-0.33.yaml` for instance. Its section `classes` is written by
`make engines`, the rest by hand.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from calib.caches.types import Attention
from calib.choices import AttentionMode, FP8Name, Strategy
from calib.engines.model_classes import Classes, Fates, architecture
from calib.errors import InputError
from calib.files.cache_type import Divisor
from calib.files.names import pattern_of

FOLDER = Path(__file__).parent
# how a fact is known: the engine's own code was run, or its source was read
Evidence = Literal["run", "read"]
# attention in checkpoints of the classes that rules were read for
_MODULES = "model.layers.N.self_attn"
Stray = Literal["refused", "ignored"]  # what happens to a scale without a place in the model


class Section(BaseModel):
    """A part of an engine's file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Remap(Section):
    """A renaming: a pattern of names on disk, and the engine's name for them."""

    pattern: str
    to: str


class Method(Section):
    """Reading of scales under one `quant_method`."""

    # as `layer_scales` in outcome.py reads scales; none: nothing is read
    kind: Literal["one_or_per_head", "scalar", "pair", "none"]
    why: str = ""  # why nothing is read, if so
    # kv_cache_scheme. both: refused unless type and num_bits are right; either: unless one is; tensor: scales
    # are ignored unless it is static FP8, one scale per layer
    scheme: Literal["both", "either", "tensor"] | None = None
    turns_fp8_on: bool = False  # no flag is needed where the config names an FP8 cache
    needs_static_scheme: bool = False  # a flag is, however, where its kv_cache_scheme is not `dynamic: false`
    algorithms: tuple[str, ...] = ()  # values of quant_algo that were run; without one, refused
    needs: tuple[str, ...] = ()  # keys without which the config is refused
    # how `kv_cache_group` of a Quark config names entries of its `layer_quant_config`
    cache_group: Literal["names", "patterns"] | None = None
    exclude_drops: bool = False  # attention modules that `exclude` names get no scales
    # what gives scales a place under quant_algo MIXED_PRECISION: a kv_cache_scheme of FP8, or NVFP4 layers
    mixed: Literal["scheme", "nvfp4"] | None = None
    needs_fp8_cache: bool = False  # layers have places for scales only if the config names an FP8 cache
    groups_need_weights: bool = False  # each of config_groups must have weights
    through_bf16: bool = False  # values are rounded to the model's 16 bits
    doubles_fnuz: bool = False  # on MI300, as its FP8 type needs
    zero_is_absent: bool = False  # if neither K's nor V's scale exceeds 0, both count as missing
    reads_q: bool = True
    remap: tuple[Remap, ...] = ()  # applied before the engine's own


class Nvfp4(Section):
    """Handling of the calibrated value of an NVFP4 cache."""

    divisor: Divisor  # the value is to be absmax / this
    methods: tuple[str, ...]  # quant_methods with which that cache was run
    flag: str  # what turns that cache on
    format: str = ""  # our format with the right values
    mismatch: str = ""  # what happens with values of the other convention


class HeadSizes(Section):
    """Head sizes that an attention kernel takes."""

    least: int
    most: int | None = None
    multiple: int = 1

    def __contains__(self, size: int) -> bool:
        return self.least <= size <= (self.most or size) and size % self.multiple == 0

    def __str__(self) -> str:
        steps = f"a multiple of {self.multiple}" if self.multiple > 1 else f"{self.least} or more"
        return f"{steps}, at most {self.most}" if self.most else steps


class Backend(Section):
    """The copies of a layer's scales that an attention backend reads; latents (MLA) have K's alone."""

    write: tuple[str, ...]  # on storing K and V
    read: tuple[str, ...]  # on attending to what is stored
    freezes: bool = False  # factors computed at the first step stay, whatever becomes of the scales
    since: str = ""  # the first version that has it, or reads these; empty: all that the file holds for
    head_sizes: HeadSizes | None = None  # with an FP8 cache; None: not known
    takes_scales_per_head: bool = True  # vLLM does not start on a GPU with a backend that does not
    evidence: Evidence
    source: str  # a file of the engine's attention backends
    note: str = ""


class Gpu(NamedTuple):
    """A GPU for `--gpu`."""

    is_fnuz: bool = False  # its FP8 type ends at 240, E4M3FNUZ
    has_scales_per_head: bool = False  # it has attention kernels with them: FlashAttention 3 or 4


GPUS = {
    "a100": Gpu(),
    "l40s": Gpu(),
    "h100": Gpu(has_scales_per_head=True),
    "h200": Gpu(has_scales_per_head=True),
    "b200": Gpu(has_scales_per_head=True),
    "mi300x": Gpu(is_fnuz=True),
}


class CacheSupport(Section):
    """Support for a cache type on some GPUs, for some models."""

    flag: str
    gpus: tuple[str, ...]
    attention: tuple[Attention, ...] = ("heads",)
    head_sizes: tuple[int, ...] | None = None  # none: all from `least_head` on
    least_head: int = 1
    latents: tuple[tuple[int, int], ...] | None = None  # sizes of latent and k_pe; none: all
    models: tuple[str, ...] | None = None  # model types; none: all
    note: str = ""


class Caches(Section):
    """Cache types that the engine has, by their names in `calib.caches`."""

    version: str = ""  # the engine's, whose flags and kernels were read or run
    evidence: Evidence = "read"
    types: dict[str, tuple[CacheSupport, ...]] = {}
    # model classes whose pages tokens_that_fit.py knows: tools/engine_classes/vllm_tokens.py
    pages: tuple[str, ...] = ()


class Kernel(Section):
    """An attention kernel for an FP8 cache, which calib/evaluate/engine_attention.py simulates."""

    name: str
    where: str  # the GPUs on which it runs
    evidence: Evidence
    strategies: tuple[Strategy, ...]
    fp8_types: tuple[FP8Name, ...]
    head_sizes: HeadSizes
    # types to which it rounds queries, K and V, and softmax weights
    queries: Literal["fp8", "16 bits"]
    keys: str
    weights: str


class Engine(Section):
    """An engine, in a range of versions."""

    engine: str  # as its makers write it
    versions: str
    since: str  # the first version that the file holds for
    until: str = ""  # the first version that it no longer holds for
    source: str  # what was read, and when
    evidence: Evidence  # of the rules of loading
    # which safetensors files: those in the index, or all; or kv_cache_scales.json alone
    reads: Literal["index", "all", "json"]
    without_config: Stray = "ignored"  # scales in a checkpoint that has no quantization_config
    without_method: Method | None = None  # how such scales are read, if they are
    unknown: Stray = "ignored"  # scales whose module the model does not have
    unknown_exceptions: tuple[str, ...] = ()  # architectures that do the other with misspelt scales
    methods: dict[str, Method] = {}  # by quant_method; "*": any other
    # that the rules were read for; without these and `classes`, loading does not depend on the model's class
    architectures: tuple[str, ...] = ()
    remap: tuple[Remap, ...] = ()
    first_remap: bool = False  # only the first pattern that fits is applied, not one after another
    # the command that serves {path}, without the flag
    serve: str = ""
    flag: str  # what turns an FP8 cache on
    nvfp4: Nvfp4 | None = None  # None: not known
    latent: str = ""  # what becomes of scales of latents (MLA); empty: not known
    latent_spoils: bool = False  # scales of latents, once loaded, make answers wrong
    latent_classes_at_one: tuple[str, ...] = ()  # cache latents at scale 1.0 (source read, not run)
    latent_refused: str = ""  # why latents cannot be cached in FP8
    latent_ways: tuple[str, ...] = ()  # other ways to serve latents, as advice to the user
    transformers_flag: str = ""  # what chooses its backend for transformers' own code
    per_head_flag: str = ""  # needed besides for a scale per head
    per_head_note: str = ""  # what else a scale per head needs
    skip_flag: str = ""  # what keeps the layers that follow it in 16 bits
    note: str = ""
    caches: Caches = Caches()
    kernels: dict[AttentionMode, Kernel] = {}
    # format -> what may surprise its user; {note} and {since} stand for the fields above
    formats: dict[str, str] = {}
    # copies of a scale in an attention layer: name of the copy -> attribute, {x} is k, v or q. The first copy
    # has a value per head
    scale_copies: dict[str, str] = {}
    backends: dict[str, Backend] = {}
    up_to: dict[str, str] = {}  # version -> what it and those before do to scales in use
    classes: Classes | None = None  # what its model classes did with scales
    # architecture, of a drafter or a model with MTP -> kind of config, or `all` -> names of its scales
    drafts: dict[str, dict[str, tuple[str, ...]]] = {}
    draft_crashes: dict[str, tuple[str, ...]] = {}  # by architecture, with which it does not start
    draft_flag: str = ""  # after the model, what lets the drafter {path} draft for it by its {method}
    version: str = ""  # the one that the user named

    def find_backend(self, name: str) -> Backend:
        """Return the attention backend `name`; an InputError where this version has none that was read."""
        backend = self.backends.get(name)
        if backend is None:
            legal = ", ".join(self.backends) or "none; give a newer --version"
            raise InputError(f"--backend {name}: of {self.title} these were read: {legal}")
        if self.version and backend.since and _parse(self.version) < _parse(backend.since):
            raise InputError(
                f"{self.engine} has --backend {name} since {backend.since}, not in {self.version}"
            )
        return backend

    def skip_argument(self, layers: Iterable[int]) -> str:
        """Return the argument that keeps `layers` in 16 bits."""
        return f"{self.skip_flag} {' '.join(map(str, layers))}"

    @property
    def traps(self) -> list[str]:
        """Harm that this version does to scales in use; none where no version was named."""
        if not self.version:
            return []
        own = _parse(self.version).release[:2]
        return [text for last, text in self.up_to.items() if own <= _parse(last).release]

    @property
    def name(self) -> str:
        """The name for `--engine`."""
        return self.engine.lower()

    @property
    def title(self) -> str:
        """The engine and its version: the one that was asked for, else where its classes ran."""
        return f"{self.engine} {self.version or self.classes_version or self.versions}"

    @property
    def ran(self) -> bool:
        """Return whether the rules of loading were compared with the engine itself."""
        return self.evidence == "run"

    @property
    def classes_version(self) -> str | None:
        """The version whose classes were run."""
        return self.classes.version if self.classes else None

    @property
    def is_run_version(self) -> bool:
        """Return whether this is the version whose classes were run."""
        ran = self.classes_version
        return ran is not None and (not self.version or _parse(self.version) == _parse(ran))

    def class_caches_latents(self, config: Mapping[str, Any]) -> bool:
        """Return whether the class that config.json names was run and caches latents (MLA)."""
        return self.classes is not None and architecture(config) in self.classes.latent

    def fates(
        self, config: Mapping[str, Any], quantization: str, modules: Iterable[str] = ()
    ) -> Fates | str | None:
        """Return what the model's class does with scales, or why that is not known; None: all do alike.

        `quantization` is a kind of config, or "" to ask about the class alone; `modules` are attention
        modules, as the checkpoint names them.
        """
        name = architecture(config)
        if not config and (self.classes or self.architectures):
            return "not known: config.json, which names the model's class, is missing"
        if self.classes:
            if self.is_drafter(config) and (names := self.draft_names(config, quantization)):
                return dict.fromkeys(names, "loaded")
            if not self.is_run_version:
                files = (engine for engine in load_catalogue().values() if engine.name == self.name)
                ran = " and ".join(filter(None, (engine.classes_version for engine in files)))
                nearest = f"the nearest rules are those of --version {self.classes_version}"
                return f"not known: its classes were run at {ran} alone; {nearest}"
            return self.classes.fates(name, quantization, modules, self.engine)
        if not self.architectures:
            return None
        if name in self.architectures:
            stranger = next((m for m in modules if pattern_of(m) != _MODULES), None)
            return stranger and f"not known: the rules were read for '{_MODULES}', not '{stranger}'"
        return (
            f"not known for {name or 'a model whose config.json does not name one architecture'}: "
            f"the rules were read for {', '.join(self.architectures)}"
        )

    def is_drafter(self, config: Mapping[str, Any]) -> bool:
        """Return whether the class that config.json names drafts tokens for a model in another directory."""
        name, classes = architecture(config), self.classes
        return name in self.drafts and classes is not None and name not in classes.results

    def draft_names(self, config: Mapping[str, Any], quantization: str) -> tuple[str, ...]:
        """Return names under which scales of MTP layers are loaded with a kind of config, ours first."""
        names = self.drafts.get(architecture(config) or "", {}) if self.is_run_version else {}
        return names.get(quantization) or names.get("all", ())

    def target(self, name: str, method: Method | None) -> str:
        """Return the name that the engine looks for, for the tensor called `name` on disk."""
        for entry in (*(method.remap if method else ()), *self.remap):
            name, count = re.subn(entry.pattern, entry.to, name)
            if count and self.first_remap:
                break
        return name


@cache
def load_catalogue() -> dict[str, Engine]:
    """Load every file, by its name without `.yaml`; an engine's oldest versions come first."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = ((file.stem, file.read_text("utf-8")) for file in FOLDER.glob("*.yaml"))
    engines = ((name, Engine.model_validate(yaml.load(text, loader))) for name, text in files)
    return dict(sorted(engines, key=lambda item: (item[1].name, _parse(item[1].since))))


def find_engine(name: str, version: str | None = None) -> Engine:
    """Find the file of an engine that holds for `version`, or for the newest; refuse others."""
    engines = [engine for engine in reversed(load_catalogue().values()) if engine.name == name]
    if not engines:
        names = dict.fromkeys(engine.name for engine in load_catalogue().values())
        raise InputError(f"--engine {name} is not one of {', '.join(names)}")
    if version is None:
        return engines[0]
    for engine in engines:
        if _parse(version) >= _parse(engine.since):
            if engine.until and _parse(version) >= _parse(engine.until):
                break
            return engine.model_copy(update={"version": version})
    ranges = "; ".join(engine.versions for engine in reversed(engines))
    problem = f"no rules hold for {engines[0].engine} {version[:40]}"
    raise InputError(f"{problem}; there are some for {ranges}")


def choose_engines(name: str | None, version: str | None) -> list[Engine]:
    """Find the engine `name` at `version`, or every engine; refuse what is newer than all that was read."""
    if name is None:
        if version:
            raise InputError(f"--version {version}: of which engine? Add --engine")
        return [*{engine.name: engine for engine in load_catalogue().values()}.values()]
    engine = find_engine(name, version)
    newest = engine.classes_version or engine.caches.version
    if version and newest and _parse(version).release[:2] > _parse(newest).release[:2]:
        problem = f"--version {version[:40]}: no {engine.engine} after {newest} was read"
        raise InputError(f"{problem}; leave it out for that one")
    return [engine]


def _parse(version: str) -> Version:
    """Parse a version without what its builder adds: 0.32.0+cpu is 0.32.0."""
    try:
        return Version(Version(version).public)
    except ValueError:
        raise InputError(f"--version {version[:40]} is not a version such as 0.23.1") from None
