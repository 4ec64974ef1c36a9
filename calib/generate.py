"""Generate text on a quantised KV cache, and on transformers' own, to see what that changes."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from calib.arguments import to_path
from calib.caches.rounding import rounded_attention, rounding
from calib.caches.types import CacheType, Layers, cache_type
from calib.capture.attention import cached_layers, map_attention
from calib.capture.capabilities import check_backend, check_fp8_cache
from calib.capture.directory_scales import ScalesForModel, open_scales
from calib.errors import InputError
from calib.files.fingerprint import read_bake
from calib.files.model_directory import ModelDirectory
from calib.files.text import show_layers
from calib.models.config import check_positions, load_config
from calib.models.load import check_token_ids, input_device, load_model, load_tokenizer, served_dtype
from calib.models.quantized.weights import quantization_notes
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import load_recipe
from calib.same_model.check import check_weights
from calib.scales.scales import KVScales
from calib.scales.stats_file import change_warnings
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import Backend, cache_of, fp8_attention, paged_cache, values_per_token

STATIC_FP8 = "fp8"
UNIT_SCALES = "none"  # what --scales takes for scale 1.0 everywhere


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of a generation."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0: greedy
    seed: int = 42
    chat: bool = False  # put the prompt into the model's chat template
    compare: bool = False  # generate with transformers' own cache too
    backend: Backend = "auto"
    cache: str = STATIC_FP8  # a type of `calib.caches`


@dataclass(frozen=True)
class Generation:
    """A continuation of the prompt."""

    text: str
    token_ids: list[int]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time of the whole call, prompt included."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class GenerationResult:
    """The continuation on the quantised cache, and on a 16-bit one where that was asked for."""

    fp8: Generation  # whatever the type of the cache
    plain: Generation | None
    cached_tokens: int
    block_size: int | None  # None: the cache was simulated
    values_per_token: int  # of K and V, over all layers
    bytes_per_token: int
    cache_bytes: int  # of the blocks in use at the end, or of the tokens without blocks
    cache_bytes_16bit: int  # of the same blocks or tokens in 16 bits
    warnings: tuple[str, ...] = ()
    cache: str = STATIC_FP8
    simulated: str = ""  # how it is known what the cache computes
    bytes_per_token_in_blocks: int | None = None  # more, where heads of K and V differ in size
    keeps_decoded: bool = False  # K and V are kept in float32 too, which no figure counts

    @property
    def bytes_per_token_16bit(self) -> int:
        """Bytes of a token's K and V in float16 or bfloat16."""
        return 2 * self.values_per_token

    @property
    def same_tokens(self) -> int | None:
        """New tokens before the two first differ."""
        if self.plain is None:
            return None
        pairs = [*zip(self.fp8.token_ids, self.plain.token_ids, strict=False)]
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        derived = ("same_tokens", "bytes_per_token_16bit")
        facts = asdict(self) | {name: getattr(self, name) for name in derived}
        for name, generation in (("fp8", self.fp8), ("plain", self.plain)):
            if generation is not None:
                facts[name]["tokens_per_second"] = generation.tokens_per_second
        return facts


def generate_text(
    model_name: str,
    prompt: str,
    *,
    scales: str | None = None,
    options: GenerationOptions,
    overrides: dict[str, Any],
    on_text: Callable[[str], None] | None = None,
    progress: Progress = SILENT,
) -> GenerationResult:
    """Continue `prompt` with the model's K and V in FP8, or as another cache would hold them.

    `scales`, for FP8 alone, is a directory with scales of any tool, or `none` for scale 1.0; by default the
    model's. `overrides` are recipe keys: device, dtype, trust_remote_code. `on_text` gets each piece of text
    as it comes. What a user can put right is an Fp8kvError.
    """
    if not prompt:
        raise InputError("the prompt is empty; give the text to continue")
    progress.stage("load")
    recipe = load_recipe(None, overrides)
    checkpoint = find_model(model_name)
    kind = cache_type(options.cache)
    scales_for_model = _open_scales(checkpoint, scales, kind, options.backend)
    check_backend(options.backend, recipe.device)
    config = load_config(checkpoint, recipe.trust_remote_code)
    tokenizer = load_tokenizer(checkpoint, recipe.trust_remote_code)
    inputs = _tokenize(tokenizer, prompt, chat=options.chat)
    length = inputs["input_ids"].shape[1]
    check_positions(config, length + options.max_new_tokens, "prompt + --max-new-tokens")
    model = load_model(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)
    check_token_ids(inputs["input_ids"].flatten().tolist(), tokenizer, model)
    notes = (*quantization_notes(checkpoint),)
    if scales_for_model is None:
        layers = cached_layers(model)
        notes += _check_cache(kind, layers)
        attention = rounded_attention(model, rounding(options.cache, layers, served_dtype(checkpoint)))
    else:
        notes += (*change_warnings([checkpoint.path if scales is None else to_path(scales)]),)
        check_fp8_cache(model)
        attention = fp8_attention(model, scales_for_model(model), backend=options.backend)
    progress.stage("generate")
    try:
        with attention:
            fp8, cache = _generate(model, tokenizer, inputs, options, on_text)
    except AttentionError as error:
        raise InputError(str(error)) from error
    plain = _generate(model, tokenizer, inputs, options, None)[0] if options.compare else None
    tokens = length + len(fp8.token_ids) - 1  # the last one was not read
    memory = _memory(model, cache, tokens) if scales_for_model else _simulated_memory(kind, layers, tokens)
    return GenerationResult(fp8, plain, tokens, warnings=notes, **memory)


def _memory(model: PreTrainedModel, cache: Cache, cached_tokens: int) -> dict[str, Any]:
    """Return the memory of our FP8 cache, and of layers that stay in 16 bits, by the fields of the result."""
    blocks, values = paged_cache(cache), values_per_token(cache)
    all_values = cached_layers(model).values
    in_16_bits = 2 * (all_values - values)  # bytes
    return {
        "block_size": blocks.block_size,
        "bytes_per_token": values + in_16_bits,
        "cache_bytes": blocks.num_bytes_used + in_16_bits * cached_tokens,
        "cache_bytes_16bit": 2 * blocks.num_bytes_used + in_16_bits * cached_tokens,
        "bytes_per_token_in_blocks": blocks.bytes_per_token + in_16_bits,
        "values_per_token": all_values,
        "keeps_decoded": model.device.type == "cpu",
    }


def _check_cache(kind: CacheType, layers: Layers) -> tuple[str, ...]:
    """Refuse a head size before a wait; return a note on layers that the type leaves in 16 bits."""
    kind.model_bytes(layers)
    edges = kind.edges(layers)
    return (f"{show_layers(sorted(edges))} stay in 16 bits, as in vLLM",) if edges else ()


def _simulated_memory(kind: CacheType, layers: Layers, cached_tokens: int) -> dict[str, Any]:
    """Return the memory that a cache of this type would take, by the fields of the result."""
    size, values = kind.model_bytes(layers), layers.values
    return {
        "block_size": None,
        "values_per_token": values,
        "bytes_per_token": size,
        "cache_bytes": size * cached_tokens,
        "cache_bytes_16bit": 2 * values * cached_tokens,
        "cache": kind.name,
        "simulated": kind.simulated,
    }


def unit_scales(model: PreTrainedModel) -> KVScales:
    """Return scale 1.0 for every attention module that caches K and V, as engines have without scales."""
    return map_attention(model).unit_scales()


def _open_scales(
    checkpoint: ModelDirectory, scales: str | None, kind: CacheType, backend: Backend
) -> ScalesForModel | None:
    """Open the scales of a static FP8 cache; None for another type, which is simulated without any."""
    if kind.evidence == "none":
        raise InputError(f"cache {kind.name} is {kind.simulated}")
    kind.check_attention(is_latent=checkpoint.caches_latents)
    if kind.name != STATIC_FP8:
        if scales is None and backend != "triton":
            return None
        flag = "--backend triton" if scales is None else "--scales"
        raise InputError(f"{flag} is for --cache fp8, not for {kind.name}; leave it out")
    is_baked = scales is None and read_bake(checkpoint).get("for") == "fp8"
    if scales == UNIT_SCALES or is_baked:
        return unit_scales
    if scales is not None:
        opened = open_scales(to_path(scales), checkpoint)
    else:
        try:
            opened = open_scales(checkpoint.path)
        except InputError as error:
            way = f"scales from elsewhere are given with --scales DIR, and 1.0 with --scales {UNIT_SCALES}"
            raise InputError(f"{error}; {way}") from None
    check_weights(checkpoint.path if scales is None else to_path(scales), checkpoint)
    return opened


def _tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool) -> Any:
    if chat and not tokenizer.chat_template:
        raise InputError("this model has no chat template; leave out --chat")
    if chat:
        message = {"role": "user", "content": prompt}
        inputs: Any = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise InputError("the model's tokenizer makes no token of this prompt; give it another text")
    return inputs


def _refuse_nan(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return the logits [1, V] as they are; an InputError if one is NaN."""
    if scores.isnan().any():
        raise InputError(
            "the model's logits hold NaN, which is not text; check its weights, --dtype, --cache and --scales"
        )
    return scores


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Any,
    options: GenerationOptions,
    on_text: Callable[[str], None] | None,
) -> tuple[Generation, Cache]:
    inputs = inputs.to(input_device(model))
    if options.compare:  # the first pass after loading is slow, and would count against one of two
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    streamer = None
    if on_text is not None:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: on_text(text)
    # below, float32 holds no probability but 0 and 1
    sampling = {"temperature": options.temperature} if options.temperature > 1e-4 else {}
    # the caller's random state is left as it was; a model may be spread over several devices
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(gpus)):
        torch.manual_seed(options.seed)
        start = time.perf_counter()
        output = model.generate(
            **inputs,
            max_new_tokens=options.max_new_tokens,
            do_sample=bool(sampling),
            **sampling,
            streamer=streamer,
            logits_processor=[_refuse_nan],
            return_dict_in_generate=True,
        )
        seconds = time.perf_counter() - start
    token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Generation(text, token_ids, seconds), cache_of(output)
