"""Attention layers of a vLLM model, with every copy of their scales, and the files of an engine's model."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from calib.engines.catalogue import Engine, find_engine
from calib.engines.loaded_scales import EngineLayer, expected_values, read_engine_scales
from calib.engines.outcome import Place
from calib.errors import NoScalesError
from calib.files.names import layer_of
from calib.files.stored_scales import StoredLayer, StoredScales, Values

# caches whose scales come from files; other quantised caches make their own
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
IN_16_BITS = ("auto", "float16", "bfloat16")
_FROZEN = ("bmm1_scale", "bmm2_scale")


def vllm_layers(model: Any, version: str | None = None) -> Iterator[EngineLayer]:
    """Yield the decoder's attention layers of a vLLM model."""
    engine = find_engine("vllm", version)
    for index, module in vllm_attention(model).items():
        k, v, q = (read_copies(engine, module, letter) for letter in "kvq")
        cache, backend = module.kv_cache_dtype, getattr(module, "attn_backend", None)
        name = str(backend.get_name()) if backend else ""
        written, read = _used_copies(engine, name)
        is_fp8 = cache in FP8_CACHES
        # vLLM asks a GPU's backend this before it chooses it, but not a CPU's
        has_kernels = is_fp8 or cache in IN_16_BITS or not backend or backend.supports_kv_cache_dtype(cache)
        yield EngineLayer(index, is_fp8, k, v, q, name_cache(cache), name, written, read, has_kernels)


def vllm_attention(model: Any) -> dict[int, Any]:
    """Return the decoder's attention modules of a vLLM model by layer."""
    layers = {}
    for module in model.modules():
        index = layer_of(getattr(module, "layer_name", ""))
        is_decoder = getattr(module, "attn_type", "decoder") == "decoder"  # not of pictures or sound
        if index is not None and is_decoder and hasattr(module, "_k_scale"):
            layers[index] = module
    return layers


def fill_scales(model: Any, files: Mapping[int, StoredLayer], place: Place, rank: int) -> None:
    """Set every copy of the scales of a vLLM model's FP8 layers to those in the files.

    A scale that no file has, and one per head where the engine has room for one, stay as they are.
    """
    engine = find_engine("vllm")
    for index, module in vllm_attention(model).items():
        file = files.get(index)
        if file is None or module.kv_cache_dtype not in FP8_CACHES:
            continue
        for letter in "kvq":
            own = expected_values(file, letter, place, rank)
            values = own or (expected_values(file, "k", place, rank) if letter == "v" else ())
            for name in engine.scale_copies.values():
                _fill(module, name.format(x=letter), values)
        for name in _FROZEN:  # FlashInfer's backends compute them again where they are None
            if getattr(getattr(module, "impl", None), name, None) is not None:
                setattr(module.impl, name, None)


def _fill(module: Any, name: str, values: Values) -> None:
    copy = getattr(module, name, None)
    if copy is None or not values:
        return
    if isinstance(copy, float):
        setattr(module, name, max(values))
    elif copy.numel() == len(values):
        copy.copy_(copy.new_tensor(values).reshape(copy.shape))
    elif len({*values}) == 1 or not name.endswith("_scale"):
        copy.fill_(max(values))


def _used_copies(engine: Engine, backend_name: str) -> tuple[tuple[str, ...], ...]:
    """Return the attributes that a backend stores with, and those that it stores or attends with."""
    backend = engine.backends.get(backend_name)
    steps = (backend.write, {*backend.write, *backend.read}) if backend else ((), ())
    return tuple(
        tuple(engine.scale_copies[copy].format(x=x) for copy in step for x in "kvq") for step in steps
    )


def read_files(model: str, revision: str | None, loading: Any) -> StoredScales | None:
    """Read the scales of the files that an engine has loaded; None: there are none, and 1.0 is not right.

    Of a model that was baked for FP8 they have no layers. Raises a ValueError for dummy weights.
    """
    if loading.load_format == "dummy":
        raise ValueError("the weights are dummies")
    with suppress(NoScalesError):
        return read_engine_scales(find_directory(model, revision, loading))
    return None


def find_directory(model: str, revision: str | None, loading: Any) -> Path:
    """Return the directory of a model's files, as far as the engine has fetched them."""
    if (directory := Path(model)).is_dir():
        return directory
    from huggingface_hub import snapshot_download

    # no file is fetched for this
    options = {"local_files_only": True, "ignore_patterns": "*", "cache_dir": loading.download_dir}
    return Path(snapshot_download(model, revision=revision, **options))


def read_copies(engine: Engine, module: Any, letter: str) -> dict[str, Values]:
    """Return every copy of a module's scale of K, V or Q; nothing where all are None."""
    names = [name.format(x=letter) for name in engine.scale_copies.values()]
    scales = {name: getattr(module, name) for name in names if hasattr(module, name)}
    if all(scale is None for scale in scales.values()):
        return {}
    return {
        name: () if scale is None
        else tuple(scale.flatten().tolist()) if hasattr(scale, "flatten")
        else (float(scale),)
        for name, scale in scales.items()
    }  # fmt: skip


def name_cache(dtype: str) -> str:
    """Return the type of a cache in our words."""
    return "16 bits" if dtype in IN_16_BITS else dtype
