"""Keep a quantised tiny Llama beside the weights that its own tool makes of the codes.

Needs torch, transformers and tokenizers of the tool's environment, and nothing of ours.
"""

import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_llama import CONFIGS, GOLDEN
from torch import Tensor

# two groups of 32 in each row of Q, K, V and O; one scale per block is another matter
SHAPE = {"hidden_size": 64, "heads": (2, 1)}
# whole blocks of 128, and parts of one, along the rows of O and the columns of Q, K and V
BLOCK_SHAPE = {"hidden_size": 160, "heads": (1, 1)}
# no matrix of fewer than 64 outputs
WIDE_SHAPE = {"hidden_size": 64, "heads": (2, 2), "intermediate_size": 64}
ATTENTION = re.compile(r"(.*\.self_attn\.[qkvo]_proj)\.(.+)")

Parts = dict[str, dict[str, Tensor]]  # module -> "weight_packed", "qzeros" ... -> tensor


def attention_parts(written: Path) -> Parts:
    """Read the stored tensors of Q, K, V and O of every layer, by module."""
    found: Parts = {}
    for file in sorted(written.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if match := ATTENTION.fullmatch(name):
                found.setdefault(match[1], {})[match[2]] = tensor
    return found


def keep(
    written: Path,
    package: str,
    case: str,
    weights: Mapping[str, Tensor],
    how: str,
    experts: Mapping[str, Tensor] | None = None,
) -> None:
    """Copy an output; `weights` [rows, columns] are float32, by module; `how` names the code they are from.

    `experts` are by the names of their tensors.
    """
    golden = GOLDEN / "quantized" / f"{package}-{version(package)}" / case
    shutil.rmtree(golden, ignore_errors=True)
    golden.mkdir(parents=True)
    for file in sorted(written.iterdir()):
        if file.suffix == ".safetensors" or file.name in CONFIGS:
            shutil.copy(file, golden)
    assert len(weights) == 8 or experts, sorted(weights)
    named = {f"{name}.weight": weight for name, weight in sorted(weights.items())}
    tensors = {name: smallest(weight) for name, weight in (named | (experts or {})).items()}
    save_file(tensors, golden / "dequantized.safetensors", {"how": how})
    size = sum(file.stat().st_size for file in golden.iterdir())
    print(f"{golden}: {size} bytes, {sorted({str(t.dtype) for t in tensors.values()})}")


def smallest(weight: Tensor) -> Tensor:
    """Narrow values, of any shape, to 16 bits where these hold them, else keep float32."""
    assert weight.isfinite().all()
    weight = weight.detach().float().contiguous()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(dtype).float(), weight):
            return weight.to(dtype)
    return weight
