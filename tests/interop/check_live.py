"""Is it right while it runs? The plugin in a real vLLM, whose scales change, and which hands blocks on.

check_live.py updates TWIN    of a model that needs its scales what is spoiled is named and repaired; after
                              reload_weights, push_scales and 20 updates of k_proj the engine computes with
                              the scales of that moment
check_live.py example MODEL   examples/training_loop.py: its engine has the weights and scales of each update
check_live.py blocks DIR      engines on one store of blocks: with other scales a miss, with equal ones hits,
                              and always the right text

TWIN and DIR have one scale per layer; other scales are 8 times as large. Texts are the same where an
engine does the same again; else what it finds likely is compared, as processors round in different places.
"""

import io
import json
import logging
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from check_outputs import layers_of
from engine import SCALES_FILE, generate, prepare, read_output, start, tell
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import calib
from calib.engines.loaded_scales import ScalesInForce
from calib.serving import plugin
from calib.serving.push import push_scales

PROMPT = (
    "Rome was built on seven hills, and its empire lasted for centuries. Its roads, its laws and its "
    "language spread over three continents. Historians ask why it rose, and why it fell: they name its army, "
    "its grain, its slaves and its gods. "
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "training_loop.py"
UPDATE = re.compile(r"update \d: loss (.+), scales ([0-9a-f]{32}): .+")
TOKENS = 250  # the connector looks up what it stored only where its two ways of rounding agree
Check = tuple[str, bool, object]  # what, whether it is right, what was seen
NEAR, FAR = 0.05, 0.5  # nats: of the same numbers in another order; of scales that are wrong


class Answer(NamedTuple):
    text: str
    likely: dict[str, float]  # logprobs of the 20 likeliest first tokens


class Run(NamedTuple):
    answer: Answer
    hits: int  # how often it took blocks from the store


def answer_of(llm: object, prompt: object = PROMPT) -> Answer:
    """What the engine writes, greedily, without what it remembers of earlier prompts."""
    llm.reset_prefix_cache()
    written = generate(llm, prompt, temperature=0, max_tokens=24, logprobs=20).outputs[0]
    return Answer(written.text, {str(token): x.logprob for token, x in written.logprobs[0].items()})


def nats(one: Answer, other: Answer) -> float:
    """How far the other's first token is from the one's: over its 20 likeliest, by how likely each is."""
    least = min(other.likely.values())
    return sum(math.exp(x) * abs(x - other.likely.get(token, least)) for token, x in one.likely.items())


def state_of(llm: object) -> object:
    """What all ranks compute with."""
    (state,) = llm.collective_rpc("fp8kv_state")
    return ScalesInForce(**state)


def floats_at_1(llm: object) -> None:
    """As vLLM left them up to 0.19 (#34863): the tensors right, the numbers on the host 1.0."""
    for module in layers_of(llm).values():
        module._k_scale_float = module._v_scale_float = 1.0


def check_updates(scaled: Path) -> Iterator[Check]:
    """One engine, whose scales are spoiled, repaired, reloaded and pushed."""
    other, log = times_8(scaled), []
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    logging.getLogger("vllm.fp8kv").addFilter(lambda record: log.append(record.getMessage()) or True)
    plugin.register_vllm()
    llm = start(scaled, max_model_len=512, num_gpu_blocks_override=64)
    layers = len(layers_of(llm))
    good = f"fp8kv: {2 * layers} of {2 * layers} KV scales in use, FP8 cache, fingerprint "
    first, reference = state_of(llm), answer_of(llm)
    yield "loaded", str(first).startswith(good) and bool(first.fingerprint), log[-1]

    floats_at_1(llm)
    wrong = answer_of(llm)
    far = nats(reference, wrong)
    yield "floats at 1.0 write garbage", far > FAR, (far, reference.text, wrong.text)
    named = "rank 0: K's copy _k_scale_float, which CPU_ATTN reads, is at 1.0"
    any_call(llm)
    yield "the next call of any kind names them", named in log[-1], log[-1][:300]
    os.environ["FP8KV_REPAIR_SCALES"] = "1"
    any_call(llm)
    del os.environ["FP8KV_REPAIR_SCALES"]
    repaired = log[-1].startswith(good) and "; rank 0: repaired: K's copy _k_scale_float" in log[-1]
    yield "repaired", repaired and "K is" not in log[-1], log[-1][:300]
    yield "and the reference's text again", answer_of(llm) == reference, reference.text

    # new files, by the engine's own reload
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    second = state_of(llm)
    is_new = second.fingerprint not in (first.fingerprint, "") and str(second).startswith(good)
    yield "reload_weights: right by the new files", is_new and holds(llm, scales_of(other)), log[-1]
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(scaled)})
    yield "and back", state_of(llm) == first and answer_of(llm) == reference, log[-1]

    pushed = push_scales(llm, scales_of(other))  # scales without weights
    is_new = pushed == second.fingerprint and holds(llm, scales_of(other))
    yield "push_scales: the other's fingerprint", is_new, pushed
    again = push_scales(llm, scales_of(scaled))
    yield "and back", again == first.fingerprint and answer_of(llm) == reference, again
    broken = {name: x for name, x in scales_of(other).items() if ".7." not in name}
    ended = error_of(lambda: push_scales(llm, broken))
    names_it = ended.startswith("ScalesNotDeliveredError: ") and "rank 0: " in ended and "in layer 7" in ended
    yield "a layer left out is named", names_it, ended

    os.environ["FP8KV_REQUIRE_SCALES"] = "1"
    right = [*train(llm, scaled)]
    yield "required: 20 updates of k_proj, each with its scales", len(right) == 20 and all(right), right
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(scaled)})
    yield "and back to the files", state_of(llm) == first and answer_of(llm) == reference, reference.text

    floats_at_1(llm)
    for name, call in (("a call that finds them wrong raises", any_call), ("no text is written", answer_of)):
        yield f"required: {name}", named in (ended := error_of(partial(call, llm))), ended


def check_example(model: Path) -> Iterator[Check]:
    """The training loop that people copy."""
    prepare()
    plugin.register_vllm()
    sys.argv = [str(EXAMPLE), str(model)]
    with redirect_stdout(io.StringIO()) as printed:
        after = runpy.run_path(str(EXAMPLE), run_name="__main__")
    text, llm, trained = printed.getvalue(), after["llm"], after["model"]
    losses, fingerprints = zip(*UPDATE.findall(text), strict=True)
    falls = [*losses] == sorted(losses, key=float, reverse=True)
    yield "three updates: the loss falls", falls and len(losses) == 3, text
    scales = calib.scales_for(trained, [after["batch"]], strategy="tensor")
    yield "other scales each time, in the end the last", len({*fingerprints}) == 3 and holds(llm, scales), ""
    (theirs,) = llm.apply_model(lambda model: model.model.embed_tokens.weight)
    ours = trained.get_input_embeddings().weight.bfloat16()
    first = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.bfloat16()
    yield "and the last weights", torch.equal(theirs, ours) and not torch.equal(theirs, first), ""


def check_blocks(scaled: Path) -> Iterator[Check]:
    """Engines that share a folder of blocks: one writes it, others with the same prompt look there first."""
    other = times_8(scaled)
    alone = run_engine(other)
    for with_plugin in (False, True):
        store = Path(tempfile.mkdtemp())
        first = run_engine(scaled, store, with_plugin)
        same = run_engine(scaled, store, with_plugin)
        far = nats(first.answer, same.answer)
        is_right = same.hits == 1 and far < NEAR
        yield f"equal scales, plugin {with_plugin}: hits", is_right, (far, same.answer.text)
        after = run_engine(other, store, with_plugin)
        far, texts = nats(alone.answer, after.answer), (after.answer.text, alone.answer.text)
        words = "a miss, and right" if with_plugin else "its blocks, and garbage"
        wanted = (0, True, False) if with_plugin else (1, False, True)
        is_right = (after.hits, far < NEAR, far > FAR) == wanted
        yield f"other scales, plugin {with_plugin}: {words}", is_right, (after.hits, far, texts)


def run_engine(directory: Path, store: Path | None = None, with_plugin: bool = True) -> Run:
    """In a process of its own."""
    command = [sys.executable, __file__, "engine", str(directory), str(store or ""), str(with_plugin)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    answer, hits = json.loads(lines[-1])
    return Run(Answer(*answer), hits)


def engine(directory: str, store: str, with_plugin: str) -> None:
    """What such a process does."""
    if with_plugin == "True":
        plugin.register_vllm()
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    hits, look = [], ExampleConnector.get_num_new_matched_tokens
    ExampleConnector.get_num_new_matched_tokens = lambda *a: hits.append(look(*a)) or hits[-1]
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": store}
    options = {"kv_transfer_config": KVTransferConfig(**transfer)} if store else {}
    llm = start(Path(directory), max_model_len=512, num_gpu_blocks_override=64, **options)
    tokens = llm.get_tokenizer().encode(PROMPT * 6)[:TOKENS]
    answer = answer_of(llm, {"prompt_token_ids": tokens})
    print(json.dumps((answer, sum(bool(tokens) for tokens, _ in hits))))


def any_call(llm: object) -> None:
    """A call of all workers that the plugin does not know."""
    llm.collective_rpc(lambda worker: None)


def error_of(function: Callable[[], object]) -> str:
    """What `function` ends with."""
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "goes on"


def scales_of(directory: Path) -> dict[str, torch.Tensor]:
    """The scales of an output, by the names in its file."""
    scales = read_output(directory).scales
    return {f"{name}.{x}_scale": scale for name, each in scales.items() for x, scale in each.items()}


def times_8(directory: Path) -> Path:
    """The same model with scales 8 times as large."""
    other = Path(shutil.copytree(directory, Path(tempfile.mkdtemp(), "other")))
    scales = {name: 8 * x for name, x in load_file(other / SCALES_FILE).items()}
    (other / SCALES_FILE).unlink()  # which may be a link
    save_file(scales, other / SCALES_FILE, {"format": "pt"})
    return other


def holds(llm: object, scales: dict[str, torch.Tensor]) -> bool:
    """Whether every copy of K's and V's scales is one of these."""
    return all(
        torch.allclose(torch.as_tensor(getattr(module, f"_{x}_scale{copy}")), scale.max(), rtol=1e-6)
        for (name, module), x, copy in product(layers_of(llm).items(), "kv", ("", "_float", "_cpu"))
        for scale in [scales[f"{name}.{x}_scale"]]
    )


def train(llm: object, directory: Path) -> Iterator[bool]:
    """Give the engine a larger K, again and again, with its scales; whether it held them each time."""
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    batch = torch.arange(128)[None] * 31 % config.vocab_size
    for _ in range(20):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.mul_(2**0.25)
        weights = ((name, weight.detach().bfloat16()) for name, weight in model.named_parameters())
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        push_scales(llm, scales := calib.scales_for(model, [batch], strategy="tensor"))
        yield holds(llm, scales) and not state_of(llm).problems


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "engine":
        engine(*arguments)
    else:
        check = {"updates": check_updates, "example": check_example, "blocks": check_blocks}[what]
        checks = check(*map(Path, arguments))
        tell((f"{name}: {str(seen)[:300]}", right) for name, right, seen in checks)
