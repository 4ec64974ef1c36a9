"""Compare calib/engines/tokens_that_fit.py with vLLM's own allocator, for every model class.

Each class is built as in vllm_classes.py, and its layers get the attention backends of a GPU. vLLM then
specifies them, makes their pages equal and says how many tokens fit into a memory. Ours comes of
transformers' config and model alone. The classes for which both say the same, to the token, go into
`pages` of the engine's file, by hand; `make engines-cuda` compares them.
"""

import argparse
import copy
import importlib
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import vllm_classes
import yaml
from engine_cases import FIXTURES, Fixture, Quantization, fixtures, write
from transformers import AutoConfig
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import Platform
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import tl
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, set_default_torch_dtype
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from without_gpu import ABSENT, Absent

from calib.caches.types import cache_type
from calib.capture.attention import cached_layers
from calib.engines.catalogue import find_engine
from calib.engines.tokens_that_fit import GDN_CHECKPOINTS, vllm_pool
from calib.errors import Fp8kvError
from calib.models.config import auto_class

try:
    from vllm.v1.core import kv_cache_planning as planning  # since 0.33

    get_groups, CHECKPOINTS = planning.get_global_kv_cache_groups, GDN_CHECKPOINTS
except ImportError:
    planning, get_groups, CHECKPOINTS = kv_cache_utils, None, set()
    GDN_CHECKPOINTS.clear()

with (
    patch("without_gpu.ABSENT", (*ABSENT, "flashinfer")),
    patch.object(sys, "meta_path", [*sys.meta_path, Absent()]),
):
    FlashInferBackend = importlib.import_module("vllm.v1.attention.backends.flashinfer").FlashInferBackend
with patch.object(tl, "float16", None, create=True):  # Triton's, where there is none
    UltraQuantAttentionBackend = importlib.import_module(
        "vllm.v1.attention.backends.ultraquant_attn"
    ).UltraQuantAttentionBackend
for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
    del sys.modules[name]

# too long a request for the memory; layers that a list of those in 16 bits cannot name
UNSERVED = ("vLLM: ValueError('To serve", "vLLM: AssertionError('layer name")
UNKNOWN = ("not built", "the pages of layers that differ")
TOKENS = (1000, 32_768, 131_072)
MEMORIES = (5 * 2**30 + 12_345, 16_299_545_600)
# GPUs, as vLLM sees them: memory in GiB, and name
GPUS = {
    "a100": (80, "NVIDIA A100"),
    "l40s": (45, "NVIDIA L40S"),
    "h100": (80, "NVIDIA H100"),
    "h200": (141, "NVIDIA H200"),
    "b200": (179, "NVIDIA B200"),
    "mi300x": (192, "AMD MI300X"),
}
TYPES = (None, "fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
PACKED = {
    **dict.fromkeys(
        ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        TurboQuantAttentionBackend,
    ),
    "ultraquant_4bit": UltraQuantAttentionBackend,
}
# a type, how many layers at either end stay in 16 bits, and the backend; small models have few layers
CACHES = [
    *((cache, 0, TritonAttentionBackend) for cache in TYPES),
    *(
        ("fp8", 1, TritonAttentionBackend),
        ("nvfp4", 0, FlashInferBackend),
        ("nvfp4_4over6", 0, FlashInferBackend),
    ),
    *((cache, edges, PACKED[cache]) for cache in PACKED for edges in (1, 2)),
]
Tokens = dict[tuple[Any, ...], int | str]


def keep_state_dtype() -> None:
    """Let states have the type that they have on a GPU."""
    theirs = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, config: Any) -> None:
        kept = config.cache_config.mamba_ssm_cache_dtype
        theirs(cls, config)
        config.cache_config.mamba_ssm_cache_dtype = kept

    CpuPlatform.check_and_update_config = classmethod(check)


def batch_tokens(gpu: str, model: Any) -> int:
    """What vLLM's server reads at once on a GPU, where a whole picture or video has to fit into it."""
    item = None
    if model.is_multimodal_model and model.is_mm_prefix_lm:
        item = EngineArgs._get_min_mm_batched_tokens(model)
    memory, name = GPUS[gpu]
    CpuPlatform.get_device_total_memory = classmethod(lambda cls, *_: memory * 2**30)
    CpuPlatform.get_device_name = classmethod(lambda cls, *_: name)
    CpuPlatform.is_cpu = lambda self: False
    try:
        least = EngineArgs.get_batch_defaults(1)[0][UsageContext.OPENAI_API_SERVER]
        return max(least, item[0] if item else 0)
    finally:
        del CpuPlatform.is_cpu


def theirs(directory: Path) -> Tokens:
    """Tokens by vLLM."""
    others = [gpu for gpu in GPUS if gpu not in CHECKPOINTS]
    return tokens_on(directory, [*CHECKPOINTS], "flashinfer") | tokens_on(directory, others, "triton")


def tokens_on(directory: Path, gpus: list[str], delta_nets: str) -> Tokens:
    """Tokens on GPUs where gated delta nets read prompts in one way."""
    qwen_gdn_linear_attn._resolve_gdn_prefill_backend = lambda *_: ("auto", delta_nets)
    config = vllm_classes.config_of(directory, skip_tokenizer_init=True)  # there is none
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        initialize_model(config)
        capacities: Tokens = {}
        for cache in CACHES:
            try:
                specs = specifications(config, *cache)
            except (AssertionError, NotImplementedError, ValueError) as error:
                capacities |= dict.fromkeys(product([cache], gpus, TOKENS, MEMORIES), f"vLLM: {error!r:.80}")
                continue
            for gpu, tokens, memory in product(gpus, TOKENS, MEMORIES):
                config.scheduler_config.max_num_batched_tokens = batch_tokens(gpu, config.model_config)
                config.model_config.max_model_len = tokens
                capacities[cache, gpu, tokens, memory] = capacity(config, dict(specs), memory)
        return capacities


def specifications(config: Any, cache: str | None, edges: int, backend: Any) -> dict[str, Any]:
    """Make vLLM's specification of every layer, with a type of cache on a GPU."""
    settings = config.cache_config
    settings.cache_dtype, settings.block_size = cache or "auto", 16
    settings.mamba_page_size_padded = settings.skip_page_size_padded = None
    has_list = cache in PACKED or (edges and not config.model_config.is_hybrid)
    skipped = TurboQuantConfig.get_boundary_skip_layers(config.model_config, edges) if has_list else []
    settings.kv_cache_dtype_skip_layers = skipped
    for name, layer in get_layers_from_vllm_config(config, Attention).items():
        is_skipped = str(extract_layer_index(name)) in skipped
        layer.kv_cache_dtype = "auto" if is_skipped else settings.cache_dtype
        layer.kv_cache_torch_dtype = dtype_of(config, layer.kv_cache_dtype)
        layer.attn_backend = TritonAttentionBackend if is_skipped else backend
    for name, layer in get_layers_from_vllm_config(config, MLAAttention).items():
        is_skipped = bool(skipped) and str(extract_layer_index(name)) in skipped
        layer.kv_cache_dtype = "auto" if is_skipped else settings.cache_dtype
    CpuPlatform._find_non_ssm_backends = classmethod(lambda cls, _: [backend])
    Platform.update_block_size_for_backend.__func__(CpuPlatform, config)
    return get_kv_cache_spec(config)


def dtype_of(config: Any, name: str) -> torch.dtype:
    return config.model_config.dtype if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]


def capacity(config: Any, specs: dict[str, Any], memory: int) -> int | str:
    """What vLLM logs as its KV cache size."""
    settings = config.cache_config
    settings.kv_cache_layout, settings.num_gpu_blocks_override = "LBNHC", None
    config.scheduler_config.async_scheduling = True
    try:
        groups = [get_groups(config, [specs])] if get_groups else []
        (made,) = planning.get_kv_cache_configs(config, [specs], [memory], *groups)
    except (AssertionError, NotImplementedError, ValueError) as error:
        return f"vLLM: {error!r:.80}"
    return kv_cache_utils.get_kv_cache_capacity(config, made)[0]


def ours(directory: Path) -> Tokens:
    """Tokens by the rule."""
    config = AutoConfig.from_pretrained(directory)
    model = auto_class(config).from_config(config).eval()
    layers = cached_layers(model)
    text = config.get_text_config(decoder=True)
    capacities: Tokens = {}
    for cache, gpu, tokens, memory in product(CACHES, GPUS, TOKENS, MEMORIES):
        name, edges, _ = cache
        try:
            kind, in_16_bits = name and cache_type(name), set()
            if name in PACKED:
                kind = kind.model_copy(update={"edge_layers": edges})
            elif edges and not layers.is_hybrid:
                in_16_bits = {0, layers.total - 1} & layers.shapes.keys()
            has_media = text is not config
            made = vllm_pool(text, layers, kind, in_16_bits, tokens, gpu, has_media=has_media)
            # its "GPU KV cache size"
            fitting = int(memory // made.block_bytes / made.blocks * tokens)
            capacities[cache, gpu, tokens, memory] = fitting
        except Fp8kvError as error:
            capacities[cache, gpu, tokens, memory] = str(error)
    return capacities


def compare(fixture: Fixture) -> tuple[int, list[str]]:
    """Count the figures that are the same; and what is not, or why it is not known."""
    with TemporaryDirectory() as scratch:
        directory = write(fixture, Quantization(None), Path(scratch))
        try:
            mine = ours(directory)
            vllms = theirs(directory)
        except Exception as error:  # noqa: BLE001 (either library may lack it)
            return 0, [f"not built: {error!r:.150}"]
    counts = {case: tokens for case, tokens in mine.items() if isinstance(tokens, int)}
    if not counts:
        return 0, [str(next(iter(mine.values())))]
    counts = {case: tokens for case, tokens in counts.items() if not str(vllms[case]).startswith(UNSERVED)}
    wrong = [f"{case}: {n}, vLLM {vllms[case]}" for case, n in counts.items() if vllms[case] != n]
    return len(counts) - len(wrong), wrong


def varied(fixture: Fixture, random: Random) -> Fixture:
    """The same model with more layers, other windows and other heads."""
    config = copy.deepcopy(fixture.config)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    text = next((part for part in parts if {"vocab_size", "num_hidden_layers"} <= part.keys()), None)
    if text is None:
        return fixture
    count, times = text["num_hidden_layers"], random.randint(1, 5)
    lists = [key for key, value in text.items() if isinstance(value, list) and len(value) == count]
    lists = [key for key in lists if key not in ("time_step_limit", "mlp_multipliers")]
    layers = random.randint(count, count * times)
    text |= {key: (text[key] * times)[:layers] for key in lists} | {"num_hidden_layers": layers}
    choices = {
        "sliding_window": (64, 100, 513, 1024, 4096),
        "attention_chunk_size": (64, 513, 8192),
        "num_key_value_heads": (1, 2, 4),
        "head_dim": (32, 64, 128, 256),
        "global_head_dim": (64, 128, 256, 512),
        **dict.fromkeys(("linear_num_value_heads", "mamba_num_heads"), (4, 8, 16, 24)),
        "mamba_n_heads": (2, 4, 8, 16),
        "conv_L_cache": (2, 3, 4),
    }
    if fixture.is_mla:
        choices = {"kv_lora_rank": (128, 256, 512)}
    text |= {key: random.choice(values) for key, values in choices.items() if text.get(key)}
    if width := text.get("mamba_n_heads", 0) and fixture.config["mamba_n_heads"] * text["mamba_d_head"]:
        text["mamba_d_head"] = width // text["mamba_n_heads"]
    return replace(fixture, config=config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--varied", type=int, default=0, help="so many other sizes of each class, too")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    keep_state_dtype()
    vllm_classes.VLLM()
    same: dict[str, bool] = {}
    names = options.names or sorted(path.stem for path in FIXTURES.glob("*.json"))
    with torch.no_grad():
        for fixture in fixtures(names):
            figures, wrong = compare(fixture)
            for seed in range(options.varied if not wrong else 0):
                count, others = compare(varied(fixture, Random(seed)))
                figures += count
                wrong += [line for line in others if not line.startswith(UNKNOWN)]
            print(fixture.name, f"{figures} the same", *wrong[:1], flush=True)
            same[fixture.architecture] = same.get(fixture.architecture, True) and not wrong
    known = [name for name, is_same in same.items() if is_same]
    print(yaml.safe_dump({"pages": known}, default_flow_style=True, width=118))
    if options.check and (wrong := {*find_engine("vllm").caches.pages}.intersection(same) - {*known}):
        raise SystemExit(f"no longer the same as in vLLM {vllm_classes.VLLM.version}: {sorted(wrong)}")


if __name__ == "__main__":
    main()
