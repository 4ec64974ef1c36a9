"""Where vLLM serves a cache type, in how many bytes: its own backends, for GPUs not there, and us.

check_backends.py                               every type, GPU and head size
check_backends.py recommended JSON [JSON ...]   `fp8kv recommend --json` of SmolLM2 and its twins for vLLM and
    one GPU: vLLM's parser takes the line, a backend the cache. The answers, measured, differ

vLLM's flags accept every type everywhere, and so do its backends an FP8 type on an A100, where its Triton
writer then fails: that it can be compiled is asked as well. Of latents (MLA) its FP8 Triton reader refuses
an A100 when it is made, which was read.
"""

import importlib.machinery
import json
import os
import shlex
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest.mock import MagicMock, patch

# what is there, Triton asks for on import
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
import triton
from engine import installed_engine, report
from triton.backends import backends as triton_backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from calib.caches.types import CACHES, LATENT_CACHES, CacheType, Shape, cache_type
from calib.engines.cache_support import NotServed, Offer, find_offer

# NVIDIA's compute capability, or AMD's architecture
GPUS = {"a100": (8, 0), "l40s": (8, 9), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "mi300x": "gfx942"}
# what vLLM imports of builds for GPUs; nothing of it is called when a backend is chosen
_MISSING = """
    vllm._C_stable_libtorch flashinfer flashinfer.decode flashinfer.prefill flashinfer.utils
    vllm._flashmla_C vllm._flashmla_extension_C vllm.vllm_flash_attn._vllm_fa2_C
    vllm.vllm_flash_attn._vllm_fa3_C vllm.third_party.flashmla vllm.third_party.flashmla.flash_mla_interface
"""
HEAD_DIMS = (32, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
HEADS = 3
LATENTS = ((512, 64), (576, 192), (256, 32), (256, 64))
ARCHITECTURES = Path(__file__).parents[2] / "tools/engine_classes/architectures"
# where bytes are stored: their type in Triton
_STORED = {"fp8_per_token_head": "fp8e4nv", "int8_per_token_head": "i8"}


def install():
    """Give vLLM a platform whose GPU `become` changes, and return that platform."""
    for name in _MISSING.split():
        sys.modules[name] = MagicMock(__path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
    # vLLM's build for CPUs asks for a backend of Triton that nothing here needs
    triton_backends["cpu"] = SimpleNamespace(driver=None)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase

    platform = vllm.platforms._current_platform = CudaPlatformBase()
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils import flashinfer

    assert HAS_TRITON
    del triton_backends["cpu"]
    # FlashInfer downloads some kernels; whether it could is not asked here
    flashinfer.has_nvidia_artifactory = lambda: True
    return platform


def become(platform, gpu: str) -> None:
    """Make `platform` that of `gpu`, and vLLM forget what it knew of another."""
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import flashinfer

    known = GPUS[gpu]
    if isinstance(known, str):
        # read once, when the module is imported
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(gcnArchName=known)
        from vllm.platforms.rocm import RocmPlatform as kind
    else:
        capability = classmethod(lambda *_, **__: DeviceCapability(*known))
        kind = type("Nvidia", (CudaPlatformBase,), {"get_device_capability": capability})
    platform.__class__ = kind
    flashinfer.supports_trtllm_attention.cache_clear()


def selected(platform, **asked) -> list[type]:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(dtype=torch.bfloat16, block_size=None, **asked)
    candidates, _ = platform.get_valid_backends(platform.get_device_capability(), config)
    # tuples of other fields on CUDA and on ROCm
    return [getattr(candidate, "backend", candidate[0]).get_class() for candidate in candidates]


def support(kind: CacheType):
    return installed_engine().caches.types.get(kind.name, ())


def names(kind: CacheType) -> set[str]:
    return {way.flag.removeprefix("--kv-cache-dtype ").split()[0] for way in support(kind)}


def ours(kind: CacheType, gpu: str, shape: Shape) -> Offer | str:
    """What we say of a type on a GPU; of FP8 with scales, as that can be served where 1.0 clips."""
    try:
        return find_offer(kind.name, [shape], "vllm", gpu, strategy="tensor")
    except NotServed as refusal:
        return str(refusal)


def backends(platform, name: str, head_dim: int) -> list[type]:
    """The backends of vLLM that take the type there and can write it."""
    chosen = selected(platform, head_size=head_dim, kv_cache_dtype=name)
    if "quant" in name and not rotating_writes(platform, name, head_dim):
        return []
    return [b for b in chosen if b.get_name() != "TRITON_ATTN" or triton_writes(platform, name)]


def rotating_writes(platform, name: str, head_dim: int) -> bool:
    """Whether the rotation is of the head size, and TurboQuant's FP8 is E4M3: on an A100 it is E4B15."""
    from vllm.v1.attention.backends.turboquant_attn import _build_hadamard

    if name.endswith("k8v4"):
        return platform.is_cuda() and platform.get_device_capability() >= (8, 9)
    return len(_build_hadamard(head_dim, "cpu")) == head_dim


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
        assert "fp8e4nv" in reason, reason
        return False
    return True


def compare(platform, kind: CacheType, gpu: str, name: str):
    """What vLLM and our facts say differently of a type on a GPU, for every head size."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    types = {"dtype": STR_DTYPE_TO_TORCH_DTYPE[name], "kv_quant_mode": get_kv_quant_mode(name)}
    for head_dim in HEAD_DIMS:
        shape = Shape(HEADS, head_dim, head_dim)
        answer, chosen = ours(kind, gpu, shape), backends(platform, name, head_dim)
        if bool(chosen) != isinstance(answer, Offer):
            yield f"{kind.name} on {gpu}, {head_dim}: vLLM's backends: {chosen}; we: {answer}"
        spec = FullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=head_dim, **types)
        for backend in chosen:
            theirs = backend.customize_spec(spec).page_size_bytes / spec.block_size
            if theirs != (mine := kind.bytes_per_token([shape])):
                yield f"{kind.name}, {head_dim}, {backend} on {gpu}: {theirs} bytes per token; we: {mine}"


def latent_backends(platform, name: str, shape: Shape) -> list[str]:
    """The backends of vLLM that take the type for a latent, and store it as that type."""
    from vllm.model_executor.layers.attention import mla_attention

    # takes a GPU's memory when it is imported
    with patch("torch.empty"), patch("torch.cuda.get_device_properties"):
        from vllm.v1.attention.backends.mla import cutlass_mla  # noqa: F401
    sizes = {"kv_lora_rank": shape.k, "qk_rope_head_dim": shape.v, "qk_nope_head_dim": 128}
    text = SimpleNamespace(**sizes, v_head_dim=128, num_attention_heads=128, index_topk=2048)
    parallel = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1)
    model = SimpleNamespace(hf_text_config=text, hf_config=text)
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model)
    asked = {"use_mla": True, "use_sparse": shape.attention == "sparse latents"}
    with patch("vllm.config.get_current_vllm_config", lambda: vllm_config):
        chosen = selected(platform, head_size=shape.k + shape.v, kv_cache_dtype=name, **asked)
    canonical = mla_attention._canonicalize_sparse_mla_kv_cache_dtype
    stores = [b.get_name() for b in chosen if canonical(b, name) == name]
    old = platform.is_cuda() and platform.get_device_capability().to_int() < 89
    return [backend for backend in stores if not (old and backend == "TRITON_MLA")]


def compare_latents(platform, kind: CacheType, gpu: str, name: str):
    """As `compare`, for the sizes of latents and k_pe, which vLLM's own layer allocates."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=64), model_config=None)
    layer = SimpleNamespace(kv_cache_dtype=name, sliding_window=None, indexer=None)
    vars(layer).update(non_causal_multi_token_decode=False, topk_buffer_width=None)
    for sizes, attention in product(LATENTS, ("latents", "sparse latents")):
        if (gpu, attention) == ("mi300x", "sparse latents"):
            continue  # AITER takes FP8 there, as E4M3FNUZ, of which we claim nothing
        shape = Shape(1, *sizes, attention)
        answer, chosen = ours(kind, gpu, shape), latent_backends(platform, name, shape)
        if bool(chosen) != isinstance(answer, Offer):
            yield f"{kind.name} on {gpu}, {shape}: vLLM's backends: {chosen}; we: {answer}"
        layer.head_size = sum(sizes)
        spec = MLAAttention.get_kv_cache_spec(layer, config) if chosen else None
        if spec and (theirs := spec.page_size_bytes / 64) != (mine := kind.bytes_per_token([shape])):
            yield f"{kind.name}, {shape}: {theirs} bytes per token; we: {mine}"


def model_types(types: list[CacheType]):
    """Model types whose latents we say vLLM caches and it does not, and the other way round."""
    from vllm.config.model import ModelConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    fixtures = {json.loads(f.read_text())["model_type"]: f.stem for f in ARCHITECTURES.iterdir()}
    own = {None, *ModelRegistry.get_supported_archs()}  # of others transformers' code is served
    named = {model for kind in types for way in support(kind) for model in way.models or ()}
    # of minicpm3 vLLM caches K and V of heads, though it is of latent attention
    for model_type in sorted({*named, "minicpm3"}):
        config = SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type, kv_lora_rank=512))
        config.is_deepseek_mla = ModelArchConfigConvertorBase.is_deepseek_mla(config)
        config.using_transformers_backend = partial(bool, fixtures.get(model_type) not in own)
        is_mla = ModelConfig.use_mla.fget(config)
        if is_mla != (model_type in named):
            yield f"{model_type}: vLLM caches {'' if is_mla else 'no '}latents"


def check_all(platform) -> None:
    from vllm.config.cache import CacheDType
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    types = [cache_type(name) for name in ("fp8", *CACHES)]
    latent = [cache_type(name) for name in ("fp8", *LATENT_CACHES)]
    asked = [(one, name) for one in types for name in sorted(names(one))]
    problems = [*model_types(latent)]
    for gpu in GPUS:
        become(platform, gpu)
        for one, name in asked:
            problems += compare(platform, one, gpu, name)
        for one in latent:
            problems += compare_latents(platform, one, gpu, one.name)
    # its own parser takes every flag, and does not have the other types
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for kind in [*types, *latent]:
        assert names(kind) or kind.name not in get_args(CacheDType), kind.name
        for way in support(kind):
            assert parser.parse_args(way.flag.split()).kv_cache_dtype in names(kind), way.flag
    count = len(asked) * len(GPUS) * len(HEAD_DIMS) + len(latent) * (len(GPUS) * 2 - 1) * len(LATENTS)
    report("cache types in vLLM", problems, f"{count} answers of its backends and sizes, the same")


def check_recommended(platform, path: str) -> str:
    """Parse the line that serves and ask for its backend on the GPU; returns the cache."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    answer = json.loads(Path(path).read_text())
    commands, gpu = answer["chosen"]["commands"], answer["gpu"]
    line = commands[-1]
    program, verb, *arguments = shlex.split(line)
    assert (program, verb) == ("vllm", "serve"), line
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    problems = [f"{line}: a 16-bit cache"] if parsed.kv_cache_dtype == "auto" else []
    become(platform, gpu)
    paths = [Path(word, "config.json") for word in shlex.split(commands[0])]
    config = json.loads(next(path for path in paths if path.exists()).read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    takes = {backend.get_name() for backend in backends(platform, parsed.kv_cache_dtype, head_dim)}
    wanted = getattr(parsed.attention_backend, "name", parsed.attention_backend)
    if not takes or (wanted and wanted not in takes):
        problems.append(f"{line}: on {gpu} there are {sorted(takes) or 'no backends'}")
    report(path, problems, f"{line}: on {gpu} served by {', '.join(sorted(takes))}")
    return answer["chosen"]["cache"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["recommended"]:
        platform = install()
        answers = [check_recommended(platform, path) for path in sys.argv[2:]]
        is_same = len(set(answers)) < len(answers)
        report("answers", ["the same for two models"] if is_same else [], ", ".join(answers))
    else:
        check_all(install())
