"""vLLM in this process: its settings, and the group of processes that its layers ask for."""

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


def set_environment() -> None:
    """Set what vLLM reads when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def join_group(ranks: int, rank: int) -> None:
    """Enter the group of processes that hold the model, once."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        meeting = Path(os.environ.get("RENDEZVOUS") or Path(tempfile.mkdtemp(), "rendezvous"))
        # as vLLM's worker does: with AVX-512 ranks share memory under this name
        os.environ["VLLM_DIST_IDENT"] = meeting.parent.name
        init_distributed_environment(ranks, rank, f"file://{meeting}", 0, "gloo")
        ensure_model_parallel_initialized(ranks, 1)
