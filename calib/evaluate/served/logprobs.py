"""A running server compared with our runtime: is it nearer to our run with the scales, or to that at 1.0?"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from calib.capture.attention import map_attention
from calib.capture.directory_scales import open_scales
from calib.choices import DType
from calib.data.loading import open_source
from calib.data.samples import tokenize_rows
from calib.engines.loaded_scales import read_engine_scales
from calib.engines.verification import find_own_problems
from calib.errors import InputError, NoScalesError
from calib.evaluate.served.client import Answers, ServedModel, Server
from calib.files.fingerprint import baked_for
from calib.models.config import load_config, model_positions
from calib.models.load import check_token_ids, input_device, load_model, load_tokenizer
from calib.models.sources import find_model
from calib.progress import SILENT, Progress
from calib.recipe import DataRecipe, load_recipe
from calib.scales.scales import KVScales
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import fp8_attention

_TEXTS, _TOKENS = 6, 256
_FACTOR = 4.0
# nats, of a logprob: neither another kernel nor weights of 4 bits change them by as much on average
_OTHER_MODEL = 0.5

Nearer = Literal["scales", "1.0", "neither", "cannot tell"]


@dataclass(frozen=True)
class ServerComparison:
    """Distances between a server and our runs: mean absolute differences of logprobs, in nats."""

    nearer: Nearer
    served: str  # the name of the server's model
    root: str | None  # where it says that its files are
    to_scales: float
    to_ones: float
    apart: float  # our run with the scales from that at 1.0
    noise: float  # of the server, asked twice
    rounding: float  # ours: the scales in another dtype
    logprobs: int
    of_prompt: bool  # of the prompts' tokens; else of the likeliest token after each
    requests: int
    seconds: float  # of asking
    own_seconds: float  # of our runs: loading the model twice, and computing
    is_baked: bool  # the directory needs no scales, and both runs are at 1.0
    problems: tuple[str, ...] = ()  # of the directory's calibration, as `fp8kv verify` finds them

    @property
    def needs_scales(self) -> bool:
        """Return whether our two runs differ by more than noise."""
        return are_apart(self.apart, self.noise, self.rounding)

    @property
    def served_model(self) -> str:
        """The server's model, with the place of its files where the server says it."""
        has_root = self.root not in (None, self.served)
        return f"{self.served!r:.80}{f' from {self.root!r:.200}' if has_root else ''}"

    def is_other_model(self, *directories: str | Path) -> bool:
        """Return whether the server answers like another model, and does not name one of `directories`."""
        root = Path(self.root or self.served).resolve()
        return self.nearer == "neither" and root not in [Path(path).resolve() for path in directories]

    @property
    def is_like_both(self) -> bool:
        """Return whether our two runs differ by no more than noise, and the server by little more."""
        is_steady = self.noise <= _OTHER_MODEL and isfinite(self.to_scales + self.to_ones)
        return is_steady and self.nearer == "cannot tell" and not self.needs_scales


def compare_served(
    url: str,
    directory: Path,
    model_name: str,
    served_name: str | None,
    overrides: dict[str, Any],
    progress: Progress = SILENT,
) -> ServerComparison:
    """Compare the server at `url` with the model and the scales in `directory`.

    The server is asked before weights are read, so that what is wrong with it is reported at once.
    """
    recipe = load_recipe(None, {"device": "cpu", **overrides})  # the server may hold the GPU
    server, checkpoint = Server(url), find_model(model_name)
    purpose = baked_for(checkpoint)
    is_baked = purpose == "fp8" and not read_engine_scales(directory).layers
    try:
        fit_scales = _unit_scales if is_baked else open_scales(directory, checkpoint)
    except NoScalesError:
        if purpose != "int8":
            raise
        raise InputError(
            f"'{model_name}' is baked for int8, whose cache makes its own scales, so none can be compared; "
            "leave --served out, and see in the server's log which cache it has"
        ) from None
    problems = find_own_problems(directory, None if is_baked else checkpoint)
    config = load_config(checkpoint, recipe.trust_remote_code)
    tokenizer = load_tokenizer(checkpoint, recipe.trust_remote_code)
    served = server.choose_model(served_name)
    limits = (model_positions(config), served.max_model_len)  # one token is generated
    length = max(2, min([_TOKENS, *(limit - 1 for limit in limits if limit)]))
    data = DataRecipe(dataset="builtin:python-docs", samples=_TEXTS, seq_len=length)
    texts = [piece.ids for piece in tokenize_rows(open_source(data).rows, tokenizer, data).pieces]
    progress.stage("ask the server")
    answers = server.ask(served.id, texts, model_name)
    progress.stage("run the model", 3 * len(answers.prompts), "texts")
    start = time.monotonic()
    model = load_model(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)
    check_token_ids(chain(*texts), tokenizer, model)
    scales, is_exact = fit_scales(model), model.dtype == torch.float32
    scaled, ones = (_run(model, factors, answers, progress) for factors in (scales, _unit_scales(model)))
    del model  # there may be memory for one
    dtype: DType = "bfloat16" if is_exact else "float32"
    rounded = load_model(checkpoint, config, dtype, recipe.device, recipe.trust_remote_code)
    runs = (scaled, ones, _run(rounded, scales, answers, progress))
    progress.end()
    comparison = compare(served, answers, *runs, time.monotonic() - start, is_baked=is_baked)
    return replace(comparison, problems=tuple(problems))


def _unit_scales(model: PreTrainedModel) -> KVScales:
    return map_attention(model).unit_scales()


def compare(
    served: ServedModel, answers: Answers, scaled: Tensor, ones: Tensor, rounded: Tensor, own_seconds: float,
    *, is_baked: bool,
) -> ServerComparison:  # fmt: skip
    """Compare a server's answers with logprobs [T] of our runs: with the scales, at 1.0, in another dtype."""
    first, again = (torch.tensor([*chain(*logprobs)]) for logprobs in (answers.first, answers.again))
    pairs = ((first, scaled), (first, ones), (scaled, ones), (first, again), (scaled, rounded))
    names = ("to_scales", "to_ones", "apart", "noise", "rounding")
    nats = {name: float((a - b).abs().mean()) for name, (a, b) in zip(names, pairs, strict=True)}
    return ServerComparison(
        decide(**nats), served.id, served.root, **nats, logprobs=len(first), of_prompt=answers.of_prompt,
        requests=answers.requests, seconds=answers.seconds, own_seconds=own_seconds, is_baked=is_baked,
        problems=(),
    )  # fmt: skip


def describe_comparison(
    comparison: ServerComparison, model: str, *, is_other: bool, plugin_word: bool | None
) -> Iterator[str]:
    """Word a comparison; by its plugin the server uses the scales, or does not, or it is not known: None."""
    nearer, is_baked = comparison.nearer, comparison.is_baked
    uses = "stores at 1.0, which is right for a baked model" if is_baked else "uses the scales"
    tokens = "given tokens" if comparison.of_prompt else "likeliest next tokens"
    if plugin_word:
        why = "" if is_baked else ": scales move ours by no more than 4 times noise and rounding"
        yield f"the server {uses}, says its plugin; logprobs cannot tell{why}"
    elif nearer == "cannot tell" and plugin_word is False:
        yield "what the server's plugin says does not fit these scales; logprobs cannot tell if they are used"
    elif nearer == "cannot tell":
        yield f"cannot tell whether the server {uses}"
    elif nearer == "neither":
        model_of_server = comparison.served_model
        yield (
            f"the server serves another model: {model_of_server}, and not '{model}'"
            if is_other
            else f"the server says that it serves {model_of_server}, and answers unlike '{model}'"
        )
    else:
        yield f"the server is nearer to {'the scales' if nearer == 'scales' else nearer}"
    yield (
        f"the server's logprobs differ by {comparison.to_scales:.4f} nats from our runtime with the scales, "
        f"by {comparison.to_ones:.4f} from it at 1.0 ({comparison.apart:.4f} between the two); the server's "
        f"noise is {comparison.noise:.4f}, our rounding {comparison.rounding:.4f}"
    )
    yield (
        f"(mean absolute difference of the logprobs of {comparison.logprobs:,} {tokens}; "
        f"{comparison.requests} requests in {comparison.seconds:.1f} s, our own runs in "
        f"{comparison.own_seconds:.1f} s)"
    )
    if nearer == "neither" and is_other:
        yield "give the directory and the scales of the model that it serves"
    elif nearer == "neither":
        yield "if its files were changed after the server started, start it again; else see its log"
    elif nearer == "cannot tell" and plugin_word is None and not (comparison.needs_scales or is_baked):
        yield f"serve a model that needs its scales: fp8kv stress {quote(model)} -o twin"
    if nearer == "scales":
        yield "note: so is one with most of the scales, or a 16-bit cache; see its log"


def decide(to_scales: float, to_ones: float, apart: float, noise: float, rounding: float) -> Nearer:
    """Return which of our two runs the server is nearer to, if more than noise decides.

    With scales all runtimes compute much the same: a quarter of the way is near. At 1.0 they differ
    in what is left of values that hardly fit FP8: half of the way nearer is near. Another model is farther
    from both than they are from each other.
    """
    if not all(map(isfinite, (to_scales, to_ones, apart, noise, rounding))):
        return "cannot tell"
    if min(to_scales, to_ones) > max(apart, _FACTOR * (noise + rounding), _OTHER_MODEL):
        return "neither"
    if not are_apart(apart, noise, rounding):
        return "cannot tell"
    if to_scales < apart / _FACTOR:
        return "scales"
    return "1.0" if to_ones < apart and to_scales - to_ones > apart / 2 else "cannot tell"


def are_apart(apart: float, noise: float, rounding: float) -> bool:
    """Return whether two runs differ by more than noise; False also where one is NaN."""
    return apart > _FACTOR * (noise + rounding)


@torch.inference_mode()
def _run(model: PreTrainedModel, scales: KVScales, answers: Answers, progress: Progress) -> Tensor:
    """Return the logprobs that the server was asked for, of our own runtime."""
    results = []
    try:
        with fp8_attention(model, scales, backend="torch"):
            for prompt in answers.prompts:
                ids = torch.tensor([prompt], device=input_device(model))
                logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1).cpu()
                of_prompt = logprobs[:-1].gather(-1, ids[0, 1:, None].cpu())[:, 0]
                results.append(of_prompt if answers.of_prompt else logprobs[-1].amax()[None])
                progress.advance(1)
    except AttentionError as error:
        raise InputError(str(error)) from error
    return torch.cat(results)
