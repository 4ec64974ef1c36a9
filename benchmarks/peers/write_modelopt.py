"""What ModelOpt writes of the tiny Llama: FP8 K and V alone, and with FP8 weights.

Runs in an environment that holds nvidia-modelopt, not ours: `make golden`.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import tiny_llama
from modelopt.torch.export import export_hf_checkpoint


def main() -> None:
    """Write and keep each."""
    nothing = {"quantizer_name": "*", "enable": False}
    keys_and_values = mtq.FP8_KV_CFG["quant_cfg"]
    _write("kv", {"quant_cfg": [nothing, *keys_and_values], "algorithm": "max"})
    both = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    both["quant_cfg"] = [*both["quant_cfg"], *keys_and_values]
    _write("fp8-kv", both)


def _write(case: str, config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = tiny_llama.make(scratch / "model")
        amax = tiny_llama.true_amax(model)
        mtq.quantize(model, config, _read_all)
        export_hf_checkpoint(model, export_dir=scratch / "output")
        tiny_llama.keep(scratch / "output", "nvidia-modelopt", case, amax)


def _read_all(model: Any) -> None:
    for row in tiny_llama.token_ids():
        model(row[None])


if __name__ == "__main__":
    main()
