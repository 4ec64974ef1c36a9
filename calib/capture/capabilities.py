"""Models that can run on an FP8 cache, and classes whose queries are those of engines."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from calib.capture.attention import AttentionMap, map_attention
from calib.choices import Backend, Device, FormatName
from calib.errors import InputError, UnsupportedModelError, one_line
from calib.formats import check_latent
from calib.models.config import caches_latents
from calib.models.load import forget_positions, input_device, uses_gpu
from calib.recipe import Recipe
from calib.scales.scales import check_one_scale
from fp8kv_runtime.errors import MISFITS, AttentionError
from fp8kv_runtime.hf import cache_argument, cache_of, fp8_attention

NO_FP8_CACHE = "eval and generate cannot run this model on an FP8 cache"

# Classes for which engines hand to attention the query that is measured. Run: the class of vLLM 0.32 read the
# same tokens on the CPU with the same weights, and the largest queries of each head agreed
# (tests/interop/check_queries.py). Read: the source of the class was.
_RUN = (
    "Afmoe Apertus Arcee Cohere Cohere2 Cohere2Moe Cwm Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon "
    "FlexOlmo GPTBigCode GPTNeoX Gemma Gemma2 Gemma3 Glm Glm4 Glm4Moe GptOss Granite GraniteMoe "
    "GraniteMoeShared HunYuanDenseV1 HyperCLOVAX Jais2 Laguna Llama Llama4 Ministral3 Mistral Mixtral "
    "Nemotron OPT Olmo Olmo2 Olmo3 Olmoe Persimmon Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 "
    "StableLm Starcoder2 VaultGemma"
)
_RUN_WITH_IMAGES = (
    "Aria Blip2 Exaone4_5_ Gemma3 Idefics3 InternVL Llama4 Llava LlavaNext LlavaNextVideo LlavaOnevision "
    "Mistral3 Qwen3VL SmolVLM"
)
_READ = "Dbrx FalconH1 Gemma3n Gemma4 Jamba Lfm2 Lfm2Moe MiniMaxM2 NemotronH Qwen3Next"


def _classes(text_only: str, with_images: str) -> frozenset[str]:
    names = {f"{name}ForCausalLM" for name in text_only.split()}
    return frozenset(names | {f"{name}ForConditionalGeneration" for name in with_images.split()})


RUN = _classes(_RUN, _RUN_WITH_IMAGES) | {"GPT2LMHeadModel"}
READ = _classes(_READ, "Gemma3n Gemma4")


def engine_class(config: PreTrainedConfig, default: str) -> str:
    """Name the class that engines run a model with: the first in its config, or `default`."""
    names: object = config.architectures
    first = names[0] if isinstance(names, list) and names else names
    return first if isinstance(first, str) else default


def check_queries(architecture: str, flag: str) -> None:
    """Refuse `flag`, which is about queries, for a class whose queries in engines are not known."""
    if architecture not in RUN | READ:
        raise InputError(
            f"{flag}: which query engines hand to attention is not known for {architecture}; "
            + ("use --targets kv" if "targets" in flag else "leave --attention out")
        )


def check_scales(
    recipe: Recipe, formats: Iterable[FormatName], config: PreTrainedConfig, architecture: str, flag: str = ""
) -> None:
    """Refuse scales that the model's cache or `formats` have no place for, or that engines may not use."""
    if caches_latents(config):
        for name in formats:
            check_latent(name)
        check_one_scale(strategy=recipe.strategy, targets=recipe.targets, center_keys=recipe.center_keys)
    elif recipe.targets == "qkv":
        check_queries(architecture, flag or "--targets qkv")


def check_backend(backend: Backend, device: Device) -> None:
    """Refuse a device that is not there, and kernels that cannot run on it."""
    on_gpu = uses_gpu(device)
    if backend == "triton":
        from fp8kv_runtime.kernels.targets import can_run

        if not can_run(on_gpu):
            raise InputError("--backend triton: its kernels need a GPU, or TRITON_INTERPRET=1; use torch")


def check_fp8_cache(model: PreTrainedModel) -> None:
    """Refuse a model that cannot run on an FP8 cache."""
    if reason := reason_against_fp8(model, map_attention(model)):
        raise UnsupportedModelError(reason)


@torch.inference_mode()
def reason_against_fp8(model: PreTrainedModel, attention: AttentionMap) -> str | None:
    """Say why `model` cannot read eight tokens, and then one more, on an FP8 cache; None if it can."""
    ids = torch.arange(8, device=input_device(model))[None]
    forget_positions(model)
    try:
        with fp8_attention(model, attention.unit_scales(), backend="torch"):
            cache = cache_of(model(input_ids=ids, use_cache=True))
            model(input_ids=ids[:, :1], use_cache=True, **{cache_argument(model): cache})
    except torch.OutOfMemoryError:
        raise
    except AttentionError as error:
        reason = str(error)
    except MISFITS as error:  # as where code does not know our layers of a cache
        reason = _explain(model, ids, error)
    else:
        return None
    return f"{NO_FP8_CACHE}: {reason}; its scales are not affected"


def _explain(model: PreTrainedModel, ids: torch.Tensor, error: Exception) -> str:
    """Name what is special about `model`, or else the error that ended it."""
    name = type(model).__name__
    try:
        model(input_ids=ids, use_cache=True)
    except MISFITS:  # as where it misses a picture
        return f"{name} takes no text alone"
    return f"the code of {name} fails there ({type(error).__name__}: {one_line(error, 200)})"
