"""What ModelOpt writes of the tiny Llama: K and V in FP8 or NVFP4, alone and with FP8 weights.

Runs in an environment that holds nvidia-modelopt, not ours: `make bench-golden`.
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
    for name, cache in (("kv", mtq.FP8_KV_CFG), ("nvfp4-kv", mtq.NVFP4_KV_CFG)):
        keys_and_values = cache["quant_cfg"]
        _write(name, {"quant_cfg": [nothing, *keys_and_values], "algorithm": "max"})
        both = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
        both["quant_cfg"] = [*both["quant_cfg"], *keys_and_values]
        _write(f"fp8-{name}", both)


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
