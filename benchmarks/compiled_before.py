"""Kernels as they were compiled last time: what is worse now is a finding, what is better is kept.

`results/compiled_kernels.json`; compilers differ, so versions other than its own compare nothing.
"""

import json
from pathlib import Path
from typing import Any

import triton
from kernels.bound import Bound
from kernels.inspect_asm import Finding

FILE = Path(__file__).parent / "results" / "compiled_kernels.json"
# a share of the memory's or the matrices' rate; less is how instructions happen to be scheduled
TOLERANCE = 0.02

Kernels = dict[str, dict[str, Any]]  # "target kernel variant" -> its Bound


def read(file: Path = FILE) -> Kernels:
    """Read what was written with this version of Triton; nothing without such a file."""
    if not file.exists():
        return {}
    document = json.loads(file.read_text())
    return document["kernels"] if document["triton"] == triton.__version__ else {}


def write(kernels: Kernels, file: Path = FILE) -> None:
    """Write what later compilations are compared with."""
    document = {
        "what": "predicted from compiled code (benchmarks/kernels/bound.py), not measured",
        "triton": triton.__version__,
        "kernels": {name: _rounded(kernels[name]) for name in sorted(kernels)},
    }
    file.write_text(json.dumps(document, indent=1) + "\n")


def worse(name: str, bound: Bound, before: Kernels) -> list[Finding]:
    """Yield what has become worse since."""
    old = before.get(name)
    if old is None:
        return []
    found = []
    if bound.programs < old["programs"]:
        found.append(Finding(f"{bound.programs} programs at once", f"{old['programs']} as before"))
    share = max(bound.of_memory, bound.of_matrix)
    before_share = max(old["of_memory"], old["of_matrix"])
    if share < before_share - TOLERANCE:
        found.append(Finding(f"{share:.0%} left by {bound.limit}", f"{before_share:.0%} as before"))
    return found


def _rounded(bound: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in bound.items()}
