"""Write the table of formats in docs/formats.md from `FORMATS`: `make pages`."""

import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from calib.choices import FormatName, Strategy
from calib.files.model_directory import ModelDirectory
from calib.files.names import SINGLE_FILE
from calib.files.safetensors_header import Entry
from calib.formats import FORMATS, Export, export
from calib.scales.scales import KVScales, LayerScales

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
_HEADINGS = (
    "`--format`",
    "For",
    "Tensors `<attn>…`, float32",
    "Config",
    "Beside it",
    "`tensor`",
    "`attn_head`",
    "Query scales",
)
_TABLE = re.compile(r"^\| `--format` \|.*?\n\n", re.DOTALL | re.MULTILINE)
_MODULE = "model.layers.0.self_attn"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def page() -> str:
    """Return the page with the table as `FORMATS` has it now."""
    lines = [_HEADINGS, ["---"] * len(_HEADINGS), *map(_row, FORMATS)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return _TABLE.sub(lambda _: f"{table}\n", PAGE.read_text(), count=1)


def _row(name: FormatName) -> list[str]:
    """Return what a format writes for a small Llama."""
    target, written = FORMATS[name], _export(name, "tensor")
    tensors = [f"`{tensor.removeprefix(_MODULE)}`" for tensor in written.tensors]
    shapes = [_shape(name, strategy) for strategy in ("tensor", "attn_head")]
    documents = ", ".join(f"`{file}`" for file in written.documents)
    engine, values = target.engine, ", ".join(tensors)
    if target.nvfp4:
        engine += ", NVFP4 cache"
        values += f"; absmax / {448 * target.over_written:g}"
    return [
        f"`{name}`",
        engine,
        values or "none",
        ", ".join(_config_words(written.config or {})) or "unchanged",
        documents or "nothing",
        *shapes,
        "yes" if target.reads_q else "no",
    ]


def _export(name: FormatName, strategy: Strategy) -> Export:
    scale = torch.ones(1 if strategy == "tensor" else 2)
    q = scale if FORMATS[name].reads_q else None
    scales = KVScales(strategy, "e4m3fn", {_MODULE: LayerScales(0, k=scale, v=scale, q=q)})
    header = {f"{_MODULE}.k_proj.weight": Entry("F32", (0,), 0, 0)}
    return export(scales, ModelDirectory(Path("model"), dict(_CONFIG), {SINGLE_FILE: header}), name)


def _config_words(config: dict[str, Any]) -> list[str]:
    """Return the settings of a config that announce its scales."""
    quantization = config.get("quantization_config", {})
    keys = ("quant_method", "quant_algo", "kv_cache_quant_algo")
    words = [f"`{key}: {quantization[key]}`" for key in keys if key in quantization]
    if "kv_cache_scheme" in quantization:
        words.append("`kv_cache_scheme`")
    return words + [f"`{key}`" for key in config.keys() - _CONFIG.keys() - {"quantization_config"}]


def _shape(name: FormatName, strategy: Strategy) -> str:
    """Return the shape of scales with a strategy."""
    if strategy not in FORMATS[name].strategies:
        return "`--reduce max`"
    tensors = [*_export(name, strategy).tensors.values()]
    if tensors:
        sizes = ["heads" if size > 1 else "1" for size in tensors[0].shape]
        return f"`[{', '.join(sizes)}]`"
    return "one number" if _export(name, strategy).documents else "yes"


if __name__ == "__main__":
    PAGE.write_text(page())
