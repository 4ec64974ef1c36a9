"""The README of a baked model."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.engines.catalogue import find_engine
from calib.engines.latents import find_flags_at_one
from calib.files.model_directory import ModelDirectory
from calib.files.text import plain
from calib.formats.directory import prepend_card


def write_card(checkpoint: ModelDirectory, out: Path, baked: dict[str, Any], dataset: dict[str, Any]) -> None:
    """Put what was done, and how to serve it, before the source's README."""
    path = shlex.quote(baked["output"])
    same = outputs(baked["kl"], baked["rounded"], exact=baked["exact"])
    moved = "from Q to K and from the output projections to V"
    if baked["latent"]:
        moved = "into latents and k_pe, from queries and what reads latents"
    lines = [
        f"# {baked['model']}, baked for an {baked['for'].upper()} KV cache",
        "",
        f"Made by `fp8kv bake --for {baked['for']}`: factors were moved {moved}. {same} "
        f"Measured on {dataset['tokens']} tokens of {dataset['source']}.",
        "",
        *_serving(baked, path, checkpoint),
        "",
    ]
    prepend_card(checkpoint.path, "\n".join(map(plain, lines)), out)


def outputs(kl: float, rounded: Sequence[str], *, exact: bool = True) -> str:
    """How near the outputs are to the source's: `exact` but for the norms that are `rounded`."""
    differ = f"Its outputs differ from the source's by a KL of {kl:.2g} nats per token on a few random tokens"
    if rounded:
        return f"{differ}, as {len(rounded)} weights of norms had to be rounded; all else is exact."
    return "In float32 its outputs are the source's, bit for bit." if exact else f"{differ}."


def _serving(baked: dict[str, Any], path: str, checkpoint: ModelDirectory) -> list[str]:
    # engines take float32 weights for bfloat16 unless told otherwise; how two are told is not known
    wide = " --dtype float32" if baked["dtype"] == "float32" else ""
    if baked["for"] == "int8":
        return ["```bash", f"vllm serve {path} --kv-cache-dtype int8_per_token_head{wide}", "```"]
    names = ("vllm", "sglang") if wide else ("vllm", "sglang", "tensorrt-llm", "lmdeploy")
    engines = {name: find_engine(name) for name in names}
    flags = {name: engine.flag for name, engine in engines.items()}
    if baked["latent"]:
        config = checkpoint.config
        flags = {name: each for name in names if (each := find_flags_at_one(engines[name], config))}
    commands = [f"{engines[x].serve.format(path=path)} {flags[x]}{wide}" for x in flags]
    if not commands:
        return ["No engine is known to cache its latents: where one does, scale 1.0 is right."]
    text = "Scale 1.0 is right for it, so an engine needs no scales:"
    if baked["latent"]:
        text = "Scale 1.0 is right where latents are cached, as here; not in other engines:"
    return [text, "", "```bash", *commands, "```"]
