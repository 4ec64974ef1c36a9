"""Whether the classes that an engine's file lists as `unknown_exceptions` are those that do otherwise.

misspelt_scales.py vllm|sglang   prints each class that is listed wrongly; ends with 1 if there is one
"""

import sys
from importlib import import_module
from typing import Any

import torch
from engine_cases import QUANTIZATIONS, Fixture, build, fixtures

from calib.engines.catalogue import find_engine

NAMES = ("kscale", "k_scales", "K_scale", "value_scale", "kv-scale")


def stops(engine: Any, fixture: Fixture) -> bool | None:
    """Whether loading ends at a misspelt scale; None where the class cannot be built."""
    try:
        model = build(engine, fixture, QUANTIZATIONS["compressed-tensors"])
    except Exception:  # noqa: BLE001  whatever the engine raises
        return None
    results = set()
    for name in NAMES:
        try:
            engine.hold(model, [(f"{fixture.modules[0]}.{name}", torch.tensor([0.5]))])
            results.add(False)
        except Exception:  # noqa: BLE001
            results.add(True)
    return max(results)


def main(name: str) -> None:
    """Compare every class with the file of the engine's version."""
    engine = getattr(import_module(f"{name}_classes"), {"vllm": "VLLM", "sglang": "SGLang"}[name])()
    rules, wrong = find_engine(name, engine.version), []
    for fixture in fixtures([]):
        is_listed = fixture.architecture in rules.unknown_exceptions
        if stops(engine, fixture) not in (None, (rules.unknown == "refused") != is_listed):
            print(f"{fixture.name}: listed wrongly", flush=True)
            wrong.append(fixture.name)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1])
