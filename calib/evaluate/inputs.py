"""Inputs of an evaluation: how much is measured, text, statistics, and scales to compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from calib.capture.directory_scales import ScalesForModel, open_scales
from calib.capture.loop import calibrate
from calib.data import CalibrationData, load_data, make_batches, resolve_batch_size
from calib.data.builtin import BUILTIN, LONG, MORE_PICTURES, PICTURES, PYTHON_DOCS
from calib.data.generated import GENERATED
from calib.errors import InputError
from calib.evaluate.cache_variants import cache_names
from calib.evaluate.held_out import Readers, add_own_samples, hold_out
from calib.evaluate.report import Suite
from calib.evaluate.retrieval import LongDocument, hide_pairs
from calib.evaluate.variants import BUILT_IN, Setup
from calib.files.model_directory import ModelDirectory
from calib.models.config import check_positions, fit_seq_len, model_positions
from calib.models.load import check_token_ids
from calib.recipe import DataRecipe, EvaluationRecipe, ObserverRecipe, Recipe
from calib.scales.stats import KVStats
from calib.scales.text_summary import FEW_TOKENS

SUITES = {
    "quick": Suite(
        calibration_samples=12,
        documents=8,
        seq_len=256,
        prompts=4,
        new_tokens=24,
        passkey_tokens=(256,),
        passkey_depths=(0.0, 0.5, 1.0),
        layer_documents=2,
    ),
    "full": Suite(
        calibration_samples=24,
        documents=12,
        seq_len=1024,
        prompts=8,
        new_tokens=48,
        passkey_tokens=(256, 1024),
        passkey_depths=(0.0, 0.5, 1.0),
        layer_documents=4,
        long_tokens=4096,
        long_documents=2,
    ),
}
RANDOM_SAMPLES = 4
ENOUGH = 8  # documents; of 2 an interval holds the mean in half of all cases, of 8 in 87 %
_LEAST_LONG = 2  # long documents: an interval needs them
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_QUESTION = "\nWhat is the pass key? The pass key is"


class Passkey(NamedTuple):
    """A prompt with a number hidden in it."""

    key: str
    prompt: Tensor  # [T] int64


@dataclass(frozen=True)
class EvaluationText:
    """Samples to calibrate on, and what every variant reads and writes; documents are token ids."""

    data: CalibrationData  # all samples that were loaded
    calibration: CalibrationData
    documents: Sequence[Tensor]  # [T] int64 each, new to all scales
    long_documents: Sequence[LongDocument]  # for caches that engines have
    layer_documents: Sequence[Tensor]  # [T] int64 each, those of `documents` that per-layer errors are of
    prompts: Sequence[Tensor]  # [T] int64 each, of one length
    new_tokens: int  # to write after each prompt
    passkeys: Sequence[Passkey]


def fit_suite(
    config: PreTrainedConfig, settings: EvaluationRecipe, suite: Suite | None
) -> tuple[Suite, list[str]]:
    """Return `suite`, or that of the settings with their documents and length; and warnings.

    A default length is cut to the model's positions; a length that the user chose is refused.
    """
    documents, seq_len = (suite.documents, suite.seq_len) if suite else (settings.samples, settings.seq_len)
    suite = suite or SUITES[settings.suite]
    fitted, warnings = fit_seq_len(config, seq_len or suite.seq_len, is_default=seq_len is None)
    long = settings.long or min(suite.long_tokens, model_positions(config) or suite.long_tokens)
    check_positions(config, long, "--long")
    return replace(suite, documents=documents or suite.documents, seq_len=fitted, long_tokens=long), warnings


def whole_text_only(suite: Suite) -> Suite:
    """Leave generated text, passkeys, long documents and errors per layer out of `suite`."""
    return replace(suite, prompts=0, new_tokens=0, passkey_tokens=(), layer_documents=0, long_tokens=0)


def complete_recipe(recipe: Recipe, suite: Suite, *, with_other_text: bool = True) -> Recipe:
    """Add the suite's lengths, and what variants may need; pictures and sound are other text, or refused."""
    data, settings, built_in = recipe.data, recipe.evaluation, (*BUILTIN, *GENERATED)
    dataset = settings.dataset or data.dataset
    both, pictures = (data.dataset, dataset), {PICTURES, MORE_PICTURES}
    if (data.images or data.audio) and {*settings.also} <= {*built_in, "all"}:
        pictures |= {name for name in both if not name.lower().endswith(".txt")} - {*built_in}
        if not pictures & {*both}:
            flag = "--images" if data.images else "--audio"
            raise InputError(f"{flag}: {dataset} has no such column; name another with --dataset or --also")
    if shown := [MORE_PICTURES if name == PICTURES else name for name in both if name in pictures]:
        also = dict.fromkeys([*shown, *settings.also])
        settings = settings.model_copy(update={"dataset": None, "also": [*also] if with_other_text else []})
        dataset = PYTHON_DOCS if dataset in pictures else dataset
    if dataset != data.dataset:
        names = ("images", "audio", "seed", "allow_few_tokens")
        data = DataRecipe(dataset=dataset, **{name: getattr(data, name) for name in names})
    samples = suite.calibration_samples + suite.documents
    data = data.model_copy(update={"samples": samples, "seq_len": suite.seq_len})
    observer = ObserverRecipe(name="mse")  # its histogram is for a variant
    changes = {"data": data, "means": True, "targets": "qkv", "observer": observer, "evaluation": settings}
    if recipe.dtype == "auto" and (recipe.device == "cpu" or not torch.cuda.is_available()):
        # rounding activations to bfloat16 would hide most of what the cache changes
        changes["dtype"] = "float32"
    return recipe.model_copy(update=changes)


def name_scales(directories: Sequence[Path]) -> list[str]:
    """Name the scales in each directory after it, or after its path where its name is taken."""
    reserved = {*BUILT_IN, *cache_names(["all"])}
    names = [path.resolve().name for path in directories]
    return [
        name if names.count(name) == 1 and name not in reserved else str(path)
        for name, path in zip(names, directories, strict=True)
    ]


def open_named_scales(directories: Sequence[Path], checkpoint: ModelDirectory) -> dict[str, ScalesForModel]:
    """Read the scales in each directory, by the names of `name_scales`; refuse one that is given twice."""
    repeated = next((path for path in directories if directories.count(path) > 1), None)
    if repeated is not None:
        raise InputError(f"--scales '{repeated}' is given twice; give every directory once")
    scales = [open_scales(directory, checkpoint) for directory in directories]
    return dict(zip(name_scales(directories), scales, strict=True))


def load_text(
    setup: Setup, recipe: Recipe, suite: Suite, readers: Readers
) -> tuple[EvaluationText, list[str]]:
    """Load the text that `suite` needs, without documents that `readers` know; and warnings."""
    data, pieces, warnings = hold_out(
        sample_loader(setup, recipe.data), readers, suite.calibration_samples, suite.documents
    )
    documents = [torch.tensor(piece.ids) for piece in pieces]
    long_documents, long_warnings = _load_long(setup, recipe, suite, readers, data)
    prompt_len = max(1, suite.seq_len // 8)
    text = EvaluationText(
        data=data,
        calibration=data.only(range(suite.calibration_samples)),
        documents=documents,
        long_documents=long_documents,
        layer_documents=documents[: suite.layer_documents],
        prompts=[d[:prompt_len] for d in documents if len(d) >= prompt_len][: suite.prompts],
        new_tokens=suite.new_tokens,
        passkeys=make_passkeys(setup.tokenizer, suite),
    )
    if not recipe.data.allow_few_tokens:
        text.calibration.summary(recipe.data.skip_first).check()
    passkeys = (passkey.prompt.tolist() for passkey in text.passkeys)
    long_ids = (document.token_ids.tolist() for document in long_documents)
    check_token_ids(chain(*data.samples, *passkeys, *long_ids), setup.tokenizer, setup.model)
    if (count := len({piece.document for piece in pieces})) < len(pieces):
        warnings.append(
            f"the {len(pieces)} held-out samples come from {count} document{'' if count == 1 else 's'}: "
            "intervals take each sample for a document of its own, and are too narrow for other text"
        )
    return text, [*data.warnings, *warnings, *long_warnings]


def advise_length(suite: Suite, recipe: DataRecipe) -> str:
    """Name the flag that makes the samples to calibrate on long enough together."""
    length = recipe.skip_first + ceil(FEW_TOKENS / suite.calibration_samples)
    if recipe.seq_len < length:
        return f"give --seq-len {length} or more"
    return f"choose a --dataset whose texts have {length} tokens or more"


def _load_long(
    setup: Setup, recipe: Recipe, suite: Suite, readers: Readers, data: CalibrationData
) -> tuple[list[LongDocument], list[str]]:
    """Make long documents of built-in text that is new to `readers`, and to the calibration on `data`.

    What cannot be had is refused where it was asked for, and else left out with a warning.
    """
    length = suite.long_tokens
    if not length:
        return [], []
    load_all = sample_loader(setup, DataRecipe(dataset=LONG, seq_len=length, seed=recipe.data.seed))

    def load(samples: int) -> CalibrationData:
        loaded = load_all(samples)
        return loaded.only(i for i, piece in enumerate(loaded.pieces) if len(piece.ids) == length)

    readers = add_own_samples(readers, data.samples[: suite.calibration_samples])
    try:
        held_out = hold_out(load, readers, 0, suite.long_documents, _LEAST_LONG)
        texts = enumerate(piece.ids for piece in held_out.pieces)
        documents = [hide_pairs(setup.tokenizer, ids, number) for number, ids in texts]
    except InputError as error:
        if recipe.evaluation.long:
            raise InputError(f"--long {length}: {error}") from None
        return [], [f"long documents of {length} tokens are left out: {error}"]
    return documents, held_out.warnings


def sample_loader(setup: Setup, recipe: DataRecipe) -> Callable[[int], CalibrationData]:
    """Return a function that loads as many samples as it is told, or all there are; of text alone."""
    return lambda samples: load_data(
        recipe.model_copy(update={"samples": samples, "images": None, "audio": None}),
        setup.tokenizer,
        lambda: setup.model,
    )


def make_passkeys(tokenizer: PreTrainedTokenizerBase, suite: Suite) -> list[Passkey]:
    """Make prompts of about the suite's lengths with a five-digit key at each of its depths."""
    generator = torch.Generator().manual_seed(0)
    passkeys = []
    lengths = [n for n in suite.passkey_tokens if n <= suite.seq_len]
    for length, depth in product(lengths, suite.passkey_depths):
        key = str(int(torch.randint(10_000, 99_999, (1,), generator=generator)))
        needle = f"The pass key is {key}. Remember it. {key} is the pass key. "
        room = length - len(tokenizer(needle + _QUESTION)["input_ids"])
        repeats = max(1, room // len(tokenizer(_FILLER)["input_ids"]))
        before = round(repeats * depth)
        text = _FILLER * before + needle + _FILLER * (repeats - before) + _QUESTION
        passkeys.append(Passkey(key, torch.tensor(tokenizer(text)["input_ids"])))
    return passkeys


def calibrate_on(setup: Setup, samples: list[list[int]], recipe: Recipe, text: str) -> KVStats:
    """Measure the statistics of `samples`; progress says that they are of this `text`."""
    data, progress = recipe.data, setup.progress
    size = resolve_batch_size(data, setup.model.device.type)
    batches = make_batches(samples, size, pad_id=0, seed=data.seed, skip_first=data.skip_first)
    progress.stage(f"calibrate on {text}", sum(batch.num_tokens for batch in batches), "tokens")
    return calibrate(
        setup.model, batches, recipe, on_batch=lambda batch, _: progress.advance(batch.num_tokens)
    )


def calibrate_on_random_tokens(setup: Setup, recipe: Recipe) -> KVStats:
    """Measure the statistics of random token ids."""
    data = recipe.data.model_copy(update={"dataset": "random"})
    samples = sample_loader(setup, data)(RANDOM_SAMPLES).samples
    return calibrate_on(setup, samples, recipe, "random tokens")
