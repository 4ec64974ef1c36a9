"""Is a running server nearer to our runtime with these scales, or with scales of 1.0?"""

from dataclasses import asdict, dataclass
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.any_scales import open_any_scales
from calib.data.loading import open_source
from calib.data.tokens import tokenize_rows
from calib.errors import InputError
from calib.generate import unit_scales
from calib.model.devices import check_token_ids, input_device
from calib.model.find import find_checkpoint
from calib.model.load import load_config, load_model, load_tokenizer, model_positions
from calib.recipe import DataRecipe, load_recipe
from calib.scales.scales import KVScales
from calib.serving.ask import Answers, Server
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention

_TEXTS, _TOKENS = 6, 256
_TIMES = 4.0


@dataclass(frozen=True)
class Comparison:
    """Distances between a server and our runs: mean absolute differences of logprobs, in nats."""

    nearer: Literal["scales", "1.0", "cannot tell"]
    nats: dict[str, float]  # see `compare`
    logprobs: int
    of_prompt: bool  # of the prompts' tokens; else of the likeliest token after each
    requests: int
    seconds: float  # of asking

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        nats = {name: value if isfinite(value) else None for name, value in self.nats.items()}
        return nats | {name: value for name, value in asdict(self).items() if name != "nats"}


def compare_served(
    url: str, directory: Path, model_name: str, served_name: str | None, overrides: dict[str, Any]
) -> Comparison:
    """Compare the server at `url` with the model and the scales in `directory`.

    The server is asked first: what is wrong with it is found before weights are read.
    """
    recipe = load_recipe(None, {"device": "cpu", **overrides})  # the server may hold the GPU
    server = Server(url)
    opened, checkpoint = open_any_scales(directory), find_checkpoint(model_name)
    config, tokenizer = load_config(checkpoint, recipe), load_tokenizer(checkpoint, recipe)
    served = server.choose_model(served_name)
    limits = (model_positions(config), served.max_model_len)  # one token is generated
    length = max(2, min([_TOKENS, *(limit - 1 for limit in limits if limit)]))
    data = DataRecipe(dataset="builtin:python-docs", samples=_TEXTS, seq_len=length)
    texts = tokenize_rows(open_source(data).rows, tokenizer, data)[0]
    answers = server.ask(served.id, texts)
    model = load_model(checkpoint, config, recipe)
    check_token_ids(chain(*texts), tokenizer, model)
    scales, dtype = opened(model), model.dtype
    scaled, ones = (_run(model, each, answers) for each in (scales, unit_scales(model)))
    del model  # there may be memory for one
    other = "bfloat16" if dtype == torch.float32 else "float32"
    rounded = load_model(checkpoint, config, recipe.model_copy(update={"dtype": other}))
    return compare(answers, scaled, ones, _run(rounded, scales, answers))


def compare(answers: Answers, scaled: Tensor, ones: Tensor, rounded: Tensor) -> Comparison:
    """Compare a server's answers with our runs: with the scales, at 1.0, and in another dtype."""
    first, again = (torch.tensor([*chain(*each)]) for each in (answers.first, answers.again))
    pairs = {
        "to_scales": (first, scaled),
        "to_ones": (first, ones),
        "apart": (scaled, ones),
        "noise": (first, again),  # of the server
        "rounding": (scaled, rounded),  # ours
    }
    nats = {name: float((a - b).abs().mean()) for name, (a, b) in pairs.items()}
    asked = (len(first), answers.of_prompt, answers.requests, answers.seconds)
    return Comparison(decide(**nats), nats, *asked)


def decide(
    to_scales: float, to_ones: float, apart: float, noise: float, rounding: float
) -> Literal["scales", "1.0", "cannot tell"]:
    """Say which of our two runs the server is nearer to, if that means anything.

    It does not unless the runs lie more than four times as far apart as the server's noise and our
    rounding together: what is not due to scales must not decide.

    With scales all runtimes compute much the same, so the server must be within a quarter of that
    difference; the other run is then at least three times as far (the triangle inequality). At 1.0
    they differ in what is left of values that hardly fit FP8 (vLLM's CPU kernel cuts where ours
    rounds), so to be nearer is enough. A server like neither has another model or cache.
    """
    if not apart > _TIMES * (noise + rounding):  # also where one is not a number
        return "cannot tell"
    if to_scales < apart / _TIMES:
        return "scales"
    return "1.0" if to_ones < to_scales else "cannot tell"


@torch.inference_mode()
def _run(model: PreTrainedModel, scales: KVScales, answers: Answers) -> Tensor:
    """The logprobs that the server was asked for, of our own runtime."""
    found = []
    try:
        with fp8_attention(model, scales, backend="torch"):
            for prompt in answers.prompts:
                ids = torch.tensor([prompt], device=input_device(model))
                logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1).cpu()
                given = logprobs[:-1].gather(-1, ids[0, 1:, None].cpu())[:, 0]
                found.append(given if answers.of_prompt else logprobs[-1].amax()[None])
    except AttentionError as error:
        raise InputError(str(error)) from error
    return torch.cat(found)
