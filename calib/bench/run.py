"""`fp8kv bench`: checks the kernels on this machine, and times them at a model's shape."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from calib.arguments import to_path
from calib.errors import Fp8kvError, InputError, UnsupportedModelError
from calib.files.model_directory import check_layers, read_index
from calib.files.names import SINGLE_FILE
from calib.files.safetensors_header import read_header
from calib.files.strict_json import read_object
from calib.models.config import caches_latents, check_cacheable, explain_nonsense, layer_configs, read_config
from calib.models.sources import builtin_model, download_config
from calib.progress import SILENT, Progress

if TYPE_CHECKING:
    from calib.bench.kernels import KernelTime as KernelTime

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim
Say = Callable[..., None]  # like print


@dataclass(frozen=True)
class BenchResult:
    """Times of the kernels with a cold L2, on caches of FP8 and float16; no rows without a GPU."""

    gpu: str
    heads: Heads
    copy_tb_per_s: float | None
    tuned: str | None  # the file with this machine's own configs, where there is one
    rows: list["KernelTime"]


def parse_heads(text: str) -> Heads:
    """Parse heads such as `32/8/128`; an InputError for any other text."""
    parts = text.split("/")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    if len(parts) != 3 or len(numbers) != 3 or min(numbers) < 1 or numbers[0] % numbers[1]:
        raise InputError(
            f"--heads is '{text}'; it must be query heads, KV heads and head_dim such as 32/8/128, "
            "the first a multiple of the second"
        )
    return numbers


def attention_heads(model: str, *, trust_remote_code: bool = False) -> Heads:
    """Return the heads of a model directory, a config.json, or a model on the Hub; read no weight.

    An UnsupportedModelError if the model caches latents (MLA), or its layers differ in their heads.
    """
    config = _read_config(model, trust_remote_code=trust_remote_code)
    if caches_latents(config):
        raise UnsupportedModelError(
            f"{config.model_type} caches latents (MLA), and the kernels are for K and V of heads; "
            "give their shape with --heads instead of MODEL"
        )
    with explain_nonsense(f"a {config.model_type} of this config has heads of different sizes"):
        shapes = {_layer_heads(layer) for layer in layer_configs(config)}
    if len(shapes) > 1:
        sizes = " and ".join("/".join(map(str, shape)) for shape in sorted(shapes))
        raise UnsupportedModelError(
            f"layers of this {config.model_type} have several shapes of heads ({sizes}); "
            "give the shape of one with --heads instead of MODEL"
        )
    return shapes.pop()


def _read_config(model: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    path = builtin_model(model) if model.startswith("builtin:") else to_path(model)
    is_directory = path.is_dir()
    if is_directory:
        path /= "config.json"
    if not path.exists() and path.suffix != ".json":
        path = download_config(model)
    document = read_object(path)
    if is_directory:
        single = path.with_name(SINGLE_FILE)
        weights = read_header(single) if single.exists() else {}
        check_layers(path.parent, document, read_index(path.parent) or weights)
    config = read_config(path, document, trust_remote_code=trust_remote_code)
    check_cacheable(config, document)
    return config


def _layer_heads(config: Any) -> Heads:
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, int(kv_heads or heads), int(head_dim)


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Multiply float32 matrices with all bits inside the block: TF32 would be no reference."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def run_bench(
    shape: Heads, block_size: int, *, say: Say, say_case: Say, progress: Progress = SILENT
) -> BenchResult:
    """Check the kernels against their references, then time them.

    Without a GPU they are checked at small shapes, in Triton's interpreter, and nothing is timed.
    `say` gets the outcome, `say_case` each case on its way; both are called like print. A Fp8kvError if a
    kernel is wrong on this machine.
    """
    gpu = torch.cuda.is_available()
    try:
        from calib.bench.kernels import bench_cases, check_cases, load_launchers, time_cases
        from fp8kv_runtime.kernels.targets import gpu_name
        from fp8kv_runtime.kernels.tuning import tuned_path
    except ImportError as missing:
        raise InputError(f"the kernels need Triton, which is for Linux only ({missing})") from None
    device, launchers = torch.device("cuda" if gpu else "cpu"), load_launchers()
    cases = bench_cases(shape, block_size, device)
    configs = str(tuned_path()) if tuned_path().exists() else None
    with torch.inference_mode(), _whole_float32():
        try:
            iterate = partial(progress.each, "check", unit="cases")
            if wrong := check_cases(cases, launchers, device, say_case, iterate):
                raise Fp8kvError(f"wrong on this machine, nothing was timed: {', '.join(wrong)}")
            if not gpu:
                say("no GPU that torch can use: checked at small shapes, nothing was timed")
                return BenchResult("no GPU", shape, None, configs, [])
            copy, rows = time_cases(cases, launchers, device, partial(progress.each, "time", unit="cases"))
        except ValueError as error:
            say_case()  # ends the line of a case
            raise InputError(str(error)) from None
    return BenchResult(gpu_name(device), shape, copy, configs, rows)
