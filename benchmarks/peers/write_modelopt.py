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
    _write("kv", mtq.FP8_KV_CFG)
    both = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    both["quant_cfg"] = [*both["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    _write("fp8-kv", both)


def _write(case: str, config: dict[str, Any]) -> None:
    model = tiny_llama.make()
    amax = tiny_llama.true_amax(model)

    def read_all(model: Any) -> None:
        for row in tiny_llama.token_ids():
            model(row[None])

    mtq.quantize(model, config, read_all)
    with tempfile.TemporaryDirectory() as directory:
        export_hf_checkpoint(model, export_dir=directory)
        tiny_llama.keep(Path(directory), "nvidia-modelopt", case, amax)


if __name__ == "__main__":
    main()
