"""READMEs of a baked model and of a stress twin: the commands that serve them."""

import shlex
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from calib.engines.catalogue import find_engine
from calib.engines.latents import find_flags_at_one
from calib.errors import UnsupportedExportError
from calib.files.model_directory import ModelDirectory
from calib.files.names import CARD_FILE
from calib.formats.card import prepend_card, render_card
from calib.formats.tensor_names import name_for_latents
from fp8kv_runtime.fp8 import FP8_DTYPES

_FP8 = torch.finfo(FP8_DTYPES["e4m3fn"])
_FLOAT32 = " --dtype float32"  # engines take such weights for bfloat16 unless told otherwise


def write_bake_card(
    checkpoint: ModelDirectory, out: Path, baked: dict[str, Any], dataset: dict[str, Any]
) -> None:
    """Put the factors of a baked model, and how to serve it, before the source's README."""
    facts = baked | {"purpose": baked["for"], "dataset": dataset}
    commands = _serve_baked(baked, checkpoint)
    prepend_card(checkpoint.path, render_card("bake", **facts, commands=commands), out)


def _serve_baked(baked: dict[str, Any], checkpoint: ModelDirectory) -> list[str]:
    """Return the commands that serve a baked model; none where no engine is known to."""
    path, is_float32 = shlex.quote(baked["output"]), baked["dtype"] == "float32"
    dtype = _FLOAT32 * is_float32
    if baked["for"] == "int8":
        vllm = find_engine("vllm")
        int8 = vllm.caches.types["int8_per_token_head"][0]
        return [f"{vllm.serve.format(path=path)} {int8.flag}{dtype}"]
    # how TensorRT-LLM and LMDeploy are told the type of the weights is not known
    names = ("vllm", "sglang") if is_float32 else ("vllm", "sglang", "tensorrt-llm", "lmdeploy")
    commands = []
    for engine in map(find_engine, names):
        flags = find_flags_at_one(engine, checkpoint.config) if baked["latent"] else engine.flag
        if flags:
            commands.append(f"{engine.serve.format(path=path)} {flags}{dtype}")
    return commands


def write_stress_card(
    twin: dict[str, Any], checkpoint: ModelDirectory, modules: Iterable[str], out: Path
) -> None:
    """Say how a twin of `checkpoint`, with these attention `modules`, differs, and how to serve it."""
    factors = {key: Fraction(twin[key]) for key in ("k_factor", "v_factor")}
    commands = _serve_twin(twin, checkpoint, modules)
    limits = {"fp8_largest": _FP8.max, "fp8_smallest": _FP8.tiny}
    card = render_card("stress", **{**twin, **factors, **commands, **limits}, exact=True)
    (out / CARD_FILE).write_text(card)


def _serve_twin(twin: dict[str, Any], checkpoint: ModelDirectory, modules: Iterable[str]) -> dict[str, str]:
    """Return the commands that show garbage, and then the source's text: with scales, or baked."""
    path, scaled, baked = (shlex.quote(twin["output"] + ending) for ending in ("", "-fp8kv", "-baked"))
    vllm = find_engine("vllm")
    serve, export, bake = f"{vllm.serve} {vllm.flag}", "", ""
    if twin["latent"]:
        try:
            names = [checkpoint.attention_prefix(module) for module in modules]
            _, flag = name_for_latents(vllm, names, checkpoint)
            serve, export = f"{serve} {flag}".rstrip(), " --format modelopt"
        except UnsupportedExportError:
            engines = vllm, find_engine("sglang")
            flags = ((engine.serve, find_flags_at_one(engine, checkpoint.config)) for engine in engines)
            serve = next((f"{command} {flag}" for command, flag in flags if flag), "")
            export, bake = " --format fp8kv", f"fp8kv bake {path} --scales {scaled} --for fp8 -o {baked}"
    if serve and twin["dtype"] == "float32":
        serve += _FLOAT32
    return {
        "serve_twin": serve.format(path=path),
        "calibrate": f"fp8kv-calibrate {path}{export} -o {scaled}",
        "bake": bake,
        "serve_answer": serve.format(path=baked if bake else scaled),
    }
