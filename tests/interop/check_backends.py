"""Where vLLM serves a cache type, in how many bytes: its own backends, for GPUs not there, and us.

vLLM's flags accept every type everywhere, and so do its backends an FP8 type on an A100, where
its Triton writer then fails: that it can be compiled is asked as well.
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

import fake_gpu
import torch
import triton
from outputs import report
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from calib.caches.types import CACHES, CacheType, Serving, cache_type

HEAD_DIMS = (32, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
HEADS = 3
FLAG = "--kv-cache-dtype "
# where bytes are stored: their type in Triton
_STORED = {"fp8_per_token_head": "fp8e4nv", "int8_per_token_head": "i8"}


def names(kind: CacheType) -> set[str]:
    """What vLLM calls the type: what its flags say."""
    flags = [s.flag for s in kind.servings if s.engine == "vllm"]
    return {flag.removeprefix(FLAG).split()[0] for flag in flags}


def backends(platform, name: str, head_dim: int) -> list[type]:
    """The backends of vLLM that take the type there and can write it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=head_dim, dtype=torch.bfloat16, kv_cache_dtype=name, block_size=None
    )
    capability = platform.get_device_capability()
    found, _ = platform.get_valid_backends(capability, config)
    # tuples of other fields on CUDA and on ROCm
    chosen = {getattr(candidate, "backend", candidate[0]) for candidate in found}
    if not triton_writes(platform, name):
        chosen.discard(AttentionBackendEnum.TRITON_ATTN)
    return [backend.get_class() for backend in chosen]


def triton_writes(platform, name: str) -> bool:
    """Whether vLLM's Triton backend can store the type there: its own check, or a compiler's."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import _is_supported_kv_cache_dtype

    if name in _STORED and platform.is_cuda():
        return compiles(_STORED[name], platform.get_device_capability().to_int())
    return _is_supported_kv_cache_dtype(name)


@cache
def compiles(stored: str, capability: int) -> bool:
    """Whether vLLM's writer of per-token-head types can be compiled for a GPU."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import _reshape_cache_per_token_head

    kernel = _reshape_cache_per_token_head
    types = {"key_ptr": "*bf16", "value_ptr": "*bf16", "slot_mapping_ptr": "*i64"}
    types |= dict.fromkeys(("k_scale_cache_ptr", "v_scale_cache_ptr"), "*fp32")
    types |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), f"*{stored}")
    signature = {p.name: "constexpr" if p.is_constexpr else "i64" for p in kernel.params} | types
    numbers = {"block_size": 16, "head_size": 64, "head_size_v": 64, "HEAD_SIZE_PADDED": 64}
    numbers |= {"QUANT_MAX": 127.0, "QUANT_MIN": -128.0, "IS_INT_QUANT": stored == "i8"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=numbers)
    try:
        triton.compile(source, target=GPUTarget("cuda", capability, 32))
    except triton.CompilationError as error:
        reason = f"{error} {error.__cause__}"
    else:
        return True
    assert "fp8e4nv" in reason, reason
    return False


def compare(platform, kind: CacheType, gpu: str, name: str) -> Iterator[str]:
    """What vLLM and our facts say differently of a type on a GPU, for every head size."""
    for head_dim in HEAD_DIMS:
        ours = kind.serving("vllm", gpu, head_dim)
        chosen = backends(platform, name, head_dim)
        if bool(chosen) != isinstance(ours, Serving):
            said = "takes" if chosen else "refuses"
            yield f"{kind.name} on {gpu}, {head_dim}: vLLM {said} it; we: {ours}"
        for backend in chosen:
            if (theirs := bytes_per_token(backend, name, head_dim)) != (
                mine := kind.bytes_per_token([(HEADS, head_dim, head_dim)])
            ):
                where = f"{backend.get_name()} on {gpu}"
                yield f"{kind.name}, {head_dim}, {where}: {theirs} bytes per token; we: {mine}"


def bytes_per_token(backend, name: str, head_dim: int) -> float:
    """What vLLM allocates for a token of a layer of HEADS heads."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=HEADS,
        head_size=head_dim,
        dtype=STR_DTYPE_TO_TORCH_DTYPE[name],
        kv_quant_mode=get_kv_quant_mode(name),
    )
    return backend.customize_spec(spec).page_size_bytes / spec.block_size


def flags_parse(types: list[CacheType]) -> None:
    """Give every flag to vLLM's own parser, and see that it does not have the other types."""
    from vllm.config.cache import CacheDType
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for kind in types:
        assert names(kind) or kind.name not in get_args(CacheDType), kind.name
        for serving in kind.servings:
            if serving.engine == "vllm":
                given = parser.parse_args(serving.flag.split())
                assert given.kv_cache_dtype in names(kind), serving.flag


def main() -> None:
    """Ask for every type, GPU and head size."""
    platform = fake_gpu.install()
    types = [cache_type(name) for name in ("fp8", *CACHES)]
    asked = [(one, name) for one in types for name in sorted(names(one))]
    problems = []
    for gpu in fake_gpu.GPUS:
        fake_gpu.become(platform, gpu)
        for one, name in asked:
            problems += compare(platform, one, gpu, name)
    flags_parse(types)
    count = len(asked) * len(fake_gpu.GPUS) * len(HEAD_DIMS)
    report(
        Path("cache types in vLLM"),
        problems,
        f"{count} answers of its backends and sizes, the same",
    )


if __name__ == "__main__":
    main()
