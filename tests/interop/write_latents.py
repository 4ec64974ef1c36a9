"""Write a small DeepSeek-V2 whose latents FP8 does not hold at 1.0, its scales, and it baked.

write_latents.py OUT   writes OUT/source, its stress twin OUT/twin, and of the twin OUT/scales and
                       OUT/baked, by fp8kv's own commands
"""

import shutil
import sys
from pathlib import Path

import torch
from command_line import calibrate, fp8kv
from families import save_model
from transformers import AutoModelForCausalLM
from write_families import write_source


def sharpen(directory: Path) -> None:
    """Make attention of a random model matter, and to whom it attends."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(32)
            layer.self_attn.kv_a_proj_with_mqa.weight.mul_(8)
            layer.self_attn.q_b_proj.weight.mul_(8)
    save_model(model, directory)


def main() -> None:
    """Write all four."""
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    source, twin, scales, baked = (out / x for x in ("source", "twin", "scales", "baked"))
    write_source("DeepseekV2ForCausalLM", source)
    sharpen(source)
    for command in (
        lambda: fp8kv("stress", source, "-o", twin),
        lambda: calibrate(twin, "-o", scales, "--format", "fp8kv", "--quiet"),
        lambda: fp8kv("bake", twin, "--scales", scales, "--for", "fp8", "-o", baked),
    ):
        done = command()
        assert done.exit_code == 0, done.stderr


if __name__ == "__main__":
    main()
