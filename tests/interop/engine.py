"""vLLM in this process: serving, or only loading."""

from pathlib import Path

import torch
import torch_kernels
from vllm_process import OPTIONS, join_group, set_environment

from calib.engines.catalogue import Engine, find_engine
from calib.engines.outcome import Place

ONE_GPU = Place()


def installed_engine() -> Engine:
    """The catalogue's file for the vLLM that is installed, which may not be the newest."""
    set_environment()
    import vllm

    return find_engine("vllm", vllm.__version__)


def kernels() -> str:
    """Whose kernels serve an FP8 cache on this CPU."""
    return "torch's (no AVX-512)" if torch_kernels.is_needed() else "vLLM's"


def start(directory: Path, **options):
    """An engine that holds `directory`."""
    set_environment()
    from vllm import LLM

    if torch_kernels.is_needed():
        torch_kernels.install()
    return LLM(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)


def configure(directory: Path, **options):
    """vLLM's settings for a model that this process only loads."""
    set_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    # a class is looked at in this process, not in one of its own, which would want pictures
    registry._run_in_subprocess = lambda function: function()
    # as vLLM's worker for the CPU does
    torch.accelerator.empty_cache = lambda: None
    arguments = EngineArgs(model=str(directory), use_tqdm_on_load=False, **OPTIONS, **options)
    return arguments.create_engine_config()


def load(directory: Path, place: Place = ONE_GPU, rank: int = 0, **options) -> torch.nn.Module:
    """The model of `directory` as vLLM's own loader leaves it on `rank`; nothing is served."""
    set_environment()
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    type(current_platform).is_fp8_fnuz = lambda *_: place.fnuz
    config = configure(directory, **options)
    config.parallel_config.tensor_parallel_size = place.ranks
    with set_current_vllm_config(config):
        join_group(place.ranks, rank)
        return get_model(vllm_config=config)
