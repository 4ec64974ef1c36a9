"""vLLM in this process: serving, or loading alone, for a CPU that vLLM has no FP8 kernel for."""

import os
import tempfile
from pathlib import Path

import torch

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
NO_KERNEL = "this CPU has neither AVX-512 nor AMX, which vLLM's FP8 cache needs"


def has_fp8_kernels() -> bool:
    """Whether vLLM can serve with an FP8 cache on this CPU."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def set_environment() -> None:
    """Set what vLLM reads when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start(directory: Path, **options):
    """An engine that holds `directory`."""
    set_environment()
    from vllm import LLM

    return LLM(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)


def load(directory: Path, **options) -> torch.nn.Module:
    """The model of `directory` as vLLM's own loader leaves it; nothing is served."""
    set_environment()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    # as vLLM's worker for the CPU does
    torch.accelerator.empty_cache = lambda: None
    config = EngineArgs(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)
    config = config.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = Path(tempfile.mkdtemp(), "rendezvous")
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        return get_model(vllm_config=config)
