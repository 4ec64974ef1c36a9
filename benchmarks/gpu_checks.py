"""What tests do not ask a GPU: scales taken two ways must be the same, and recorded steps the model's own.

    python benchmarks/gpu_checks.py peft | offload | layerwise | awq | graphs
    torchrun --nproc-per-node gpu benchmarks/gpu_checks.py ddp

Without a GPU they run on the CPU. One GPU has no second rank: NCCL does not take two on one.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import fake_quant
import torch
from families import save_model, tiny_model
from gpu_queue import LACKING
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from calib import Recipe, scales_for
from calib.capture.loop import calibrate as measure
from calib.commands.app import main as fp8kv
from calib.data import make_batches
from calib.files.model_directory import open_model_directory
from calib.models.config import load_config
from calib.models.load import load_model
from fp8kv_runtime.hf import fp8_attention
from fp8kv_runtime.hf.graph import RecordedSteps

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "quantized"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = torch.randint(3, 127, (16, 80), generator=torch.Generator().manual_seed(0))
RECIPE = Recipe(targets="qkv", observer={"name": "mse"}, strategy="attn_head")
DATA = ("--dataset", "random", "--samples", 16, "--seq-len", 64, "--device", DEVICE, "--quiet")
PROJECTIONS = tuple(f".{x}_proj.weight" for x in "qkvo")

Scales = dict[str, Tensor]


def batches(rows: Tensor = ROWS) -> list[Tensor]:
    """Return a batch [1, T] for every row of [B, T], so that all ways read the same ones."""
    return [row[None].to(DEVICE) for row in rows]


def peft() -> None:
    """Measure a model with an adapter, and with the adapter merged into its weights."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama").to(DEVICE)
    plain = scales_for(model, batches(), recipe=RECIPE)
    config = LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    scales = scales_for(adapted, batches(), recipe=RECIPE)
    merged = scales_for(adapted.merge_and_unload(), batches(), recipe=RECIPE)
    assert largest_error(scales, plain) > 1e-2, "the adapter changes nothing"
    check("an adapter, and merged", scales, merged, 1e-3)


def ddp() -> None:
    """Measure in a trainer's processes, each with its part of the rows, and all rows in each."""
    distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size == 1:
        print("two GPUs, to exchange anything")
        sys.exit(LACKING)
    model = tiny_model("llama").to(DEVICE)
    together = scales_for(DistributedDataParallel(model), batches(ROWS[rank::size]), recipe=RECIPE)
    alone = scales_for(model, batches(), recipe=RECIPE, gather=False)
    check(f"rank {rank} of {size}, {distributed.get_backend()}", together, alone)
    distributed.destroy_process_group()


def offload() -> None:
    """Measure a model whose weights wait in the CPU's memory, and one whose weights do not."""
    from accelerate import cpu_offload

    model, plain = tiny_model("llama"), tiny_model("llama").to(DEVICE)
    cpu_offload(model, execution_device=DEVICE)
    ways = [measure(each, make_batches(ROWS.tolist(), 4, pad_id=0), RECIPE) for each in (model, plain)]
    check("offloaded weights", *(stats.tensors() for stats in ways))


def layerwise() -> None:
    """Calibrate with one layer in memory at a time, and with all."""
    with tempfile.TemporaryDirectory() as scratch:
        model = save_model(tiny_model("llama"), Path(scratch, "model"))
        for way in ("layerwise", "none"):
            run("calibrate", model, "-o", Path(scratch, way), "--offload", way, *DATA)
        files = [Path(scratch, way, "fp8kv_stats.safetensors") for way in ("layerwise", "none")]
        check("layer by layer", *map(load_file, files))


def awq() -> None:
    """Have AWQ's and GPTQ's modules in transformers read what `fp8kv bake` made of their weights."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        tiny = save_model(tiny_model("llama"), scratch / "tiny")
        for case in sorted(case for name in ("*/awq-w4*", "*/gptq-w4*") for case in GOLDEN.glob(name)):
            source, baked = (
                scratch / what / f"{case.parent.name}, {case.name}" for what in ("source", "baked")
            )
            source.mkdir(parents=True)
            for file in (*case.glob("*.json"), case / "model.safetensors", *tiny.glob("tokenizer*")):
                (source / file.name).write_bytes(file.read_bytes())
            run("calibrate", source, "-o", scratch / "scales", *DATA, "--format", "fp8kv", "--overwrite")
            run("bake", source, "--scales", scratch / "scales", "--for", "fp8", "-o", baked)
            checkpoint = open_model_directory(baked)
            ours = load_model(checkpoint, load_config(checkpoint), "float32", "cpu").state_dict()
            ours = {name: x for name, x in ours.items() if name.endswith(PROJECTIONS)}
            theirs = AutoModelForCausalLM.from_pretrained(baked, dtype=torch.float16, device_map=DEVICE)
            modules = {name: theirs.get_submodule(name.removesuffix(".weight")) for name in ours}
            check(baked.name, {name: weight_of(each) for name, each in modules.items()}, ours, 2e-3)


def graphs() -> None:
    """Compare the logits of recorded steps with the model's own, also of one that cannot be recorded."""
    for name in ("llama", "qwen2", "gpt_neox", "mixtral", "gemma2"):
        model = tiny_model(name).to(DEVICE, torch.float16)
        scales = fake_quant.scales_for(model)
        recorded, plain = (_steps(model, scales, records) for records in (True, False))
        check(f"recorded steps of {name}", {"logits": recorded}, {"logits": plain})
    norm = model.get_decoder().norm
    norm.forward = lambda x, own=norm.forward: own(x) * (float(x.abs().max()) > 0)  # waits for the GPU
    check("a model that waits", *({"logits": _steps(model, scales, records)} for records in (True, False)))


def _steps(model: torch.nn.Module, scales: object, records: bool) -> Tensor:
    """Return the logits of 40 steps after two rows, one of which is padded."""
    mask = torch.ones_like(ROWS[:2, :20]).to(DEVICE)
    mask[0, :3] = 0
    plain = nullcontext() if records else mock.patch.object(RecordedSteps, "_parameters", [])
    with plain, torch.no_grad(), fp8_attention(model, scales, block_size=16):
        output = model.generate(
            ROWS[:2, :20].to(DEVICE), attention_mask=mask, max_new_tokens=40, min_new_tokens=40,
            do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
    return torch.stack(output.logits)


def run(*arguments: object) -> None:
    """Run a command of fp8kv."""
    try:
        fp8kv([*map(str, arguments)])
    except SystemExit as end:
        if end.code:
            raise


@torch.inference_mode()
def weight_of(module: torch.nn.Module) -> Tensor:
    """Return what a module multiplies by, [outputs, inputs], from what it makes of the unit vectors."""
    return module(torch.eye(module.in_features, dtype=torch.float16, device=DEVICE)).T


def check(name: str, found: Scales, expected: Scales, error: float = 0.0) -> None:
    """Print a line; end with status 1 where they differ by more."""
    assert found.keys() == expected.keys() != set(), (
        f"{name}: {found.keys() ^ expected.keys()} are in one alone"
    )
    largest = largest_error(found, expected)
    print(f"{name}, on {DEVICE}: {len(found)} tensors, largest error {largest:.1e}", flush=True)
    if not largest <= error:
        sys.exit(f"{name}: at most {error:.0e} was expected")


def largest_error(found: Scales, expected: Scales) -> float:
    """Return the largest difference over the largest value of its tensor."""
    pairs = [(found[name].float().cpu(), x.float()) for name, x in expected.items()]
    errors = [(x - y).abs().max() / (y.abs().max() or 1) for x, y in pairs]
    return float(torch.stack(errors).max())  # NaN is the largest


CHECKS: dict[str, Callable[[], None]] = {f.__name__: f for f in (peft, ddp, offload, layerwise, awq, graphs)}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CHECKS:
        sys.exit(f"give one of {', '.join(CHECKS)}")
    CHECKS[sys.argv[1]]()
