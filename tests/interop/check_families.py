"""Load our outputs for every family with the engine's own loader: all scales are in use.

check_families.py OUT vllm|sglang   OUT as `write_models.py families` leaves it; exit 0 if each
                                    output is loaded whole, and refused only where the engine loads
                                    nothing
"""

import sys
from pathlib import Path

import no_pictures  # noqa: F401 (before an engine)
import torch
from torch import nn

from calib.engines.catalogue import find_engine
from calib.engines.model_classes import NAMES
from calib.engines.outcome import Place
from calib.files.stored_scales import read_scales
from calib.serving.loaded_scales import compare
from calib.serving.plugin import sglang_layers, vllm_layers

FORMATS = {"vllm": ("vllm", "modelopt"), "sglang": ("sglang",)}
KINDS = {"vllm": "compressed-tensors", "sglang": "compressed-tensors", "modelopt": "modelopt"}


def load(engine: str, directory: Path) -> nn.Module:
    """The model as the engine's loader leaves it, weights and all in vLLM."""
    if engine == "vllm":
        from engine import load as load_vllm

        return load_vllm(directory, kv_cache_dtype="fp8")
    from check_verify import scales_of
    from sglang_classes import load as load_sglang

    return load_sglang(directory, scales_of(directory))


def verdict(engine: str, name: str, home: Path) -> tuple[bool, str]:
    """Whether a format's output is right, and what was found."""
    refused = home / f"{name}.refused"
    if refused.exists():
        from engine import installed_engine

        known = installed_engine() if engine == "vllm" else find_engine(engine)
        fates = known.classes.results[home.name][KINDS[name]]
        nothing = all(fates[naming] != "loaded" for naming in NAMES)
        return nothing, f"refused: {refused.read_text().strip()}"
    model = load(engine, home / name)
    layers = vllm_layers(model) if engine == "vllm" else sglang_layers(model, True)
    report = compare([*layers], read_scales(home / name), Place())
    return report.total > 0 and not report.problems, str(report)


def main() -> None:
    """Check every family."""
    out, engine = Path(sys.argv[1]), sys.argv[2]
    # a model with experts first: its groups do for all
    homes = sorted(out.iterdir(), key=lambda home: (home.name != "MixtralForCausalLM", home.name))
    wrong = 0
    for home in homes:
        for name in FORMATS[engine]:
            is_right, found = verdict(engine, name, home)
            wrong += not is_right
            print(f"{'OK' if is_right else 'WRONG'} {home.name} {name}: {found}", flush=True)
    sys.exit(f"FAILED: {wrong}" if wrong else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
