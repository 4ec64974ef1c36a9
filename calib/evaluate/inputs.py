"""Inputs of an evaluation: how much is measured, samples, statistics, and scales given."""

import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from calib.caches.types import Shape
from calib.capture.directory_scales import ScalesForModel, open_scales
from calib.capture.loop import calibrate
from calib.data import CalibrationData, load_data, make_batches, resolve_batch_size
from calib.errors import InputError
from calib.evaluate.cache_variants import cache_names
from calib.evaluate.held_out import Readers, hold_out
from calib.evaluate.report import SCHEMA, Conditions, Continuation, Data, Suite
from calib.evaluate.variants import BUILT_IN, Setup
from calib.files.model_directory import ModelDirectory
from calib.formats.output import versions
from calib.models.config import fit_seq_len, model_positions
from calib.models.load import check_token_ids, load_model, load_tokenizer
from calib.progress import Progress
from calib.recipe import DataRecipe, EvaluationRecipe, ObserverRecipe, Recipe
from calib.scales.stats import KVStats

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_ASK = "\nWhat is the pass key? The pass key is"


class Passkey(NamedTuple):
    """A prompt with a number hidden in it."""

    key: str
    prompt: Tensor  # [T]


class Material(NamedTuple):
    """Held-out documents, prompts to continue, passkeys to find."""

    documents: Sequence[Tensor]  # [T] each
    prompts: Sequence[Tensor]  # [T] each, all of one length
    new_tokens: int
    passkeys: Sequence[Passkey]
    layer_documents: Sequence[Tensor]  # those of the documents that per-layer errors are of
    long_documents: Sequence[Tensor]  # [T] each, read with what engines can load


def make_material(setup: Setup, held_out: Sequence[list[int]], suite: Suite) -> Material:
    """Make what `suite` reads of `held_out`, which are no longer than the model's positions."""
    documents = [torch.tensor(sample) for sample in held_out]
    prompt_len = max(1, suite.seq_len // 8)
    prompts = [d[:prompt_len] for d in documents if len(d) >= prompt_len][: suite.prompts]
    passkeys = make_passkeys(setup.tokenizer, suite)
    positions = model_positions(setup.model.config) or suite.long_tokens
    joined = torch.cat(documents)[: min(suite.long_tokens, positions)]
    long = [joined] if len(joined) > max(map(len, documents)) else []
    of_layers = documents[: suite.layer_documents]
    return Material(documents, prompts, suite.new_tokens, passkeys, of_layers, long)


def continue_greedily(setup: Setup, prompts: Sequence[Tensor], new: int) -> list[list[int]]:
    """Write `new` greedy tokens after each prompt [T]; all prompts have the same length."""
    ids = torch.stack(list(prompts)).to(setup.model.device)
    output = setup.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
    )
    tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return tokens


def cut_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], same: int) -> Continuation:
    """Decode `ids`, cut after the first `same` tokens."""
    whole, start = tokenizer.decode(ids), tokenizer.decode(ids[:same])
    # a character of several tokens may be cut in two: it belongs to the rest
    start = start if whole.startswith(start) else start.rstrip("\ufffd")
    return Continuation(same_tokens=same, same=start, rest=whole.removeprefix(start))


def same_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the two first differ."""
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))


def make_passkeys(tokenizer: PreTrainedTokenizerBase, suite: Suite) -> list[Passkey]:
    """Make prompts of about the suite's lengths with a five-digit key at each of its depths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    lengths = [n for n in suite.passkey_tokens if n <= suite.seq_len]
    for length, depth in product(lengths, suite.passkey_depths):
        key = str(int(torch.randint(10_000, 99_999, (1,), generator=generator)))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key. "
        room = length - len(_ids(tokenizer, needle + _ASK))
        repeats = max(1, room // len(_ids(tokenizer, _FILLER)))
        before = round(repeats * depth)
        text = _FILLER * before + needle + _FILLER * (repeats - before) + _ASK
        found.append(Passkey(key, torch.tensor(_ids(tokenizer, text))))
    return found


def retrieve(setup: Setup, passkeys: Sequence[Passkey]) -> list[bool]:
    """Whether the model's continuation of each prompt starts with its key."""
    found: dict[int, bool] = {}
    for length in {len(passkey.prompt) for passkey in passkeys}:
        together = [i for i, passkey in enumerate(passkeys) if len(passkey.prompt) == length]
        new = max(len(_ids(setup.tokenizer, passkeys[i].key)) for i in together) + 2
        texts = continue_greedily(setup, [passkeys[i].prompt for i in together], new)
        for i, tokens in zip(together, texts, strict=True):
            found[i] = setup.tokenizer.decode(tokens).strip().startswith(passkeys[i].key)
    return [found[i] for i in range(len(passkeys))]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


SUITES = {
    "quick": Suite(12, 8, 256, 4, 24, (256,), (0.0, 0.5, 1.0), 2),
    "full": Suite(24, 12, 1024, 8, 48, (256, 1024), (0.0, 0.5, 1.0), 4, 8192),
}
RANDOM_SAMPLES = 4
_CPU_INFO = Path("/proc/cpuinfo")


def fitting_suite(
    config: PreTrainedConfig, recipe: EvaluationRecipe, given: Suite | None
) -> tuple[Suite, list[str]]:
    """Choose `given`, or the recipe's suite with its own number of documents and length.

    Notes say if the model's positions cut the length; one that was asked for is refused, not cut.
    """
    suite = given or SUITES[recipe.suite]
    asked = recipe.seq_len if given is None else given.seq_len
    seq_len, notes = fit_seq_len(config, asked or suite.seq_len, is_default=asked is None)
    documents = suite.documents if given else recipe.samples or suite.documents
    return replace(suite, documents=documents, seq_len=seq_len), notes


def whole_text_only(suite: Suite) -> Suite:
    """`suite` without generated text, passkeys, long documents and errors per layer."""
    return replace(suite, prompts=0, new_tokens=0, passkey_tokens=(), layer_documents=0, long_tokens=0)


def evaluation_recipe(recipe: Recipe, suite: Suite) -> Recipe:
    """Complete `recipe`: the suite's lengths, and all statistics that a variant may need."""
    data, other = recipe.data, recipe.evaluation.dataset
    if other is not None and other != data.dataset:
        few = data.allow_few_tokens
        data = DataRecipe(dataset=other, seed=data.seed, allow_few_tokens=few)
    samples = suite.calibration_samples + suite.documents
    data = data.model_copy(update={"samples": samples, "seq_len": suite.seq_len})
    observer = ObserverRecipe(name="mse")  # its histogram is for a variant
    changes = {"data": data, "means": True, "targets": "qkv", "observer": observer}
    on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    if recipe.dtype == "auto" and on_cpu:
        # rounding activations to bfloat16 would hide most of what the cache changes
        changes["dtype"] = "float32"
    return recipe.model_copy(update=changes)


def given_names(directories: Sequence[Path]) -> list[str]:
    """Name the scales in each directory after it, or after its path where its name is taken."""
    taken = {*BUILT_IN, *cache_names(["all"])}
    short = [path.resolve().name for path in directories]
    return [
        name if short.count(name) == 1 and name not in taken else str(path)
        for name, path in zip(short, directories, strict=True)
    ]


def open_given(directories: Sequence[Path], checkpoint: ModelDirectory) -> dict[str, ScalesForModel]:
    """Read the scales in each directory, by the names of `given_names`."""
    twice = next((path for path in directories if directories.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"--scales '{twice}' is given twice; give every directory once")
    opened = [open_scales(directory, checkpoint) for directory in directories]
    return dict(zip(given_names(directories), opened, strict=True))


def load_setup(
    checkpoint: ModelDirectory,
    config: PreTrainedConfig,
    recipe: Recipe,
    progress: Progress,
) -> Setup:
    """Load the model and its tokenizer."""
    progress.stage("load")
    tokenizer = load_tokenizer(checkpoint, recipe.trust_remote_code)
    model = load_model(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)
    asked = recipe.evaluation
    return Setup(model, tokenizer, asked.backend, progress, asked.attention)


def load_material(
    setup: Setup, recipe: Recipe, suite: Suite, readers: Readers
) -> tuple[CalibrationData, CalibrationData, Material, list[str]]:
    """Load samples, those of them to calibrate on, and documents that no reader knows; warnings."""

    def load(samples: int) -> CalibrationData:
        wanted = recipe.data.model_copy(update={"samples": samples})
        return load_data(wanted, setup.tokenizer, lambda: setup.model)

    data, documents, warnings = hold_out(load, readers, suite.calibration_samples, suite.documents)
    read = data.only(range(suite.calibration_samples))
    material = make_material(setup, documents, suite)
    passkeys = (passkey.prompt.tolist() for passkey in material.passkeys)
    check_token_ids(chain(*data.samples, *passkeys), setup.tokenizer, setup.model)
    if not recipe.data.allow_few_tokens:
        read.summary(recipe.data.skip_first).check()
    if data.documents < len(data.samples):
        warnings.append(
            f"the {len(data.samples)} samples are pieces of fewer documents ({data.documents}): "
            "intervals take them for independent, and are too narrow for other text"
        )
    return data, read, material, warnings


def calibrate_on(setup: Setup, samples: list[list[int]], recipe: Recipe, stage: str = "calibrate") -> KVStats:
    """Statistics of `samples`, as the `stage` that progress shows."""
    data, model = recipe.data, setup.model
    size = resolve_batch_size(data, model.device.type)
    batches = make_batches(samples, size, pad_id=0, seed=data.seed, skip_first=data.skip_first)
    setup.progress.stage(stage, sum(batch.num_tokens for batch in batches), "tokens")
    done = setup.progress.advance
    return calibrate(model, batches, recipe, on_batch=lambda batch, _: done(batch.num_tokens))


def calibrate_on_random_tokens(setup: Setup, recipe: Recipe) -> KVStats:
    """Statistics of random token ids."""
    data = recipe.data.model_copy(update={"dataset": "random", "samples": RANDOM_SAMPLES})
    samples = load_data(data, setup.tokenizer, lambda: setup.model).samples
    return calibrate_on(setup, samples, recipe, "calibrate on random tokens")


def describe(data: CalibrationData, material: Material, calibration_tokens: int) -> Data:
    """The text that is measured on, for the report."""
    documents = material.documents
    return Data(
        source=data.source,
        fingerprint=data.fingerprint,
        calibration_tokens=calibration_tokens,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        layer_documents=len(material.layer_documents),
        new_tokens=material.new_tokens,
    )


def conditions(setup: Setup, model: str, suite: Suite, data: Data, shapes: Sequence[Shape]) -> Conditions:
    """What is measured, where, and on what."""
    values = sum(shape.values for shape in shapes)
    return Conditions(
        version=SCHEMA,
        versions=versions(),
        machine=machine(setup.model.device.type),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=model,
        suite=suite,
        backend=setup.resolved_backend,
        attention=setup.attention,
        dtype=str(setup.model.dtype).removeprefix("torch."),
        data=data,
        bytes_per_token={"fp8": values, "16bit": 2 * values},
    )


def machine(device: str) -> str:
    """Name of the GPU or CPU behind torch's `device`."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    # Linux alone leaves `platform.processor()` empty, or says no more than x86_64
    text = _CPU_INFO.read_text(errors="replace") if _CPU_INFO.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()
