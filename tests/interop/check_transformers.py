"""Load output directories with transformers: same weights, nothing missing, it generates.

check_transformers.py SOURCE DIR...

The one format that transformers itself acts on is compressed-tensors: it gives each attention
module a `k_scale` and a `v_scale` and rounds K and V by them. All others are listed as unexpected.
"""

import argparse
from pathlib import Path

import torch
from outputs import Output, read_output, report
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PROMPT, ANSWER = "The capital of France is", "Paris"
LOADING_PROBLEMS = ("missing_keys", "mismatched_keys", "error_msgs")


def load_weights(source: Path) -> dict[str, Tensor]:
    """Read every tensor of the source model."""
    weights = {}
    for shard in sorted(source.glob("*.safetensors")):
        weights.update(load_file(shard))
    return weights


def loading_problems(info: dict, output: Output) -> list[str]:
    """Say what transformers missed, and what it found beyond our scales."""
    problems = [f"{key}: {sorted(info[key])}" for key in LOADING_PROBLEMS if info[key]]
    strangers = [key for key in info["unexpected_keys"] if not key.endswith("_scale")]
    if strangers:
        problems.append(f"unexpected: {sorted(strangers)}")
    if output.quantization.get("quant_method") == "compressed-tensors":
        taken = [key for key in info["unexpected_keys"] if not key.endswith(".q_scale")]
        problems += [f"not taken: {sorted(taken)}"] if taken else []
    return problems


def changed_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> list[str]:
    """Name the weights that are not the source's, bit for bit."""
    state = model.state_dict()
    return [
        f"{name} is not the source's"
        for name, weight in weights.items()
        if name not in state or state[name].dtype != weight.dtype or not torch.equal(state[name], weight)
    ]


def held_scales(model: PreTrainedModel) -> dict[tuple[str, str], Tensor]:
    """The scales that compressed-tensors attached, by attention module and q, k, v."""
    return {
        (name.rpartition(".")[0], name.rpartition(".")[2][0]): tensor
        for name, tensor in model.state_dict().items()
        if name.endswith((".q_scale", ".k_scale", ".v_scale"))
    }


def wrong_scales(held: dict[tuple[str, str], Tensor], output: Output) -> list[str]:
    """Name the attached scales that are not the file's, cast to the dtype they are held in."""
    problems = [
        f"{name}: the {which} scale is {scale.tolist()}"
        for (name, which), scale in held.items()
        if not torch.equal(scale, output.scales[name][which].to(scale.dtype))
    ]
    attaches = output.quantization.get("quant_method") == "compressed-tensors"
    wanted = {(name, which) for name in output.scales for which in "kv"} if attaches else set()
    if held.keys() != wanted:
        problems.append(f"scales attached to {len(held)} of {len(wanted)} places")
    return problems


def generate(model: PreTrainedModel, directory: Path) -> str:
    """Continue the prompt greedily."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    return tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])


def check(directory: Path, weights: dict[str, Tensor]) -> None:
    """Check one output directory."""
    output = read_output(directory)
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    held = held_scales(model)
    text = generate(model, directory)
    problems = [
        *loading_problems(info, output),
        *changed_weights(model, weights),
        *wrong_scales(held, output),
        *([] if ANSWER in text else [f"generated {text!r}"]),
    ]
    dtypes = {str(scale.dtype).removeprefix("torch.") for scale in held.values()}
    used = f"{len(held)} scales in use as {', '.join(dtypes)}" if held else "no scales in use"
    unused = len(info["unexpected_keys"])
    success = f"{len(weights)} weights as in the source; {used}, {unused} left out; {text!r}"
    report(directory, problems, success)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("directories", type=Path, nargs="+")
    arguments = parser.parse_args()
    weights = load_weights(arguments.source)
    for directory in arguments.directories:
        check(directory, weights)


if __name__ == "__main__":
    main()
