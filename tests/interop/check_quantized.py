"""Our scales beside quantised weights in vLLM: served, or loaded alone where a CPU has no kernel.

check_quantized.py OUT   as write_quantized.py leaves it. OUT/served are served with an FP8 cache
                         and exactly their own scales, and say what they say with a 16-bit cache;
                         of OUT/tools vLLM's classes hold what `fp8kv verify` predicts, and for
                         weights that `fp8kv calibrate` refuses they make no parameters
"""

import sys
from pathlib import Path

import torch
import without_kernels
from check_verify import difference, held_by_vllm
from check_vllm import look, other_problems, text_of, wrong_scales
from engine import ONE_GPU, installed_engine, load, start
from outputs import read_output, report

from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory

TEXT = """The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It
is named after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 to
1889. It was first criticised by some of the leading artists of the country for its design, but it
has become a global icon of France and one of the most recognisable structures in the world."""
# of the likeliest next tokens; where activations are FP8 too, a small change makes others
LEAST_SAME = 0.8
# what vLLM 0.32 does not start with, scales or not
NOT_SERVED = {
    "amd-quark-0.13, fp8-channel": "No quark compatible scheme",
    "amd-quark-0.13, int8": "No quark compatible scheme",
    "llmcompressor-0.12.0, w4a16-gptq-group": "activation ordering (actorder='group')",
    "nvidia-modelopt-0.47.0, mxfp4": "ModelOpt currently only supports",
    "nvidia-modelopt-0.47.0, nvfp4-fp8": "ModelOpt currently only supports",
}


def next_tokens(llm) -> list[int]:
    """The likeliest token after each of the text."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, prompt_logprobs=1)
    found = llm.generate([TEXT], asked, use_tqdm=False)[0].prompt_logprobs[1:]
    return [min(each, key=lambda token: each[token].rank) for each in found]


def check_served(directory: Path) -> None:
    """Serve `directory` with both caches."""
    output = read_output(directory)
    llm = start(directory, kv_cache_dtype="fp8")
    text, tokens = text_of(llm), next_tokens(llm)
    layers = llm.apply_model(look)[0]
    wide = next_tokens(start(directory, kv_cache_dtype="bfloat16"))
    same = sum(a == b for a, b in zip(tokens, wide, strict=True))
    agreed = f"{same} of {len(wide)} next tokens are those with a 16-bit cache"
    problems = [*wrong_scales(layers, output), *other_problems(layers, output, text)]
    if not LEAST_SAME * len(wide) <= same < len(wide):
        problems.append(agreed)
    method = output.quantization["quant_method"]
    success = f"vLLM holds its scales beside {method} weights in {len(layers)} layers; {agreed}"
    report(directory, problems, f"{success}; {text!r}")


def problem(directory: Path) -> str | None:
    """Where vLLM's classes hold other scales than `verify` predicts; None if nowhere."""
    held = held_by_vllm(directory, ONE_GPU, 0)
    if reason := NOT_SERVED.get(directory.name):
        return None if reason in held else f"vLLM starts: {held}"
    predicted = simulate(open_model_directory(directory, weights=False), installed_engine())
    return difference(predicted, held) or (None if predicted.is_good else "not all are loaded")


def has_a_place(directory: Path) -> bool:
    """Whether attention has parameters for scales beside these weights."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    modules = load(directory, kv_cache_dtype="fp8").modules()
    return any(isinstance(getattr(m, "quant_method", None), BaseKVCacheMethod) for m in modules)


def main() -> None:
    """Check what was written."""
    out = Path(sys.argv[1])
    for directory in sorted((out / "served").iterdir()):
        check_served(directory)
    without_kernels.install()
    found = {directory.name: problem(directory) for directory in sorted((out / "tools").iterdir())}
    for directory in (out / "sources").glob("auto-round-*/*-w4"):
        found[directory.name] = "there is a place for scales" if has_a_place(directory) else None
    for name, wrong in found.items():
        print(f"{'WRONG' if wrong else 'OK'} {name}: {wrong or NOT_SERVED.get(name, 'loaded')}")
    sys.exit("FAILED" if any(found.values()) else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
