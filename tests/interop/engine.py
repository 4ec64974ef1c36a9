"""vLLM in this process: serving, or only loading."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch_kernels

sys.path.insert(0, str(Path(__file__).parents[2]))  # our package: what is used of it needs no torch

from calib.engines.catalogue import Engine, find_engine
from calib.engines.outcome import Place

ONE_GPU = Place()

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # the engine in this process, where its layers can be looked at
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
OPTIONS = {"enforce_eager": True, "max_model_len": 128, "num_gpu_blocks_override": 8}


def installed_engine() -> Engine:
    """The catalogue's file for the vLLM that is installed, which may not be the newest."""
    set_environment()
    import vllm

    return find_engine("vllm", vllm.__version__)


def kernels() -> str:
    """Whose kernels serve an FP8 cache on this CPU."""
    return "torch's (no AVX-512)" if torch_kernels.is_needed() else "vLLM's"


def set_environment() -> None:
    """Set what vLLM reads when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start(directory: Path, **options):
    """An engine that holds `directory`."""
    set_environment()
    from vllm import LLM

    if torch_kernels.is_needed():
        torch_kernels.install()
    return LLM(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)


def load(directory: Path, place: Place = ONE_GPU, rank: int = 0, **options) -> torch.nn.Module:
    """The model of `directory` as vLLM's own loader leaves it on `rank`; nothing is served."""
    set_environment()
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    # as vLLM's worker for the CPU does
    torch.accelerator.empty_cache = lambda: None
    type(current_platform).is_fp8_fnuz = lambda *_: place.fnuz
    config = EngineArgs(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)
    config = config.create_engine_config()
    config.parallel_config.tensor_parallel_size = place.ranks
    with set_current_vllm_config(config):
        join_group(place.ranks, rank)
        return get_model(vllm_config=config)


def join_group(ranks: int, rank: int) -> None:
    """Enter the group of processes that hold the model, once."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        meeting = Path(os.environ.get("RENDEZVOUS") or Path(tempfile.mkdtemp(), "rendezvous"))
        # as vLLM's worker does: with AVX-512 ranks share memory under this name
        os.environ["VLLM_DIST_IDENT"] = meeting.parent.name
        init_distributed_environment(ranks, rank, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(ranks, 1)
