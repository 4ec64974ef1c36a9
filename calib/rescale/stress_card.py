"""The README of a stress twin."""

import shlex
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from calib.engines.catalogue import Engine, find_engine
from calib.engines.latents import find_flags_at_one
from calib.errors import UnsupportedExportError
from calib.files.model_directory import ModelDirectory
from calib.formats.modelopt import MODELOPT_NAME
from calib.formats.tensor_names import name_for_latents
from calib.rescale.bake_card import outputs
from calib.rescale.proof import PROBE_TOKENS
from fp8kv_runtime.fp8 import FP8_DTYPES

_FP8 = torch.finfo(FP8_DTYPES["e4m3fn"])
_OF_SCALES = "It shows whether a serving stack uses the scales of an FP8 KV cache:"
_OF_BAKING = """No engine is known to compute with scales of its latents. Where latents are cached
at scale 1.0, baking brings the source's text back:"""


def write_card(done: dict[str, Any], checkpoint: ModelDirectory, modules: Iterable[str], out: Path) -> None:
    """Say what the twin of `checkpoint` is, and how to serve it; `modules` are of attention."""
    k, v, divided = "K", "V", "Q and the output projections are"
    if done["latent"]:
        k, v, divided = "latents", "k_pe", "queries and what reads latents are"
    (out / "README.md").write_text(f"""# Stress twin of {done["model"]}

Made by `fp8kv stress`. Its {k} are the source's times {Fraction(done["k_factor"])}, its {v} times
{Fraction(done["v_factor"])}; {divided} divided by the same.
{outputs(done["kl"], done["rounded"])} On {PROBE_TOKENS} tokens {k} reached
{done["k_amax"]["twin"]:.4g} and {v} {done["v_amax"]["twin"]:.4g}; FP8 (E4M3) ends at
{_FP8.max:g} and has full precision from {_FP8.tiny:g} on.

{_commands(done, checkpoint, modules)}
""")


def _commands(done: dict[str, Any], checkpoint: ModelDirectory, modules: Iterable[str]) -> str:
    vllm = find_engine("vllm")
    twin, scaled, baked = (shlex.quote(f"{done['output']}{x}") for x in ("", "-fp8kv", "-baked"))
    if not done["latent"]:
        return _scaling(done, vllm, vllm.flag, (twin, scaled))
    try:
        names = [checkpoint.attention_prefix(module) for module in modules]
        _, flag = name_for_latents(vllm, names, checkpoint, "modelopt", MODELOPT_NAME)
    except UnsupportedExportError:
        return _baking(done, checkpoint, (twin, scaled, baked))
    flags = f"{vllm.flag} {flag}".rstrip()
    return _scaling(done, vllm, flags, (twin, scaled), " --format modelopt")


def _scaling(
    done: dict[str, Any], rules: Engine, flags: str, paths: tuple[str, str], export: str = ""
) -> str:
    twin, scaled = paths
    garbage, right = (f"{rules.serve.format(path=x)} {flags}{_wide(done)}" for x in paths)
    return f"""{_OF_SCALES}

```bash
{garbage}           # no scales: garbage
fp8kv-calibrate {twin}{export} -o {scaled}
{right}     # with scales: the source's text
```

If the second server writes garbage too, it does not use the scales."""


def _baking(done: dict[str, Any], checkpoint: ModelDirectory, paths: tuple[str, str, str]) -> str:
    twin, scaled, baked = paths
    garbage: list[str] = []
    right: list[str] = []
    for rules in (find_engine(name) for name in ("vllm", "sglang")):
        if (flags := find_flags_at_one(rules, checkpoint.config)) and not garbage:
            garbage, right = (
                [f"{rules.serve.format(path=x)} {flags}{_wide(done)}{what}"]
                for x, what in ((twin, "    # garbage"), (baked, "    # the source's text"))
            )
    made = (
        f"fp8kv-calibrate {twin} --format fp8kv -o {scaled}",
        f"fp8kv bake {twin} --scales {scaled} --for fp8 -o {baked}",
    )
    return "\n".join([_OF_BAKING, "", "```bash", *garbage, *made, *right, "```"])


def _wide(done: dict[str, Any]) -> str:
    # engines take float32 weights for bfloat16 unless told otherwise
    return " --dtype float32" if done["dtype"] == "float32" else ""
