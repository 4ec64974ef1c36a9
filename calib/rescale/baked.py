"""What a baked model says of itself, and whether a checkpoint is one."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from calib.errors import InputError
from calib.model.checkpoint import Checkpoint, fingerprint
from calib.output.checkpoint_directory import prepend_card
from calib.scalefiles.file_names import BAKE_FILE
from calib.scalefiles.json import read_object
from calib.scalefiles.names import is_of_cache
from calib.verify.rules import all_rules


def baked_for(checkpoint: Checkpoint) -> str | None:
    """What a checkpoint was baked for, fp8 or int8; None: its weights are no baked ones."""
    file = checkpoint.path / BAKE_FILE
    says = read_object(file) if file.exists() else {}
    is_own = says.get("weights") == weights_fingerprint(checkpoint)
    return str(says.get("for")) if says and is_own else None


def check_bakeable(checkpoint: Checkpoint) -> None:
    """Refuse a model that was baked, or has scales."""
    if purpose := baked_for(checkpoint):
        raise InputError(
            f"'{checkpoint.path}' is baked for {purpose}; bake the model it was made from"
        )
    if scale := next(filter(is_of_cache, checkpoint.entries), None):
        raise InputError(
            f"'{checkpoint.path}' has KV scales ('{scale}'), which would not fit what is baked; "
            "take them out with fp8kv strip"
        )


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """The fingerprint of the weight files alone: a config may be edited."""
    return fingerprint(replace(checkpoint, config={}))


def write_card(
    checkpoint: Checkpoint, out: Path, baked: dict[str, Any], dataset: dict[str, Any]
) -> None:
    """Put what was done, and how to serve it, before the source's README."""
    path = shlex.quote(baked["output"])
    same = (
        "In float32 its outputs are the source's, bit for bit."
        if baked["exact"]
        else f"Its outputs differ from the source's by a KL of {baked['kl']:.2g} nats per token."
    )
    lines = [
        f"# {baked['model']}, baked for an {baked['for'].upper()} KV cache",
        "",
        f"Made by `fp8kv bake --for {baked['for']}`: factors were moved from Q to K and from the "
        f"output projections to V. {same} Measured on {dataset['tokens']} tokens of "
        f"{dataset['source']}.",
        "",
        *_serving(baked["for"], path),
        "",
    ]
    prepend_card(checkpoint.path, "\n".join(lines), out)


def _serving(purpose: str, path: str) -> list[str]:
    if purpose == "int8":
        return ["```bash", f"vllm serve {path} --kv-cache-dtype int8_per_token_head", "```"]
    rules = all_rules()
    engines = (rules[name] for name in ("vllm", "sglang", "tensorrt-llm", "lmdeploy"))
    commands = [f"{each.serve.format(path=path)} {each.flag}" for each in engines]
    text = "Scale 1.0 is right for it, so an engine needs no scales:"
    return [text, "", "```bash", *commands, "```"]
