"""Scales of every name for a model class of an engine, and what became of them.

An engine's own script builds its classes from the small configs in architectures/, gives them
scales, and says what the attention layers compute with. This part is the same for all engines.
"""

import json
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from engine_fates import Held, Pair, Scale, fate, natural, reason

FIXTURES = Path(__file__).parent / "architectures"

NAMINGS = (
    "{module}.{x}_scale",
    "{module}.attn.{x}_scale",
    "both",
    "{module}.{x}_proj.{x}_scale",
    "{module}.{x}_proj.output_scale",
    "{module}.qkv_proj.{x}_scale",
    "{module}.kv_scale",
    "{module}.{x}_cache.scale",
)
MLA_NAMINGS = ("{module}.attn_mqa.{x}_scale", "{module}.mla_attn.mla_attn.{x}_scale")
# what checkpoints of a model that sees have before `layers`: transformers has renamed it twice
PREFIXES = ("model", "model.language_model", "language_model.model", "language_model")
_LAYERS = re.compile(r"^(?:.+?\.)??(?=(?:decoder\.)?layers\.)")
# a base model's own checkpoint, such as GPT-2's, lacks it
_BASE = re.compile(r"^(?:transformer|model(?=\.decoder))\.")


@dataclass(frozen=True)
class Quantization:
    """What config.json says, and hf_quant_config.json beside it."""

    config: dict[str, Any] | None
    document: dict[str, Any] | None = None
    per_head: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the engine's command line


_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
_PRODUCER = {"name": "fp8kv"}


def _compressed(strategy: str) -> dict[str, Any]:
    """As calib/formats/compressed_tensors.py writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": _SCHEME | {"strategy": strategy, "symmetric": True},
    }


MODELOPT = Quantization(  # as calib/formats/modelopt.py writes it
    {
        "quant_method": "modelopt",
        "kv_cache_scheme": _SCHEME,
        "ignore": ["*"],
        "producer": _PRODUCER,
        "quant_algo": "FP8",
    },
    {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["*"],
        },
    },
)
_OUTPUT = {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
QUANTIZATIONS = {
    "compressed-tensors": Quantization(_compressed("tensor")),
    "compressed-tensors attn_head": Quantization(_compressed("attn_head"), per_head=True),
    "modelopt": MODELOPT,
    "modelopt transformers": replace(MODELOPT, options={"model_impl": "transformers"}),
    # of FP8 weights, none of which are loaded
    "fp8": Quantization({"quant_method": "fp8", "activation_scheme": "dynamic"}),
    # scales of K and V alone
    "quark": Quantization(
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
            "layer_quant_config": dict.fromkeys(("*k_proj", "*v_proj"), _OUTPUT),
            "layer_type_quant_config": {},
            "global_quant_config": {},
            "exclude": [r"re:.*(?<!\.attn)$"],
        }
    ),
    "none": Quantization(None),
}


@dataclass(frozen=True)
class Fixture:
    """A small model: its config.json, and its attention modules as a checkpoint names them."""

    name: str
    config: dict[str, Any]
    modules: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """The class; a second config of it has a name such as `Gemma4ForCausalLM-shared`."""
        return self.name.partition("-")[0]

    @property
    def is_mla(self) -> bool:
        """K and V are cached as one latent."""
        text = self.config.get("text_config") or {}
        return bool(text.get("kv_lora_rank") or self.config.get("kv_lora_rank"))

    def spellings(self) -> list["Fixture"]:
        """The same model with the other names that published checkpoints may call attention."""
        if self.architecture.endswith("ForConditionalGeneration"):
            prefixes = [(_LAYERS, f"{prefix}.") for prefix in PREFIXES]
        else:
            prefixes = [(_BASE, "")]
        found = [tuple(p.sub(to, m, count=1) for m in self.modules) for p, to in prefixes]
        return [replace(self, modules=each) for each in found if each != self.modules]


class Engine(Protocol):
    """What an engine's own script has."""

    name: str
    version: str
    quantizations: tuple[str, ...]
    of_latents: tuple[str, ...]  # and these, where latents are cached (MLA)

    def build(self, directory: Path, **options: Any) -> Any:
        """The engine's class for config.json, without weights; raises what the engine raises."""

    def caches_latents(self, model: Any) -> bool:
        """Whether its layers cache latents (MLA)."""

    def heads(self, model: Any) -> int:
        """How many KV heads its attention layers have."""

    def hold(self, model: Any, tensors: list[tuple[str, torch.Tensor]]) -> Held:
        """What the layers compute with after loading scales, [1] or [K, 1, 1], into the model as built."""


def fixtures(names: list[str]) -> list[Fixture]:
    """Those in architectures/, or the ones of these architectures."""
    given = [file for name in names for file in FIXTURES.glob(f"{name}[.-]*json")]
    files, found = sorted(given if names else FIXTURES.glob("*.json")), []
    for file in files:
        config = json.loads(file.read_text())
        found.append(Fixture(file.stem, config, tuple(config.pop("fp8kv_attention"))))
    return found


def namings(fixture: Fixture) -> tuple[str, ...]:
    """The names to try with this model."""
    return NAMINGS + (MLA_NAMINGS if fixture.is_mla else ())


def values(layer: int, letter: str, heads: int) -> Scale:
    """Scales that no other layer, letter or head has, exact in bfloat16."""
    start = {"k": 2.0**-3, "v": 2.0**-5}[letter]
    return tuple(start * (1 + (layer * heads + head) / 64) for head in range(heads))


def wanted(fixture: Fixture, naming: str, heads: int = 1) -> list[Pair]:
    """What each module should compute with; `kv_scale` is one value for both."""
    second = "k" if naming.endswith(".kv_scale") else "v"
    layers = range(len(fixture.modules))
    return [(values(i, "k", heads), values(i, second, heads)) for i in layers]


def scale_tensors(fixture: Fixture, naming: str, heads: int = 0) -> list[tuple[str, torch.Tensor]]:
    """The scales of a checkpoint: `[1]` each, or `[heads, 1, 1]`."""
    shape = (heads, 1, 1) if heads else (1,)
    patterns = NAMINGS[:2] if naming == "both" else (naming,)
    layers = list(zip(natural(fixture.modules), wanted(fixture, naming, heads or 1), strict=True))
    return list(
        {
            pattern.format(module=module, x=letter): torch.tensor(scale).view(shape)
            for pattern in patterns
            for module, pair in layers
            for letter, scale in zip("kv", pair, strict=True)
        }.items()
    )


def collect(engine: Engine, fixture: Fixture) -> dict[str, dict[str, str]] | str:
    """Every case of one architecture, or why its class cannot be built."""
    results = {name: collect_with(engine, fixture, name) for name in engine.quantizations}
    fates = {fate.partition(":")[0] for each in results.values() for fate in each.values()}
    if fates == {"refused"}:
        return results[engine.quantizations[0]][NAMINGS[0]].removeprefix("refused: ")
    names = engine.of_latents if fixture.is_mla else ()
    return results | {name: collect_with(engine, fixture, name) for name in names}


def collect_with(engine: Engine, fixture: Fixture, name: str) -> dict[str, str]:
    """The fate of scales under every name, with one quantization config."""
    try:
        model = build(engine, fixture, QUANTIZATIONS[name])
    except Exception as error:  # noqa: BLE001 (whatever the engine raises)
        return dict.fromkeys(namings(fixture), reason("refused", error))
    per_head = QUANTIZATIONS[name].per_head
    return {each: run_case(engine, model, fixture, each, per_head) for each in namings(fixture)}


def build(engine: Engine, fixture: Fixture, quantization: Quantization) -> Any:
    """The engine's class for it."""
    with tempfile.TemporaryDirectory() as scratch:
        return engine.build(write(fixture, quantization, Path(scratch)), **quantization.options)


def alike(engine: Engine, fixture: Fixture, results: dict[str, dict[str, str]]) -> list[Fixture]:
    """The other spellings of the names with which the class does just what `results` say."""
    return [
        other
        for other in fixture.spellings()
        if all(collect_with(engine, other, name) == fates for name, fates in results.items())
    ]


def write(fixture: Fixture, quantization: Quantization, directory: Path) -> Path:
    """A directory with the JSON files of a checkpoint."""
    config = dict(fixture.config)
    if quantization.config:
        config["quantization_config"] = quantization.config
    (directory / "config.json").write_text(json.dumps(config))
    if quantization.document:
        (directory / "hf_quant_config.json").write_text(json.dumps(quantization.document))
    return directory


def run_case(engine: Engine, model: Any, fixture: Fixture, naming: str, per_head: bool) -> str:
    """Give the model scales under one name."""
    try:
        heads = engine.heads(model) if per_head else 0
        held = engine.hold(model, scale_tensors(fixture, naming, heads))
    except Exception as error:  # noqa: BLE001 (whatever the engine raises)
        return reason("crash", error)
    return fate(wanted(fixture, naming, heads or 1), held)
