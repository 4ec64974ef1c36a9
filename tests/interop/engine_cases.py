"""Scales of every name for a model class of an engine, and what became of them.

An engine's own script builds its classes from the small configs in architectures/, gives them
scales, and says what the attention layers compute with. This part is the same for all engines.
"""

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

FIXTURES = Path(__file__).parent / "architectures"

Scale = tuple[float, ...]  # one, or one of every KV head
# layer -> its scales of K and V; None where it has no place for any
Held = dict[str, tuple[Scale, Scale] | None]
ONES: tuple[Scale, Scale] = ((1.0,), (1.0,))
LONGEST = 100

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
MLA_NAMINGS = ("{module}.attn_mqa.{x}_scale",)


@dataclass(frozen=True)
class Quantization:
    """What config.json says, and hf_quant_config.json beside it."""

    config: dict[str, Any] | None
    document: dict[str, Any] | None = None
    per_head: bool = False


_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
_PRODUCER = {"name": "fp8kv"}


def _compressed(strategy: str) -> dict[str, Any]:
    """As calib/export/compressed_tensors.py writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": _SCHEME | {"strategy": strategy, "symmetric": True},
    }


MODELOPT = Quantization(  # as calib/export/modelopt.py writes it
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
    # weights in FP8: the engines' scripts see to it that none are made
    "fp8": Quantization({"quant_method": "fp8", "activation_scheme": "dynamic"}),
    # scales of K and V alone
    "quark": Quantization(
        {
            "quant_method": "quark",
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
            "layer_quant_config": dict.fromkeys(("*k_proj", "*v_proj"), _OUTPUT),
            "layer_type_quant_config": {},
            "global_quant_config": {},
            "exclude": ["re:.*"],
        }
    ),
    "none": Quantization(None),
}


@dataclass(frozen=True)
class Fixture:
    """A small model: its config.json, and its attention modules as a checkpoint names them."""

    architecture: str
    config: dict[str, Any]
    modules: tuple[str, ...]

    @property
    def is_mla(self) -> bool:
        """K and V are cached as one latent."""
        text = self.config.get("text_config") or {}
        return bool(text.get("kv_lora_rank") or self.config.get("kv_lora_rank"))


class Engine(Protocol):
    """What an engine's own script has."""

    name: str
    version: str
    quantizations: tuple[str, ...]

    def build(self, directory: Path) -> Any:
        """The engine's class for config.json, without weights; raises what the engine raises."""

    def heads(self, model: Any) -> int:
        """How many KV heads its attention layers have."""

    def hold(self, model: Any, tensors: list[tuple[str, torch.Tensor]]) -> Held:
        """What the layers compute with after loading; each call starts from the model as built."""


def fixtures(names: list[str]) -> list[Fixture]:
    """Those in architectures/, or the ones of these names."""
    files = [FIXTURES / f"{name}.json" for name in names] or sorted(FIXTURES.glob("*.json"))
    found = []
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


def wanted(fixture: Fixture, naming: str, heads: int = 1) -> list[tuple[Scale, Scale]]:
    """What each module should compute with; `kv_scale` is one value for both."""
    second = "k" if naming.endswith(".kv_scale") else "v"
    layers = range(len(fixture.modules))
    return [(values(i, "k", heads), values(i, second, heads)) for i in layers]


def scale_tensors(fixture: Fixture, naming: str, heads: int = 0) -> list[tuple[str, torch.Tensor]]:
    """The scales of a checkpoint: `[1]` each, or `[heads, 1, 1]`."""
    shape = (heads, 1, 1) if heads else (1,)
    patterns = NAMINGS[:2] if naming == "both" else (naming,)
    tensors = {}
    for pattern in patterns:
        for module, scales in zip(
            natural(fixture.modules), wanted(fixture, pattern, heads or 1), strict=True
        ):
            for letter, scale in zip("kv", scales, strict=True):
                name = pattern.format(module=module, x=letter)
                tensors[name] = torch.tensor(scale).view(shape)
    return list(tensors.items())


def natural(names: Any) -> list[str]:
    """Sorted, numbers by their value."""
    return sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in _parts(name)])


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


# ---- the fate of one case ----


def fate(expected: list[tuple[Scale, Scale]], held: Held) -> str:
    """What became of the scales: `expected` in the order of the layers."""
    layers = [held[name] for name in natural(held)]
    if not any(layers):
        return "no place"
    if len(layers) != len(expected):
        return f"partly: {len(layers)} attention layers for {len(expected)} pairs of scales"
    found = [_state(own, layer, expected) for own, layer in zip(expected, layers, strict=True)]
    counts = {state: found.count(state) for state in sorted({*found})}
    if counts == {"loaded": len(found)}:
        return "loaded"
    if {*counts} <= {"at 1.0", "without a place"}:
        return "dropped"
    if len(counts) == 1:
        return f"partly: all {found[0]}"
    return "partly: " + ", ".join(f"{n} of {len(found)} {state}" for state, n in counts.items())


def _state(own: Any, layer: Any, expected: list[tuple[Scale, Scale]]) -> str:
    if layer is None:
        return "without a place"
    if layer == own:
        return "loaded"
    if {*layer[0], *layer[1]} == {1.0}:
        return "at 1.0"
    if layer == (own[1], own[0]):
        return "with K and V crossed"
    if layer in expected:
        return "with another layer's scales"
    right = [letter for letter, a, b in zip("KV", own, layer, strict=True) if a == b]
    return f"with {right[0]} alone" if right else "with a wrong value"


def reason(kind: str, error: BaseException) -> str:
    """`crash: KeyError: ...`: the first sentence, without paths, modules and classes' names."""
    text = re.sub(r"(?:/[\w.+-]+){2,}", "...", " ".join(str(error).split()))
    text = re.sub(r"'(?:\w+\.)+(\w+)'", r"'\1'", text)
    text = re.sub(r" in [A-Z]\w+", "", text).partition(". ")[0]
    return f"{kind}: {f'{type(error).__name__}: {text}'[:LONGEST]}".rstrip()


def collect(engine: Engine, fixture: Fixture) -> dict[str, dict[str, str]] | str:
    """Every case of one architecture, or why its class cannot be built."""
    results, built = {}, False
    for name in engine.quantizations:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                model = engine.build(write(fixture, QUANTIZATIONS[name], Path(scratch)))
        except Exception as error:  # noqa: BLE001 (whatever the engine raises)
            results[name] = dict.fromkeys(namings(fixture), reason("refused", error))
            continue
        built = True
        results[name] = {
            naming: run_case(engine, model, fixture, naming, QUANTIZATIONS[name].per_head)
            for naming in namings(fixture)
        }
    return results if built else results["none"][NAMINGS[0]].removeprefix("refused: ")


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
