"""Load our outputs for every family with the engine's own loader: all scales are in use.

check_families.py OUT vllm|sglang   OUT as `write_models.py families` leaves it; exit 0 if each
                                    output is loaded whole, and refused only where the engine loads
                                    nothing
"""

import sys
from pathlib import Path

import no_pictures  # noqa: F401 (before an engine)
import torch
from engine import installed_engine, tell
from engine import load as load_vllm

from calib.engines.catalogue import find_engine
from calib.engines.loaded_scales import compare, layers_of_files
from calib.engines.model_classes import NAMES
from calib.engines.outcome import Place
from calib.files.stored_scales import read_scales
from calib.serving.engine_layers import vllm_layers
from calib.serving.sglang_worker import sglang_layers

FORMATS = {"vllm": ("vllm", "modelopt"), "sglang": ("sglang",)}


def verdict(engine: str, name: str, home: Path) -> tuple[str, bool]:
    if (refused := home / f"{name}.refused").exists():
        known = installed_engine() if engine == "vllm" else find_engine(engine)
        kind = "modelopt" if name == "modelopt" else "compressed-tensors"
        fates = known.classes.results[home.name][kind]
        nothing = all(fates[naming] != "loaded" for naming in NAMES)
        return f"{home.name} {name}: refused: {refused.read_text().strip()}", nothing
    if engine == "vllm":
        layers = vllm_layers(load_vllm(home / name, kv_cache_dtype="fp8"))
    else:
        from check_verify import scales_of
        from sglang_classes import load

        layers = sglang_layers(load(home / name, scales_of(home / name)), True)
    report = compare([*layers], layers_of_files(read_scales(home / name)), Place())
    return f"{home.name} {name}: {report}", report.total > 0 and not report.problems


if __name__ == "__main__":
    out, engine = Path(sys.argv[1]), sys.argv[2]
    # a model with experts first: its groups do for all
    homes = sorted(out.iterdir(), key=lambda home: (home.name != "MixtralForCausalLM", home.name))
    with torch.no_grad():
        tell(verdict(engine, name, home) for home in homes for name in FORMATS[engine])
