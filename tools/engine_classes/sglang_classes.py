"""What SGLang's own model classes do with the KV scales of a checkpoint.

sglang_classes.py [--check] [ARCHITECTURE ...]   see engine_tables.py

A server needs a GPU. What decides about KV scales does not: SGLang's own ModelConfig reads
config.json, its loader makes the quantization config and the class, and the class's `load_weights`
gets the scales and no weights. Then every attention layer is made ready to serve.
"""

import json
import os
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory, mkdtemp

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import no_pictures  # noqa: F401 (before SGLang)
import plain_configs
import torch
from engine_fates import Held, Pair
from engine_tables import main
from sglang.srt import utils
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import factory, rope_variant
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import nn

from calib.serving.sglang_worker import sglang_attention

CPU = torch.device("cpu")
DRAFTS = {"are asked": False}  # for the class of the layer that drafts tokens (MTP)
# what SGLang chooses on a CPU is refused for some models
OPTIONS = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
WANT_TRITON = ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM")

# what SGLang's classes ask of an accelerator and is of no matter for scales; they are imported
# later, and take these by their names
for module in (utils, utils.common, rope_variant):
    module.get_device = lambda *_: "cpu"
torch.cuda.get_device_capability = lambda *_: (9, 0)
factory.get_rope_cpu = lambda *arguments: factory.get_rope(*arguments[:-1])


class SGLang:
    """What engine_cases.py asks of an engine."""

    name = "SGLang"
    version = version("sglang")
    quantizations = ("compressed-tensors", "modelopt", "fp8", "quark")
    of_latents = ()

    def build(self, directory: Path) -> TemporaryDirectory[str]:
        """The files for a model of every case: loading may change more than scales.

        A class that does not load a checkpoint without scales here says nothing about scales.
        """
        kept = TemporaryDirectory()
        copytree(directory, kept.name, dirs_exist_ok=True)
        self.hold(kept, [])
        return kept

    def caches_latents(self, model: TemporaryDirectory[str]) -> bool:
        """Whether its layers cache latents (MLA): K as wide as the latent and k_pe, V its part."""
        layers = sglang_attention(built(Path(model.name))).values()
        return any(layer.head_dim > layer.v_head_dim for layer in layers)

    def heads(self, model: TemporaryDirectory[str]) -> int:
        """How many KV heads its attention layers have."""
        made = built(Path(model.name))
        return next(iter(sglang_attention(made).values())).tp_k_head_num

    def hold(self, model: TemporaryDirectory[str], tensors: Iterable[tuple[str, torch.Tensor]]) -> Held:
        """What the attention layers compute with after loading scales, [1] or [K, 1, 1]."""
        made = load(Path(model.name), tensors)
        return {name: in_force(layer) for name, layer in sglang_attention(made).items()}


def load(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> nn.Module:
    """The model of config.json with these scales, [1] or [K, 1, 1], its attention layers ready to serve.

    Other layers are not made ready: they have no weights here, and want kernels of a GPU.
    """
    made = built(directory)
    loader.DefaultModelLoader.load_weights_only(made, iter(tensors), CPU)
    for layer in sglang_attention(made).values():
        if layer.k_scale is not None:
            layer.quant_method.process_weights_after_loading(layer)
    return made


def built(directory: Path) -> nn.Module:
    """The model of config.json as SGLang makes it, without weights."""
    args = arguments(directory)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    join_group()
    config, how = ModelConfig.from_server_args(args, is_draft_model=DRAFTS["are asked"]), LoadConfig()
    quantization = loader._get_quantization_config(config, how)
    with loader.set_default_torch_dtype(config.dtype):
        return loader._initialize_model(config, how, quantization)


def arguments(directory: Path) -> ServerArgs:
    """What the server's command line would say."""
    options = {
        "model_path": str(directory),
        "device": "cpu",
        "skip_tokenizer_init": True,
        **OPTIONS,
    }
    config = json.loads((directory / "config.json").read_text())
    plain_configs.register(config["model_type"])
    if {*config["architectures"]} & {*WANT_TRITON}:
        options["attention_backend"] = "triton"
    return ServerArgs(**options)


@cache
def join_group() -> None:
    """What SGLang's model classes ask for before they can be made: a group of one."""
    meeting = f"file://{mkdtemp()}/rendezvous"
    init_distributed_environment(1, 0, meeting, local_rank=0, backend="gloo")
    initialize_model_parallel()


def in_force(layer: RadixAttention) -> Pair | None:
    """The scales of K and V that a layer computes with; None if SGLang gave it no place."""
    if layer.k_scale is None:
        return None
    return (layer.k_scale_float,), (layer.v_scale_float,)


if __name__ == "__main__":
    with torch.no_grad():
        main(SGLang())
