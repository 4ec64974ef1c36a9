"""Quantised weights with our scales, for `check_tokens.py quantized`.

write_quantized.py MODEL CALIBRATION OUT

OUT/tools has what other tools wrote, and OUT/served has MODEL in some of their layouts, calibrated;
OUT/served/applied has the scales of CALIBRATION, of MODEL itself.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from coded_forms import Form, awq, fp8, packed
from command_line import calibrate, fp8kv
from families import save_model, tiny_model

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"
TOOLS = ("llmcompressor-*/*", "nvidia-modelopt-*/*", "amd-quark-*/*", "*/fp8-block*", "auto-*/*-w4")
NO_PLACE = ("gptq-w4", "awq-w4", "auto-round-w4")  # for scales, in any engine
UNREADABLE = ("int4-awq", "int8-smoothquant", "w4a8-awq")
TILE = {"high": 128, "wide": 128}
OF_QUARK = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}


def quark_uint4(module, weight):
    """Quark packs UINT4 as AWQ does, under names of its own."""
    tensors, values = awq(module, weight)
    return {f"{module}.{OF_QUARK[name.split('.')[-1]]}": t for name, t in tensors.items()}, values


def tiles_with_ones(module, weight):
    """ModelOpt's scales of tiles have two dimensions of 1."""
    tensors, values = fp8(module, weight, **TILE)
    scale = {name: t[:, None, :, None] for name, t in tensors.items() if "scale" in name}
    return tensors | scale, values


def fp8_row(module, weight):
    """ModelOpt's scales of rows have one dimension."""
    return fp8(module, weight, high=1, shape=[-1])


# as the tools' own, whose tiny models have fewer rows than a tile, so vLLM does not start
TILES = {
    "llmcompressor-0.14.0.1/fp8-block": partial(fp8, **TILE),
    "nvidia-modelopt-0.47.0/fp8-block": tiles_with_ones,
    "auto-round-0.16.1/fp8-block": partial(fp8, name="weight_scale_inv", **TILE),
}
# each with the config that the tool itself wrote for a tiny model
LAYOUTS = {
    "llmcompressor-0.14.0.1/w4a16": packed,
    "nvidia-modelopt-0.47.0/fp8-channel": fp8_row,
    "amd-quark-0.13/uint4-asym": quark_uint4,
}


def quantise(model: Path, case: str, make, directory: Path) -> Path:
    """Write `model` in the layout of `case`, with the config that its tool wrote."""
    says = json.loads((GOLDEN / case / "config.json").read_text())["quantization_config"]
    shutil.copytree(model, directory)
    with tempfile.TemporaryDirectory() as scratch:
        return Form(says, make).quantise(directory, Path(scratch, "plain"))


def written(done) -> None:
    if done.exit_code:
        sys.exit(f"FAILED: {done.stderr}")


def sources(home: Path) -> Iterator[tuple[str, Path]]:
    """The tiny models of other tools, with a tokenizer."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tiny = save_model(tiny_model("llama", **sizes, **heads), home / "tiny")
    for case in sorted({case for pattern in TOOLS for case in GOLDEN.glob(pattern)}):
        name = f"{case.parent.name}/{case.name}"
        if make := TILES.get(name):
            yield name, quantise(tiny, name, make, home / name)
        elif case.name not in UNREADABLE:
            shutil.copytree(case, home / name, ignore=lambda *_: ["dequantized.safetensors"])
            for file in tiny.glob("tokenizer*"):
                shutil.copy(file, home / name)
            yield name, home / name


def main() -> None:
    """Write them all."""
    model, calibration, out = map(Path, sys.argv[1:])
    shutil.rmtree(out, ignore_errors=True)
    for name, source in sources(out / "sources"):
        done = calibrate(source, "-o", out / "tools" / name.replace("/", ", "), "--quiet")
        if source.name not in NO_PLACE:
            written(done)
        elif "engines have no place for KV scales" not in done.stderr:
            sys.exit(f"FAILED: scales beside {name}")
    for case, make in LAYOUTS.items():
        name = case.partition("-")[0]
        source = quantise(model, case, make, out / "sources" / name)
        flags = ("--dataset", "builtin:python-docs", "--samples", 4, "--seq-len", 128, "--quiet")
        written(fp8kv("calibrate", source, "-o", out / "served" / name, *flags))
    source = out / "sources" / "llmcompressor"
    written(fp8kv("apply", calibration, source, "-o", out / "served" / "applied"))
    print(f"{len([*(out / 'tools').iterdir()])} tiny models and {len(LAYOUTS)} others in {out}")


if __name__ == "__main__":
    main()
