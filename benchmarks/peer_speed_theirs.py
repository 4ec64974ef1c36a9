"""Other tools' side of `peer_speed.py`; the environment holds one of them, not ours.

Each calibrates K and V alone, as its documentation shows. llm-compressor's tokenizer is loaded outside the
timed call, and its documents are not shuffled, which spares it truncation when it batches.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import laps, machine, peak_bytes, reset_peak, write_result
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

# what each tool calls the scale of K, after the attention module's name
NAMES = (".k_scale", ".k_proj.k_scale", ".k_proj.output_scale")

Calibrate = Callable[[PreTrainedModel], PreTrainedModel]
Save = Callable[[PreTrainedModel, Path], Any]


def main() -> None:
    """Run one calibration as told and write what it took."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    samples = json.loads(args.documents.read_text())["samples"]
    calibrate, save = TOOLS[args.tool](args, samples)
    clock = [time.perf_counter()]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    clock.append(time.perf_counter())
    reset_peak()
    processor = time.process_time()
    model = calibrate(model)
    clock.append(time.perf_counter())
    processor, peak = time.process_time() - processor, peak_bytes()
    with tempfile.TemporaryDirectory() as name:
        save(model, Path(name))
        clock.append(time.perf_counter())
        scales = _k_scales(Path(name))
    result = {
        "tokens": _tokens_read(samples, args.batch_size),
        "batch_size": args.batch_size,
        "pipeline": args.pipeline,
        "observer": "its default",
        "seconds": laps(clock),
        "processor_seconds": processor,
        "peak_bytes": peak,
        "k_scales": scales,
        "machine": machine(),
    }
    write_result(args.output, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--pipeline", choices=["default", "basic", "post_rope"], default="default")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def _llmcompressor(args: argparse.Namespace, samples: list[list[int]]) -> tuple[Calibrate, Save]:
    from compressed_tensors.quantization import QuantizationArgs
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    masks = [[1] * len(sample) for sample in samples]
    data = Dataset.from_dict({"input_ids": samples, "attention_mask": masks})
    scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)

    def calibrate(model: PreTrainedModel) -> PreTrainedModel:
        return oneshot(
            model=model,
            processor=tokenizer,
            dataset=data,
            recipe=QuantizationModifier(kv_cache_scheme=scheme),
            max_seq_length=args.seq_len,
            num_calibration_samples=len(samples),
            shuffle_calibration_samples=False,
            batch_size=args.batch_size,
            **({} if args.pipeline == "default" else {"pipeline": args.pipeline}),
        )

    return calibrate, lambda model, directory: model.save_pretrained(directory, save_compressed=True)


def _modelopt(args: argparse.Namespace, samples: list[list[int]]) -> tuple[Calibrate, Save]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    nothing = {"quantizer_name": "*", "enable": False}
    config = {"quant_cfg": [nothing, *mtq.FP8_KV_CFG["quant_cfg"]], "algorithm": "max"}
    batches = _batches(args, samples)

    def read(model: PreTrainedModel) -> None:
        for batch in batches:
            model(batch)

    return (
        lambda model: mtq.quantize(model, config, read),
        lambda model, directory: export_hf_checkpoint(model, export_dir=directory),
    )


def _quark(args: argparse.Namespace, samples: list[list[int]]) -> tuple[Calibrate, Save]:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as quark

    spec = quark.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
    names = ["*k_proj", "*v_proj"]
    outputs = {name: quark.QLayerConfig(output_tensors=spec) for name in names}
    config = quark.QConfig(
        global_quant_config=quark.QLayerConfig(),
        # with kv_cache_quant_config alone it reads no data, and writes 1.0
        layer_quant_config=outputs,
        kv_cache_quant_config=outputs,
        kv_cache_group=names,
        kv_cache_post_rope=args.pipeline == "post_rope",
    )
    quantizer, batches = ModelQuantizer(config), _batches(args, samples)
    return (
        lambda model: quantizer.freeze(quantizer.quantize_model(model, batches)),
        lambda model, directory: export_safetensors(model, directory, custom_mode="quark"),
    )


TOOLS = {"llm-compressor": _llmcompressor, "ModelOpt": _modelopt, "Quark": _quark}


def _batches(args: argparse.Namespace, samples: list[list[int]]) -> list[torch.Tensor]:
    """Cut the samples into batches, which must need no padding."""
    size = args.batch_size
    return [torch.tensor(samples[start : start + size]) for start in range(0, len(samples), size)]


def _tokens_read(samples: list[list[int]], batch_size: int) -> int:
    # longest first; llm-compressor's collator cuts each batch to the shortest of its rows
    lengths = sorted(map(len, samples), reverse=True)
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return sum(min(batch) * len(batch) for batch in batches)


def _k_scales(directory: Path) -> dict[str, float]:
    """Read the scales of K, attention module -> scale, from what the tool wrote."""
    scales = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if "k_scale" in name or name.endswith(NAMES):
                    attention = name[: name.index("self_attn") + len("self_attn")]
                    scales[attention] = file.get_tensor(name).float().item()
    return scales


if __name__ == "__main__":
    main()
