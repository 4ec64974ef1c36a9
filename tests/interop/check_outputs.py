"""Load output directories with an engine; compare the scales it holds with those in the file.

check_outputs.py vllm DIR       exit 0 if every attention layer holds exactly the file's scales
check_outputs.py doubled DIR    the same with one scale doubled in a copy: exit 0 if that is found
check_outputs.py reloaded DIR   gives the engine that serves DIR all scales doubled, the ways that a
                                training loop could: exit 0 if `reload_weights` takes them with the
                                weights and, as our pages say, `load_weights` drops them alone
check_outputs.py transformers SOURCE DIR...
                                the same weights as SOURCE's, and nothing missing. The one format
                                that transformers itself acts on is compressed-tensors: it gives
                                each attention module a `k_scale` and a `v_scale` and rounds K and V
                                by them. All others are listed as unexpected

The text that they generate and the bytes in vLLM's caches are looked at too.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from engine import kernels, start
from outputs import SCALES_FILE, STATS_FILE, Output, read_output, report
from safetensors.torch import load_file, save_file
from torch import Tensor

PROMPT, ANSWER = "The capital of France is", "Paris"
DOUBLED = "model.layers.7.self_attn"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# calibration saw more text than the prompt has, but no layer's cache should come out mostly empty
LEAST_USED = FP8_MAX / 16


@dataclass(frozen=True)
class Layer:
    """What one attention layer of vLLM holds after generating."""

    scales: dict[str, Tensor]  # q, k, v -> float32
    kernel_scales: dict[str, float]  # k, v -> what kernels take that know one scale per layer
    cache_dtype: str
    cache_bytes: int  # per value
    largest: float  # FP8 value of K and V in the cache


def look(model: torch.nn.Module) -> dict[str, Layer]:
    """Collect every attention layer, by the name of the module around it."""
    from vllm.model_executor.layers.attention import Attention

    return {
        layer.layer_name.removesuffix(".attn"): Layer(
            {which: getattr(layer, f"_{which}_scale").detach().clone() for which in "qkv"},
            {which: getattr(layer, f"_{which}_scale_float") for which in "kv"},
            layer.kv_cache_dtype,
            layer.kv_cache.element_size(),
            layer.kv_cache.view(torch.float8_e4m3fn).float().abs().max().item(),
        )
        for layer in model.modules()
        if isinstance(layer, Attention)
    }


def text_of(llm) -> str:
    """How vLLM continues the prompt, greedily."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=20)
    return llm.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].text


def run_vllm(directory: Path) -> tuple[dict[str, Layer], str]:
    """Load `directory`, generate, and return the layers and the text."""
    llm = start(directory)
    text = text_of(llm)
    return llm.apply_model(look)[0], text


def wrong_scales(layers: dict[str, Layer], output: Output) -> list[str]:
    """Name the attention modules whose scales are not exactly those of `output`."""
    return [
        f"{name}: vLLM's {which} scale is {held.tolist()}, the file says {wanted.tolist()}"
        for name, layer in layers.items()
        for which, held in layer.scales.items()
        if not torch.equal(held.flatten(), wanted := as_held(output, name, which))
    ]


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


def other_problems(layers: dict[str, Layer], output: Output, text: str) -> list[str]:
    """Say what else is not as it should be."""
    wanted = output.config["num_hidden_layers"]
    problems = [] if len(layers) == wanted else [f"{len(layers)} attention layers, not {wanted}"]
    for name, layer in layers.items():
        if not layer.cache_dtype.startswith("fp8") or layer.cache_bytes != 1:
            problems.append(f"{name}: the cache is {layer.cache_dtype}, not FP8")
        if not LEAST_USED <= layer.largest <= FP8_MAX:
            problems.append(f"{name}: the largest FP8 value cached is {layer.largest}")
        for which, scale in layer.kernel_scales.items():
            if scale != layer.scales[which].max().item():
                problems.append(f"{name}: the kernel takes {scale} for {which}")
    if ANSWER not in text:
        problems.append(f"generated {text!r}")
    return problems


def check_vllm(directory: Path) -> None:
    """Check `directory` against its own file."""
    output = read_output(directory)
    layers, text = run_vllm(directory)
    if layers.keys() != output.scales.keys():
        report(directory, [f"layers {sorted(layers.keys() ^ output.scales.keys())} differ"], "")
    problems = [*wrong_scales(layers, output), *other_problems(layers, output, text)]
    with_q = "q, k, v" if any("q" in scales for scales in output.scales.values()) else "k, v"
    cache = ", ".join(sorted({layer.cache_dtype for layer in layers.values()}))
    success = (
        f"vLLM holds the file's {with_q} scales in {len(layers)} layers, "
        f"{output.scales_per_layer} each; cache {cache}, kernels {kernels()}; {text!r}"
    )
    report(directory, problems, success)


def check_doubled(directory: Path) -> None:
    """Show that the comparison can fail: load a copy in which one scale is doubled."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "model")
        copy.mkdir()
        for file in directory.resolve().iterdir():
            (copy / file.name).symlink_to(file)
        tensors = load_file(directory / SCALES_FILE)
        tensors[f"{DOUBLED}.v_scale"] *= 2
        (copy / SCALES_FILE).unlink()
        save_file(tensors, copy / SCALES_FILE, metadata={"format": "pt"})
        layers, _ = run_vllm(copy)
    wrong = wrong_scales(layers, read_output(directory))
    caught = len(wrong) == 1 and wrong[0].startswith(f"{DOUBLED}: vLLM's v scale")
    problems = [] if caught else [f"a doubled v scale of {DOUBLED} gave {wrong}"]
    report(directory, problems, f"a doubled scale is found: {' '.join(wrong)}")


def check_reloaded(directory: Path) -> None:
    """Give a running engine weights with other scales."""
    first = read_output(directory)
    doubled = replace(first, scales=times(first, 2))
    llm = start(directory)
    before = text_of(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs(directory, factor=2)})
    reloaded, text = llm.apply_model(look)[0], text_of(llm)
    held = llm.apply_model(look)[0]
    problems = [*wrong_scales(reloaded, doubled), *other_problems(held, doubled, text)]
    again = [(name, scale * 4) for name, scale in load_file(directory / SCALES_FILE).items()]
    llm.apply_model(lambda model: len(model.load_weights(iter(again))))
    problems += [f"load_weights: {x}" for x in wrong_scales(llm.apply_model(look)[0], doubled)]
    success = "scales twice as large are taken by reload_weights, and dropped by load_weights"
    report(directory, problems, f"{success}; {before!r}, {text!r}")


def times(output: Output, factor: float) -> dict[str, dict[str, Tensor]]:
    """Its scales, each `factor` times as large."""
    return {
        name: {which: scale * factor for which, scale in layer.items()}
        for name, layer in output.scales.items()
    }


def pairs(directory: Path, *, factor: float) -> Iterator[tuple[str, Tensor]]:
    """All tensors of `directory`, its scales `factor` times as large."""
    for file in sorted(directory.glob("*.safetensors")):
        if file.name != STATS_FILE:
            for name, tensor in load_file(file).items():
                yield name, tensor * factor if file.name == SCALES_FILE else tensor


# ---- transformers ----


def check_transformers(source: Path, *directories: Path) -> None:
    """Load each, compare and generate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {name: x for file in source.glob("*.safetensors") for name, x in load_file(file).items()}
    for directory in directories:
        output, tokenizer = read_output(directory), AutoTokenizer.from_pretrained(directory)
        model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
        text = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])
        state = model.state_dict()
        attached = {
            (name.rpartition(".")[0], name.rpartition(".")[2][0]): tensor
            for name, tensor in state.items()
            if name.endswith((".q_scale", ".k_scale", ".v_scale"))
        }
        problems = [
            *loading_problems(info, output),
            *changed_weights(state, weights),
            *wrongly_attached(attached, output),
            *([] if ANSWER in text else [f"generated {text!r}"]),
        ]
        dtypes = ", ".join({str(scale.dtype).removeprefix("torch.") for scale in attached.values()})
        used = f"{len(attached)} scales in use as {dtypes}" if attached else "no scales in use"
        unused = len(info["unexpected_keys"])
        success = f"{len(weights)} weights as in the source; {used}, {unused} left out; {text!r}"
        report(directory, problems, success)


def loading_problems(info: dict, output: Output) -> list[str]:
    """Say what transformers missed, and what it found beyond our scales."""
    bad = ("missing_keys", "mismatched_keys", "error_msgs")
    problems = [f"{key}: {sorted(info[key])}" for key in bad if info[key]]
    strangers = [key for key in info["unexpected_keys"] if not key.endswith("_scale")]
    if strangers:
        problems.append(f"unexpected: {sorted(strangers)}")
    if output.quantization.get("quant_method") == "compressed-tensors":
        taken = [key for key in info["unexpected_keys"] if not key.endswith(".q_scale")]
        problems += [f"not taken: {sorted(taken)}"] if taken else []
    return problems


def changed_weights(state: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
    """Name the weights that are not the source's, bit for bit."""
    return [
        f"{name} is not the source's"
        for name, weight in weights.items()
        if name not in state or state[name].dtype != weight.dtype or not torch.equal(state[name], weight)
    ]


def wrongly_attached(attached: dict[tuple[str, str], Tensor], output: Output) -> list[str]:
    """Name the scales, by module and letter, that are not the file's, cast to the dtype they have."""
    problems = [
        f"{name}: the {which} scale is {scale.tolist()}"
        for (name, which), scale in attached.items()
        if not torch.equal(scale, output.scales[name][which].to(scale.dtype))
    ]
    attaches = output.quantization.get("quant_method") == "compressed-tensors"
    wanted = {(name, which) for name in output.scales for which in "kv"} if attaches else set()
    if attached.keys() != wanted:
        problems.append(f"scales attached to {len(attached)} of {len(wanted)} places")
    return problems


CHECKS = {
    "vllm": check_vllm,
    "doubled": check_doubled,
    "reloaded": check_reloaded,
    "transformers": check_transformers,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*map(Path, sys.argv[2:]))
