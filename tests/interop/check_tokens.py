"""Which tokens vLLM finds next, with our scales, with a model baked, and beside quantised weights.

check_tokens.py stress SOURCE TWIN CALIBRATED [PROMPT]
    With an FP8 cache TWIN, the `fp8kv stress` of SOURCE, must not say what SOURCE says in 16 bits;
    CALIBRATED, the twin's `fp8kv calibrate`, must, and so its `fp8kv bake`, without scales
check_tokens.py baked SOURCE BAKED [SOURCE BAKED ...]
    With a 16-bit cache BAKED must find every token likeliest that SOURCE does: powers of two do not
    round. With an FP8 cache and no scales in its files it must agree as FP8 caches do
check_tokens.py quantized OUT
    Of what write_quantized.py leaves OUT/served hold, with an FP8 cache, exactly their own scales, and
    find the tokens of a 16-bit cache; of OUT/tools vLLM's classes hold what `fp8kv verify` predicts,
    and make no parameters for weights that `fp8kv calibrate` refuses
"""

import re
import sys
from itertools import takewhile
from pathlib import Path
from unittest.mock import MagicMock

import torch
from check_outputs import layers_of, other_problems, text_of, wrong_scales
from check_verify import difference, held_by_vllm
from engine import ONE_GPU, generate, installed_engine, load, read_output, report, start, tell

from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory

PROMPT = "Question: What is the capital of France? Answer: The capital of France is"
# FP8 rounds K and V, so texts part sooner or later; on this prompt not within these
NEW_TOKENS = 16
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


def continued(directory: Path, cache: str, prompt: str) -> tuple[list[int], str]:
    llm = start(directory, kv_cache_dtype=cache)
    made = generate(llm, prompt, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True).outputs[0]
    return [*made.token_ids], made.text


def next_tokens(llm) -> list[int]:
    likeliest = generate(llm, TEXT, max_tokens=1, prompt_logprobs=1).prompt_logprobs[1:]
    return [min(two, key=lambda token: two[token].rank) for two in likeliest]


def count_same(first: list[int], second: list[int]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))


def check_stress(source: Path, twin: Path, calibrated: Path, prompt: str) -> None:
    wanted, text = continued(source, "auto", prompt)
    found = [continued(directory, "fp8", prompt) for directory in (twin, calibrated)]
    pairs = [zip(wanted, tokens, strict=True) for tokens, _ in found]
    without, with_scales = (len([*takewhile(lambda pair: pair[0] == pair[1], each)]) for each in pairs)
    problems = []
    if without > NEW_TOKENS // 4:
        problems.append(f"without scales {without} of {NEW_TOKENS} tokens are the source's")
    if with_scales < NEW_TOKENS:
        problems.append(f"with scales only {with_scales} of {NEW_TOKENS} tokens: {found[1]} for {text!r}")
    report(calibrated, problems, f"with scales the source's {text!r}, without {found[0][1]!r}")


def check_baked(source: Path, baked: Path) -> None:
    wanted = next_tokens(start(source, kv_cache_dtype="bfloat16"))
    count = len(wanted)
    caches = (start(baked, kv_cache_dtype=cache) for cache in ("bfloat16", "fp8"))
    wide, narrow = (count_same(wanted, next_tokens(llm)) for llm in caches)
    problems = [f"with a 16-bit cache {wide} of {count} next tokens"] if wide < count else []
    if not LEAST_SAME * count <= narrow:
        problems.append(f"with an FP8 cache {narrow} of {count} next tokens")
    report(baked, problems, f"all of {count} next tokens with a 16-bit cache, {narrow} with FP8 at 1.0")


def check_served(directory: Path) -> None:
    output, llm = read_output(directory), start(directory, kv_cache_dtype="fp8")
    text, tokens = text_of(llm), next_tokens(llm)
    same = count_same(tokens, next_tokens(start(directory, kv_cache_dtype="bfloat16")))
    agreed = f"{same} of {len(tokens)} next tokens are those with a 16-bit cache"
    problems = [*wrong_scales(layers_of(llm), output), *other_problems(layers_of(llm), output, text)]
    problems += [] if LEAST_SAME * len(tokens) <= same < len(tokens) else [agreed]
    method = output.quantization["quant_method"]
    report(directory, problems, f"vLLM holds its scales beside {method} weights; {agreed}; {text!r}")


def check_quantized(out: Path) -> None:
    for directory in sorted((out / "served").iterdir()):
        check_served(directory)
    leave_out_kernels()
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    tools = {directory: problem(directory) for directory in sorted((out / "tools").iterdir())}
    for directory in (out / "sources").glob("auto-round-*/*-w4"):
        methods = (getattr(x, "quant_method", 0) for x in load(directory, kv_cache_dtype="fp8").modules())
        has_a_place = any(isinstance(method, BaseKVCacheMethod) for method in methods)
        tools[directory] = "there is a place for scales" if has_a_place else None
    tell((f"{directory.name}: {wrong or 'as predicted'}", not wrong) for directory, wrong in tools.items())


def problem(directory: Path) -> str | None:
    """Where vLLM's classes hold other scales than `verify` predicts; None if nowhere."""
    scales = held_by_vllm(directory, ONE_GPU, 0)
    if reason := NOT_SERVED.get(directory.name):
        return None if reason in scales else f"vLLM starts: {scales}"
    predicted = simulate(open_model_directory(directory, weights=False), installed_engine())
    return difference(predicted, scales) or (None if predicted.is_good else "not all are loaded")


def leave_out_kernels() -> None:
    """Replace what chooses vLLM's kernels for weights, and makes weights ready: here are none for some.

    Layers still make their parameters, load them, and make attention ready to serve.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader import base_loader

    get_quantization_config("fp8")  # which imports them all
    kernel = MagicMock(__name__="none")
    layers = "vllm.model_executor.layers.quantization"
    for module in [module for name, module in sys.modules.items() if name.startswith(layers)]:
        for name in filter(re.compile(r"(?:init|choose)_\w+_linear_kernel").fullmatch, dir(module)):
            setattr(module, name, lambda *_, **__: kernel)
    base_loader.process_weights_after_loading = _make_attention_ready


def _make_attention_ready(model: torch.nn.Module, *_) -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for layer in model.modules():
        if isinstance(layer, Attention):
            if isinstance(method := getattr(layer, "quant_method", None), BaseKVCacheMethod):
                method.process_weights_after_loading(layer)
            layer.process_weights_after_loading(torch.bfloat16)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    paths = [*map(Path, arguments)]
    with torch.no_grad():
        if what == "stress":
            check_stress(*paths[:3], "".join(arguments[3:]) or PROMPT)
        elif what == "baked":
            for source, baked in zip(paths[::2], paths[1::2], strict=True):
                check_baked(source, baked)
        else:
            check_quantized(*paths)
