"""The tokenizer and the model in memory, from a model directory and its checked config."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import GENERATION_CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME

from calib.choices import Device, DType
from calib.errors import InputError
from calib.files.fingerprint import baked_for
from calib.files.model_directory import ModelDirectory
from calib.files.strict_json import read_object, regular_size
from calib.files.tensors import Source
from calib.models.config import auto_class, build_on_meta, explain_nonsense
from calib.models.quantized.detect import check_unused_tensors
from calib.models.quantized.weights import all_weights, quantization_notes, split_weights
from calib.progress import library_bars_hidden
from fp8kv_runtime.hf import is_latent

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json")  # the first there is read
_SERVED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# seen in vLLM 0.32's class, which hands on the positions that it is given
_PALIGEMMA = (
    "transformers counts PaliGemma's positions from 1 and lets text look ahead; vLLM does neither: "
    "scales are transformers', and --headroom 1.2 makes room for the difference"
)


def load_model(
    checkpoint: ModelDirectory,
    config: PreTrainedConfig,
    dtype: DType = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the model, with weights that are decoded; refuse it if one is not in the checkpoint."""
    device_map: str | dict[str, int] = "cpu"
    if uses_gpu(device):
        # one of several processes has a GPU of its own; one alone has them all
        is_alone = not torch.distributed.is_initialized()
        device_map = "auto" if is_alone else {"": torch.cuda.current_device()}
    if split_weights(checkpoint).label:
        sources = weight_sources(checkpoint, config, dtype)
        weights = {name: LazyWeight(source) for name, source in sources.items()}
        return load_from(weights, checkpoint, config, dtype, device_map, trust_remote_code=trust_remote_code)
    with _quiet_loading(f"'{checkpoint.path}'"):
        model, info = auto_class(config).from_pretrained(
            checkpoint.path,
            config=config,
            dtype=requested_dtype(dtype),
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    return _check_loaded(model, checkpoint, info, checkpoint.entries.keys())


def load_from(
    weights: Mapping[str, Any],
    checkpoint: ModelDirectory,
    config: PreTrainedConfig,
    dtype: DType,
    device_map: Any,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load the model from `weights`, by name, which transformers indexes when it needs them."""
    generation = None
    if (checkpoint.path / GENERATION_CONFIG_NAME).exists():
        with _quiet_loading(f"'{checkpoint.path / GENERATION_CONFIG_NAME}'"):
            generation = GenerationConfig.from_pretrained(checkpoint.path)
    with _quiet_loading(f"'{checkpoint.path}'"):
        model_class = type(build_on_meta(config, trust_remote_code=trust_remote_code))
        if not isinstance(config, model_class.config_class):
            config = config.get_text_config(decoder=True)
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=requested_dtype(dtype),
            device_map=device_map,
            generation_config=generation,
            output_loading_info=True,
        )
    return _check_loaded(model, checkpoint, info, weights)


def _check_loaded(
    model: PreTrainedModel, checkpoint: ModelDirectory, info: dict[str, Any], names: Collection[str]
) -> PreTrainedModel:
    """Return the model, to be read only; refuse weights that are missing and scales that are left over.

    `info` is what transformers says of its loading, `names` are those of the weights it was given.
    """
    check_unused_tensors(checkpoint, info["unexpected_keys"], names)
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"'{checkpoint.path}' lacks {len(missing)} weights, such as '{missing[0]}': "
            "they would be random; download the model again"
        )
    # Latent attention makes K and V for each query head, whatever number of KV heads its config
    # says; transformers would repeat them, and stop on the heads that it has then.
    for module in filter(is_latent, model.modules()):
        module.num_key_value_groups = 1
    return model.eval()


def weight_sources(
    checkpoint: ModelDirectory, config: PreTrainedConfig, dtype: DType
) -> Mapping[str, Source]:
    """Return every weight of the checkpoint, as a plain one would name it, to be read when needed."""
    requested = requested_dtype(dtype)
    if not isinstance(requested, torch.dtype):
        requested = config.dtype  # as transformers resolves `auto`
    return all_weights(checkpoint, requested)


class LazyWeight:
    """A weight that is read when transformers takes its elements."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.dtype = source.dtype
        self.memory: Tensor | None = None

    def is_floating_point(self) -> bool:
        """Return whether its type may be the model's."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: object) -> Tensor:
        return self.source.read(self.memory)


def load_tokenizer(checkpoint: ModelDirectory, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; an InputError if its files are missing or damaged."""
    files = [checkpoint.path / name for name in _TOKENIZERS]
    for file in [file for file in files if file.exists()][:1]:
        regular_size(file)
    try:
        subject = f"the tokenizer of '{checkpoint.path}'"
        with _quiet_loading(subject), _PlainErrors(f"cannot load {subject}"):
            return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)
    except InputError:
        model = read_object(files[0]).get("model") if files[0].exists() else {"vocab": True}
        if not (isinstance(model, dict) and model.get("vocab")):
            problem = "holds no tokenizer: it has no model with a vocab; download it again"
            raise InputError(f"'{files[0]}' {problem}") from None
        raise


class _PlainErrors:
    """Makes an InputError of a plain Exception: the library tokenizers raises no type of its own."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is Exception:
            raise InputError(f"{self.message}: {error}") from error


def load_processor(checkpoint: ModelDirectory, trust_remote_code: bool = False) -> ProcessorMixin:
    """Load the processor of text, pictures and sound of a model; refuse a directory without one."""
    if "vision_config" in checkpoint.config and find_spec("PIL") is None:
        raise InputError("pictures need Pillow, which is not installed: pip install pillow")
    with _quiet_loading(f"the processor of '{checkpoint.path}'"):
        processor = AutoProcessor.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)
    if isinstance(processor, ProcessorMixin):
        return processor
    if not any((checkpoint.path / name).exists() for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME)):
        names = f"neither {PROCESSOR_NAME} nor {IMAGE_PROCESSOR_NAME}"
        raise InputError(f"'{checkpoint.path}' has {names}; download it whole")
    # code of the model's own may be of any class; transformers returns a tokenizer for one it does not know
    raise InputError(
        f"the processor of '{checkpoint.path}' is of class {type(processor).__name__}; pictures and sound "
        "need a subclass of transformers' ProcessorMixin, so use text alone"
    )


def check_token_ids(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Check that every token id has a row in the embedding; a tokenizer may know more ids."""
    rows, largest = model.get_input_embeddings().weight.shape[0], max(ids, default=0)
    if largest >= rows:
        raise InputError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model's embedding {rows:,} rows, "
            f"none for token id {largest:,} of this text, {tokenizer.decode([largest])!r}; use the "
            "tokenizer that the model was trained with, or text without that token"
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where token ids go; with offloaded weights accelerate moves them on from the CPU."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def forget_positions(model: PreTrainedModel) -> None:
    """Let `model` count positions anew: Qwen-VL's go on where the last pictures, or generated rows, ended."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def uses_gpu(device: Device) -> bool:
    """Return whether the model runs on a GPU; refuse `cuda` where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU; use --device cpu, or see `fp8kv doctor`")
    return device != "cpu" and torch.cuda.is_available()


def requested_dtype(dtype: DType) -> str | torch.dtype:
    """Return the dtype to load weights in, as transformers takes it."""
    return dtype if dtype == "auto" else getattr(torch, dtype)


def served_dtype(checkpoint: ModelDirectory) -> torch.dtype | None:
    """Return the 16-bit type that engines load the weights in, as far as the config says."""
    config = checkpoint.config
    return _SERVED_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))


@contextmanager
def _quiet_loading(subject: str) -> Iterator[None]:
    """Hide the libraries' progress bars, and turn their refusal to load `subject` into one line."""
    with explain_nonsense(f"cannot load {subject}"), library_bars_hidden():
        yield


def model_notes(checkpoint: ModelDirectory, config: PreTrainedConfig) -> list[str]:
    """Say what the user should know of this model."""
    notes = quantization_notes(checkpoint)
    if purpose := baked_for(checkpoint):
        notes.append(f"this model is baked for {purpose} (fp8kv bake)")
    named, stored = checkpoint.text_config.get("num_nextn_predict_layers"), len(checkpoint.draft_modules)
    if type(named) is int and named != stored:
        notes.append(f"config.json says num_nextn_predict_layers {named}, and the files hold {stored}")
    return [*notes, _PALIGEMMA] if config.model_type == "paligemma" else notes
