"""vLLM in this process, serving or only loading; what our output directories say; lines of results."""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch_kernels
from safetensors.torch import load_file
from torch import Tensor
from vllm_process import OPTIONS, join_group, set_environment

from calib.engines.catalogue import find_engine
from calib.engines.outcome import Place

ONE_GPU = Place()
SCALES_FILE, STATS_FILE = "model-fp8kv-scales.safetensors", "fp8kv_stats.safetensors"
_SCALE = re.compile(r"(?P<attention>.+\.self_attn)\.(?:[kv]_proj\.)?(?P<which>[qkv])_scale")


def installed_engine():
    """The catalogue's file for the vLLM that is installed, which may not be the newest."""
    set_environment()
    import vllm

    return find_engine("vllm", vllm.__version__)


def prepare() -> None:
    """What vLLM needs to serve an FP8 cache in this process."""
    set_environment()
    if torch_kernels.is_needed():
        torch_kernels.install()
        print("torch's kernels for an FP8 cache: there is no AVX-512")


def start(directory: Path, **options):
    prepare()
    from vllm import LLM

    return LLM(model=str(directory), use_tqdm_on_load=False, **OPTIONS | options)


def generate(llm, prompt, **options):
    """What the engine says to one prompt."""
    from vllm import SamplingParams

    return llm.generate([prompt], SamplingParams(**options), use_tqdm=False)[0]


def configure(directory: Path, **options):
    """vLLM's settings for a model that this process only loads."""
    set_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    # a class is looked at in this process, not in one of its own, which would want pictures
    registry._run_in_subprocess = lambda function: function()
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for the CPU does
    arguments = EngineArgs(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)
    return arguments.create_engine_config()


def load(directory: Path, place: Place = ONE_GPU, rank: int = 0, **options) -> torch.nn.Module:
    """The model of `directory` as vLLM's own loader leaves it on `rank`; nothing is served."""
    set_environment()
    from vllm.platforms import current_platform

    type(current_platform).is_fp8_fnuz = lambda *_: place.fnuz
    config = configure(directory, **options)
    config.parallel_config.tensor_parallel_size = place.ranks
    return load_configured(config, rank)


def load_configured(config, rank: int = 0) -> torch.nn.Module:
    """The same by vLLM's settings."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        join_group(config.parallel_config.tensor_parallel_size, rank)
        return get_model(vllm_config=config)


class Output(NamedTuple):
    config: dict
    quantization: dict  # empty where the format has none
    scales: dict[str, dict[str, Tensor]]  # attention module -> q, k, v -> float32, as in the file
    scales_per_layer: int


def read_output(directory: Path) -> Output:
    """Read an output directory without our package."""
    scales = defaultdict(dict)
    for name, tensor in load_file(directory / SCALES_FILE).items():
        if match := _SCALE.fullmatch(name):
            scales[match["attention"]][match["which"]] = tensor
    config = json.loads((directory / "config.json").read_text())
    quantization = config.get("quantization_config", {})
    is_per_head = quantization.get("kv_cache_scheme", {}).get("strategy") == "attn_head"
    return Output(config, quantization, dict(scales), config["num_key_value_heads"] if is_per_head else 1)


def report(what: object, problems: list[str], success: str) -> None:
    """Print one line, and leave with status 1 if there are problems."""
    if problems:
        sys.exit(f"FAILED {what}: {len(problems)} problems: {'; '.join(problems[:3])}")
    print(f"OK {what}: {success}", flush=True)


def tell(results) -> None:
    """Print each name and whether it is right; leave with status 1 if one is not, or there is none."""
    right = []
    for name, is_right in results:
        print(f"{'OK' if is_right else 'WRONG'} {name}", flush=True)
        right.append(is_right)
    sys.exit(0 if right and all(right) else f"FAILED: {right.count(False)} of {len(right)}")
