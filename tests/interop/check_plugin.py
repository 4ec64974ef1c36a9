"""Serve hand-made directories with `vllm serve`, our wheel installed; read what the plugin says.

check_plugin.py WHEEL   exit 0 if the line is right for each directory, and only the good ones are
                        served where FP8KV_REQUIRE_SCALES is set; a bad one is where it is not
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scale_cases import CASES, write_case
from vllm_server import install, serving

OPTIONS = ["--skip-tokenizer-init", "--max-model-len", "128", "--num-gpu-blocks-override", "8"]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Served:
    """A directory, how it is served, and the line that the plugin must write."""

    name: str
    line: str
    change: Callable[[Tensors], Tensors] = dict
    case: str = "one scale per layer, [1]"
    options: tuple[str, ...] = ()
    doubled: str = ""
    required: bool = True  # FP8KV_REQUIRE_SCALES
    serves: bool = False


def without_a_layer(scales: Tensors) -> Tensors:
    """The files have no scales for layer 1."""
    return {name: x for name, x in scales.items() if "layers.1." not in name}


def one_for_both(scales: Tensors) -> Tensors:
    """Layer 1 has one scale for K and V, which vLLM gives to K alone."""
    shared = scales.pop("model.layers.1.self_attn.k_scale")
    del scales["model.layers.1.self_attn.v_scale"]
    return scales | {"model.layers.1.self_attn.kv_scale": shared}


def all_ones(scales: Tensors) -> Tensors:
    """Nobody measured."""
    return {name: torch.ones_like(x) for name, x in scales.items()}


GOOD = "fp8kv: 4 of 4 KV scales in use, FP8 cache"
LACKS = (
    "fp8kv: 2 of 4 KV scales in use, FP8 cache; "
    "K has no scale in the files and is at 1.0 in layer 1; V has no scale"
)
DROPS = (
    "fp8kv: 3 of 4 KV scales in use, FP8 cache; V is at 1.0: the engine dropped the file's scale in layer 1"
)
SERVED = [
    Served("good", GOOD, serves=True),
    Served("a layer without scales", LACKS, without_a_layer),
    # one bad directory shows that without the variable a warning is all
    Served("the same, not required", LACKS, without_a_layer, required=False, serves=True),
    Served("a scale that vLLM drops", DROPS, one_for_both),
    Served("doubled", "0 of 4 KV scales in use, FP8 cache; K is twice the file's", doubled="all"),
    Served(
        "the numbers doubled that vLLM's kernel for CPUs reads",
        "0 of 4 KV scales in use, FP8 cache; K's copy _k_scale_float is twice the file's",
        doubled="floats",
    ),
    Served(
        "shards of scales per head",
        GOOD,
        case="per head, [H, 1, 1]",
        options=("--tensor-parallel-size", "2"),
        serves=True,
    ),
    Served(
        "two pipeline stages, one of them left in 16 bits",
        "fp8kv: 2 of 2 KV scales in use, FP8 cache",
        options=("--pipeline-parallel-size", "2", "--kv-cache-dtype-skip-layers", "0"),
        serves=True,
    ),
    Served("at 1.0", "0 of 4 KV scales in use, FP8 cache; K is 1.0 in the files", all_ones),
]


def main() -> None:
    """Serve every directory."""
    work = Path(tempfile.mkdtemp())
    packages = install(work / "packages", Path(sys.argv[1]))
    chosen = [each for each in SERVED if each.name in sys.argv[2:]] or SERVED
    right = [check(each, work / f"model-{i}", packages) for i, each in enumerate(chosen)]
    sys.exit(0 if all(right) else 1)


def check(case: Served, directory: Path, packages: Path) -> bool:
    """Serve a tiny model; whether the line is right and it serves or ends as it must."""
    (made,) = [each for each in CASES if each.name == case.case]
    file = write_case(made, directory) / "scales.safetensors"
    save_file(case.change(load_file(file)), file, {"format": "pt"})
    faults = {"DOUBLED": case.doubled} if case.doubled else {}
    required = "1" if case.required else ""
    with serving(directory, packages, *OPTIONS, *case.options, FP8KV_REQUIRE_SCALES=required, **faults) as (
        url,
        log,
    ):
        serves = url is not None
    said = [line for line in log.read_text().splitlines() if "fp8kv: " in line]
    is_right = any(case.line in line for line in said) and serves == case.serves
    print(f"{'ok   ' if is_right else 'WRONG'} {case.name}: serves {serves}; {said}", flush=True)
    return is_right


if __name__ == "__main__":
    main()
