"""Every kind of scales that we read, in every format that vLLM reads: what `fp8kv convert` writes.

write_conversions.py OUTPUT   one directory per conversion, and one per repair
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from scale_cases import CASES, HEAD_DIM, LAYERS, write_case

from calib.files.names import STATS_FILE
from calib.scales.stats import KVStats, LayerStats, TensorStats
from calib.scales.stats_file import save_stats
from calib.transfer.convert import convert
from calib.transfer.repair import repair

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = [
    *("one scale per layer, [1]", "bfloat16", "with zero points", "per head, [H, 1, 1]"),
    *("per head, with query scales", "fused names", "HY names", "Quark names", "quark"),
    *("modelopt", "modelopt with query scales", "fp8", "no quantization_config"),
]
BROKEN = ["zero", "memory that nobody wrote", "NaN", "no V scales"]

output = Path(sys.argv[1])
shutil.rmtree(output, ignore_errors=True)
with tempfile.TemporaryDirectory() as scratch:
    made = {case.name: write_case(case, Path(scratch, str(i))) for i, case in enumerate(CASES)}
    # the others have FP8 weights, which vLLM cannot hold on every CPU
    tools = [*GOLDEN.glob("llmcompressor-*/*"), *GOLDEN.glob("nvidia-modelopt-*/kv")]
    sources = {name: made[name] for name in NAMES} | {f"{t.parent.name} {t.name}": t for t in tools}
    for name, source in sources.items():
        plain = name.replace("[", "").replace("]", "")  # vLLM globs with the path
        convert(source, "vllm", output / f"{plain}, to vllm")
        # their config is about weights as well: it stays, and ModelOpt's has no room beside it
        if name not in ("quark", "fp8"):
            convert(source, "modelopt", output / f"{plain}, to modelopt", reduce="max", without_q=True)
    x = TensorStats(torch.tensor([[8.0], [6.0]]).expand(2, HEAD_DIM))
    layers = {f"model.layers.{i}.self_attn": LayerStats(i, 1, k=x, v=x, q=x) for i in range(LAYERS)}
    save_stats(KVStats(layers), Path(scratch, STATS_FILE))
    for name in BROKEN:
        repair(made[name], Path(scratch), "vllm", output / f"{name}, repaired")
print(f"{len([*output.iterdir()])} directories in {output}")
