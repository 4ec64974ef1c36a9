"""Load output directories with an engine; compare the scales it holds with those in the file.

check_outputs.py vllm DIR       exit 0 if every attention layer holds exactly the file's scales
check_outputs.py reloaded DIR   all scales doubled, as a training loop could: `reload_weights` takes
                                them with the weights and, as our pages say, `load_weights` drops them
check_outputs.py transformers SOURCE DIR...
    the same weights as SOURCE's, and nothing missing. It acts on compressed-tensors alone: it gives each
    attention module a `k_scale` and a `v_scale` and rounds by them. All others are listed as unexpected

The text that they generate and the bytes in vLLM's caches are looked at too.
"""

import sys
from itertools import product
from pathlib import Path

import torch
from engine import SCALES_FILE, STATS_FILE, Output, generate, read_output, report, start
from safetensors.torch import load_file
from torch import Tensor

PROMPT, ANSWER = "The capital of France is", "Paris"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# calibration saw more text than the prompt has, but no layer's cache should come out mostly empty
LEAST_USED = FP8_MAX / 16


def layers_of(llm) -> dict[str, torch.nn.Module]:
    """Every attention layer, by the name of the module around it."""
    from vllm.model_executor.layers.attention import Attention

    (layers,) = llm.apply_model(lambda model: [m for m in model.modules() if isinstance(m, Attention)])
    return {layer.layer_name.removesuffix(".attn"): layer for layer in layers}


def text_of(llm) -> str:
    return generate(llm, PROMPT, temperature=0, max_tokens=20).outputs[0].text


def wrong_scales(layers: dict[str, torch.nn.Module], output: Output) -> list[str]:
    """Name the attention modules whose scales are not exactly those of `output`."""
    problems = []
    for (name, layer), x in product(layers.items(), "qkv"):
        held, wanted = getattr(layer, f"_{x}_scale").flatten(), as_held(output, name, x)
        if not torch.equal(held, wanted):
            problems.append(f"{name}: vLLM's {x} scale is {held.tolist()}, the file says {wanted.tolist()}")
    return problems


def as_held(output: Output, name: str, which: str) -> Tensor:
    """The scales that vLLM should hold: one, or one per KV head."""
    filed = output.scales[name].get(which)
    if filed is None:
        # q is optional, k and v are not
        return torch.ones(output.scales_per_layer) if which == "q" else torch.empty(0)
    if output.quantization["quant_method"] != "compressed-tensors":
        filed = filed.to(torch.bfloat16).float()
    # query heads share the scale of their KV head
    return filed.view(output.scales_per_layer, -1).amax(dim=1) if which == "q" else filed.flatten()


def other_problems(layers: dict[str, torch.nn.Module], output: Output, text: str) -> list[str]:
    wanted = output.config["num_hidden_layers"]
    problems = [] if len(layers) == wanted else [f"{len(layers)} attention layers, not {wanted}"]
    for name, layer in layers.items():
        cache = layer.kv_cache
        if not layer.kv_cache_dtype.startswith("fp8") or cache.element_size() != 1:
            problems.append(f"{name}: the cache is {layer.kv_cache_dtype}, not FP8")
        if not LEAST_USED <= (largest := cache.view(torch.float8_e4m3fn).float().abs().max()) <= FP8_MAX:
            problems.append(f"{name}: the largest FP8 value cached is {largest}")
        for x in "kv":
            # what kernels take that know one scale per layer
            if (taken := getattr(layer, f"_{x}_scale_float")) != getattr(layer, f"_{x}_scale").max().item():
                problems.append(f"{name}: the kernel takes {taken} for {x}")
    return problems if ANSWER in text else [*problems, f"generated {text!r}"]


def check_vllm(directory: Path) -> None:
    output, llm = read_output(directory), start(directory)
    text, layers = text_of(llm), layers_of(llm)
    if layers.keys() != output.scales.keys():
        report(directory, [f"layers {sorted(layers.keys() ^ output.scales.keys())} differ"], "")
    problems = [*wrong_scales(layers, output), *other_problems(layers, output, text)]
    letters = {which for scales in output.scales.values() for which in scales}
    success = f"vLLM holds the file's {sorted(letters)} scales in {len(layers)} layers"
    report(directory, problems, f"{success}, {output.scales_per_layer} each; {text!r}")


def check_reloaded(directory: Path) -> None:
    first, llm = read_output(directory), start(directory)
    twice = {name: {x: 2 * scale for x, scale in layer.items()} for name, layer in first.scales.items()}
    doubled, before = first._replace(scales=twice), text_of(llm)
    wrong = wrong_scales(layers_of(llm), doubled)  # the comparison can fail
    problems = [] if len(wrong) == 2 * len(twice) else [f"scales half as large are named {len(wrong)} times"]
    files = [file for file in sorted(directory.glob("*.safetensors")) if file.name != STATS_FILE]
    weights = ((file.name, *pair) for file in files for pair in load_file(file).items())
    others = ((name, x * 2 if file == SCALES_FILE else x) for file, name, x in weights)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": others})
    problems += wrong_scales(layers_of(llm), doubled)
    problems += other_problems(layers_of(llm), doubled, text := text_of(llm))
    again = [(name, scale * 4) for name, scale in load_file(directory / SCALES_FILE).items()]
    llm.apply_model(lambda model: len(model.load_weights(iter(again))))
    problems += [f"load_weights: {x}" for x in wrong_scales(layers_of(llm), doubled)]
    success = "scales twice as large are taken by reload_weights, and dropped by load_weights"
    report(directory, problems, f"{success}; {before!r}, {text!r}")


def check_transformers(source: Path, *directories: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {name: x for file in source.glob("*.safetensors") for name, x in load_file(file).items()}
    for directory in directories:
        output, tokenizer = read_output(directory), AutoTokenizer.from_pretrained(directory)
        model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
        text = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])
        state = model.state_dict()
        changed = [name for name, x in weights.items() if name not in state or not same(state[name], x)]
        problems = [f"{name} is not the source's" for name in changed]
        problems += transformers_problems(info, state, output)
        problems += [] if ANSWER in text else [f"generated {text!r}"]
        unused = len(info["unexpected_keys"])
        report(directory, problems, f"{len(weights)} weights as in the source; {unused} left out; {text!r}")


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def transformers_problems(info: dict, state: dict[str, Tensor], output: Output) -> list[str]:
    """What it missed or found beyond our scales, and scales that are not the file's, cast to their dtype."""
    bad = ("missing_keys", "mismatched_keys", "error_msgs")
    problems = [f"{key}: {sorted(info[key])}" for key in bad if info[key]]
    is_taken = output.quantization.get("quant_method") == "compressed-tensors"
    unused = ".q_scale" if is_taken else "_scale"
    if strangers := [key for key in info["unexpected_keys"] if not key.endswith(unused)]:
        problems.append(f"unexpected: {sorted(strangers)}")
    wanted = {f"{name}.{x}_scale": output.scales[name][x] for name in output.scales for x in "kv"}
    held = {key: x for key, x in state.items() if key.endswith((".q_scale", ".k_scale", ".v_scale"))}
    if held.keys() != (wanted.keys() if is_taken else set()):
        return [*problems, f"scales attached to {len(held)} places"]
    return problems + [f"{key} is {x.tolist()}" for key, x in held.items() if not same(x, wanted[key].to(x))]


if __name__ == "__main__":
    checks = {"vllm": check_vllm, "reloaded": check_reloaded, "transformers": check_transformers}
    checks[sys.argv[1]](*map(Path, sys.argv[2:]))
