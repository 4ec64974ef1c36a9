"""vLLM on GPUs that are not there: its platforms, told what they run on, choose backends."""

import importlib.machinery
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

# what is there, Triton asks for on import
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
from triton.backends import backends

# NVIDIA's compute capability, or AMD's architecture
GPUS: dict[str, tuple[int, int] | str] = {
    "a100": (8, 0),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "mi300x": "gfx942",
}

# what vLLM imports of builds for GPUs; nothing of it is called when a backend is chosen
_MISSING = (
    "vllm._C_stable_libtorch",
    "flashinfer",
    "flashinfer.decode",
    "flashinfer.prefill",
    "flashinfer.utils",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.third_party.flashmla",
    "vllm.third_party.flashmla.flash_mla_interface",
)


class _Anything(ModuleType):
    """A module that has every name."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def install():
    """Give vLLM a platform whose GPU `become` changes, and return that platform."""
    for name in _MISSING:
        sys.modules[name] = _Anything(name)
    # vLLM's build for CPUs asks for a backend of Triton that nothing here needs
    backends["cpu"] = SimpleNamespace(driver=None)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase

    platform = vllm.platforms._current_platform = CudaPlatformBase()
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils import flashinfer

    assert HAS_TRITON
    del backends["cpu"]
    # FlashInfer downloads some kernels; whether it could is not asked here
    flashinfer.has_nvidia_artifactory = lambda: True
    return platform


def become(platform, gpu: str) -> None:
    """Make `platform` that of `gpu`, and vLLM forget what it knew of another."""
    from vllm.utils import flashinfer

    known = GPUS[gpu]
    platform.__class__ = _amd(known) if isinstance(known, str) else _nvidia(known)
    flashinfer.supports_trtllm_attention.cache_clear()


def _nvidia(capability: tuple[int, int]) -> type:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Nvidia(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

    return Nvidia


def _amd(architecture: str) -> type:
    # read once, when the module is imported
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(gcnArchName=architecture)
    from vllm.platforms.rocm import RocmPlatform

    return RocmPlatform
