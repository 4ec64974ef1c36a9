"""Tokens that fit into vLLM's KV cache: the rule of its allocator, for a model's layers and a cache type.

vLLM cuts memory into blocks. A block has a page for each layer of a group, pages of all groups have one size,
and a request takes blocks of every group. tools/engine_classes/vllm_tokens.py compares it with vLLM itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from calib.caches.types import CacheType, Layers, Shape
from calib.errors import InputError
from calib.files.text import show_layers

REQUEST_TOKENS = 32_768
_BLOCK = 16  # tokens
_BLOCKS = {"ultraquant_4bit": 64}  # of other kernels, a few of which want even more, which rounds alone
# vLLM's max_num_batched_tokens by default; while one batch is computed, the next is scheduled
_BATCH = {"a100": 2048, "l40s": 2048, "h100": 8192, "h200": 8192, "b200": 16_384, "mi300x": 16_384}
_BATCHES = 2
_VIDEO = 32 * (70 + 8)  # of Gemma 4, at most; where pictures are read both ways, a batch has room for one
USUAL_GPU = "h100"
GDN_CHECKPOINTS = {"h100", "h200", "b200"}  # where FlashInfer reads prompts of Qwen's gated delta nets
Kind = Literal["full", "sliding", "chunked", "state"]
_WINDOWS: dict[str, tuple[Kind, str]] = {
    "sliding_attention": ("sliding", "sliding_window"),
    "chunked_attention": ("chunked", "attention_chunk_size"),
}
_ATTENDS = {"full_attention", "hybrid", *_WINDOWS}
_STATES = {"hybrid", "linear_attention", "mamba", "conv"}
_SSM_DTYPES = {"nemotron_h": ("mamba_ssm_cache_dtype", "float32"), "qwen3_5": ("mamba_ssm_dtype", "")}


@dataclass(frozen=True)
class Pages:
    """The pages of one layer."""

    kind: Kind
    page: int  # bytes
    block: int = 0  # tokens of a page; a state is a page
    window: int = 0  # tokens of a window or chunk
    shape: Shape | None = None
    is_16_bits: bool = False
    states: int = 0  # pages that a request has of a state

    def count(self, tokens: int, in_flight: int) -> int:
        """Return the pages of a request, while `in_flight` tokens are computed or scheduled."""
        if self.kind == "state":
            return self.states
        is_sliding = self.kind == "sliding"  # it may begin within a page
        if self.kind != "full":
            tokens = min(self.window - is_sliding + in_flight, tokens)
        return -(-tokens // self.block) + is_sliding

    def widen(self, page: int) -> "Pages":
        """Return them with larger pages: of more tokens if that comes out even, else padded."""
        if self.kind == "state" or page % self.page:
            return replace(self, page=page)
        return replace(self, page=page, block=self.block * (page // self.page))


class Pool(NamedTuple):
    """The size of blocks, and how many a request takes."""

    block_bytes: int
    blocks: int
    tokens: int  # of a request

    @property
    def request_bytes(self) -> int:
        """The memory that a request takes."""
        return self.block_bytes * self.blocks

    @property
    def tokens_per_gb(self) -> int:
        """The tokens in 10^9 bytes of a memory of many blocks."""
        return 10**9 * self.tokens // self.request_bytes


def vllm_pool(
    config: Any,
    layers: Layers,
    cache: CacheType | None,
    in_16_bits: Set[int] = frozenset(),
    tokens: int = REQUEST_TOKENS,
    gpu: str = USUAL_GPU,
    *,
    has_media: bool = False,
) -> Pool:
    """Return the pool for a model with `config`, of transformers' text model, in a cache type; None: 16 bits.

    InputError where vLLM's rule is not known for it. `has_media` says that the text model is a part of one
    that reads pictures.
    """
    batch = _BATCH[gpu]
    if has_media and getattr(config, "use_bidirectional_attention", None) == "vision":
        batch = max(batch, _VIDEO)
    return pool(layer_pages(config, layers, cache, in_16_bits, gpu), tokens, _BATCHES * batch)


def pool(pages: Sequence[Pages], tokens: int, in_flight: int) -> Pool:
    """Group layers as vLLM's `get_kv_cache_groups` does."""
    if len({(layer.kind, layer.block, layer.window) for layer in pages}) == 1:
        return Pool(sum(layer.page for layer in pages), pages[0].count(tokens, in_flight), tokens)
    page = max(layer.page for layer in pages)
    counts = Counter(layer.widen(page) for layer in pages)
    least, most = min(counts.values()), max(counts.values())
    size = most if most < 1.5 * least else least
    groups = {layer: -(-count // size) for layer, count in counts.items()}
    widest = max(-(-count // groups[layer]) for layer, count in counts.items())
    blocks = sum(count * layer.count(tokens, in_flight) for layer, count in groups.items())
    return Pool(page * widest, blocks, tokens)


def layer_pages(
    config: Any, layers: Layers, cache: CacheType | None, in_16_bits: Set[int], gpu: str
) -> list[Pages]:
    """Return the pages of each layer, before those of different sizes are made equal; refuse unknown ones."""
    shapes, first = layers.shapes, next(iter(layers.shapes.values()))
    skipped = {*shapes} if cache is None else in_16_bits | cache.edges(layers)
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    only = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [only] * layers.total
    states = [kind for kind in kinds if kind in _STATES]
    is_mixed = cache is not None and bool(skipped)
    if strange := {kinds[i] for i in shapes} - _ATTENDS:
        raise InputError(f"the pages of {min(strange)} are not known")
    if any(shape.attention == "sparse latents" for shape in shapes.values()):
        raise InputError("the pages of an indexer are not known")
    is_odd = (states or is_mixed) and len({*shapes.values()}) > 1
    if is_odd or (states and (is_mixed or window or first.attention != "heads")):
        raise InputError("the pages of layers that differ so are not known")
    block, shared, pages = _BLOCKS.get(cache.name if cache else "", _BLOCK), 0, list[Pages]()
    token = _token_bytes(first, cache)
    if states:
        step, count, state = _state(config, gpu)
        step = max(step, block)
        block = step * -(-state // (step * token))
        pages = [Pages("state", block * token, states=count)] * len(states)
    elif is_mixed:  # 16 tokens in 16 bits are to fit into a page
        block *= -(-_token_bytes(first, None) * _BLOCK // (block * token))
        shared = block * token
    for i, shape in shapes.items():
        kind, key = _WINDOWS.get(kinds[i], ("full", ""))
        size = _token_bytes(shape, None if i in skipped else cache)
        own, page = block, block * size
        if shared and kind == "sliding":
            fitting = max(shared // size // _BLOCK, 1)
            if cache and cache.edge_layers and i not in skipped:  # its kernels take 16, 32, 64 or 128 tokens
                fitting = min(1 << fitting.bit_length() - 1, 8)
            own, page = fitting * _BLOCK, shared
        tokens = getattr(config, key) + config.model_type.startswith("cohere2") if key else 0
        pages.append(Pages(kind, page, own, tokens, shape, i in skipped))
    most = max(layer.page for layer in pages)
    if shared and most > shared and not most % shared and any(layer.kind == "sliding" for layer in pages):
        raise InputError("vLLM cannot make the pages of windows and of layers in 16 bits equal")
    return pages


def window_doubts(config: Any, in_16_bits: Iterable[int]) -> tuple[str, ...]:
    """Say that vLLM does not start where full layers are in 16 bits beside layers with a window in FP8."""
    kinds = getattr(config, "layer_types", None) or []
    full = [i for i in in_16_bits if kinds[i : i + 1] == ["full_attention"]]
    # where full layers have heads of another size it is not known
    if not full or "sliding_attention" not in kinds or getattr(config, "global_head_dim", None):
        return ()
    return (
        f"vLLM 0.33 does not start with {show_layers(full)} in 16 bits beside layers with a window in FP8, "
        "whose pages it cannot make equal; leave in 16 bits only layers with a window, or none",
    )


def _token_bytes(shape: Shape, cache: CacheType | None) -> int:
    return 2 * shape.values if cache is None else cache.bytes_per_token([shape])


def _state(config: Any, gpu: str) -> tuple[int, int, int]:
    """Return the step of block sizes, and the pages and bytes of a layer's state, with prefix caching."""

    def find(*names: str) -> int:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), 0)

    key, default = _SSM_DTYPES.get(config.model_type.removesuffix("_text").removesuffix("_moe"), ("", ""))
    width = 4 if (getattr(config, key, None) or default) == "float32" else 2
    step, count, size, state = _BLOCK, 2, 0, 0
    if values := find("linear_num_value_heads"):  # gated delta nets
        size, state = values * find("linear_value_head_dim"), find("linear_key_head_dim")
        conv, kernel = 2 * find("linear_num_key_heads") * state + size, find("linear_conv_kernel_dim")
        if config.model_type.startswith("qwen") and gpu in GDN_CHECKPOINTS:
            step, count = 64, 3
    elif kernel := find("conv_L_cache"):  # LFM2
        conv = config.hidden_size
    elif state := find("mamba_d_state", "ssm_state_size"):
        heads = find("mamba_n_heads", "mamba_num_heads")
        size = heads * find("mamba_d_head", "mamba_head_dim") or find("mamba_expand") * config.hidden_size
        conv = size + 2 * find("mamba_n_groups", "n_groups") * state * bool(heads)
        kernel, count = find("mamba_d_conv", "conv_kernel"), 2 + bool(heads)
    else:
        raise InputError("the size of its state is not known")
    return step, count, 2 * conv * (kernel - 1) + width * size * state
