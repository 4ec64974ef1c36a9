"""The whole job: find the model, prepare, measure, derive, write. The CLI calls this, and so may you."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from calib.arguments import check_arguments, to_path
from calib.capture.attention import AttentionMap, map_attention
from calib.capture.capabilities import check_scales, engine_class, reason_against_fp8
from calib.capture.draft import add_draft_layer, layers_read, read_by_drafter
from calib.capture.loop import media_arguments
from calib.capture.processes import World, joined_world
from calib.capture.resume import (
    NOTHING_SAVED,
    SavedProgress,
    Share,
    check_progress,
    check_unfinished,
    compared_inputs,
    progress_file,
    read_until,
    remove_progress,
)
from calib.data import CalibrationData, MediaReader, load_data, shared_batch_size
from calib.errors import InputError
from calib.files.atomic import Claim, claimed
from calib.files.model_directory import ModelDirectory
from calib.formats import check_recipe
from calib.formats.directory import check_output, check_places
from calib.formats.output import (
    CalibrationRecord,
    Destination,
    Result,
    check_in_place,
    dataset_facts,
    default_output,
    make_exports,
    write_output,
)
from calib.formats.scales_json import check_split
from calib.layerwise.loop import LayerwiseModel, calibrate_layerwise, open_layers, scratch_directory
from calib.layerwise.memory import memory_limit, resolve_offload
from calib.layerwise.weights import load_skeleton
from calib.models.config import explain_nonsense, fit_seq_len, load_config
from calib.models.load import check_token_ids, input_device, load_model, load_tokenizer, model_notes
from calib.models.sources import find_model, served_name
from calib.progress import SILENT, Progress
from calib.recipe import Recipe
from calib.scales.stats import KVStats
from calib.scales.tail import check_enough

__all__ = ["Result", "default_output", "run"]


@check_arguments
def run(
    model: str | os.PathLike[str],
    recipe: Recipe,
    output: str | os.PathLike[str] | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
    in_place: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress = SILENT,
) -> Result | None:
    """Calibrate `model`, a name or a path, as `recipe` says; write all of `output` or nothing.

    With `draft`, that drafter (EAGLE) is calibrated, and the model only read. With `in_place` files are kept
    beside those that replace them. Of several processes the first has a result. Errors are an Fp8kvError.
    """
    to_path(model)
    names = [str(x) for x in (model, draft) if x is not None]  # the last one gets the scales
    name, path = names[-1], None if output is None else to_path(output)
    check_places(path, in_place=in_place, overwrite=overwrite)
    path = check_in_place(name, recipe.export) if in_place else path or default_output(name, recipe.strategy)
    check_unfinished(path, resume=resume and not (in_place or overwrite))
    for format in recipe.export.formats:
        check_recipe(format, recipe)
    destination = Destination(path, in_place, overwrite, progress.copied)
    with joined_world() as world:
        world.check_same("commands or recipes", [names, str(path), recipe.model_dump()])
        start = perf_counter()
        progress.stage("load")
        checkpoints = world.together(lambda: _find_checkpoints(names, recipe, destination))
        with _claimed_output(destination, checkpoints, world, resume=resume) as claim:
            prepared = world.together(lambda: _prepare(checkpoints, recipe, world.size, resume=resume))
            loaded = perf_counter()
            (stats, mtp), data, notes = _measure(checkpoints, prepared, path, world, progress, resume=resume)
            measured = perf_counter()
            progress.stage("write")

            def write() -> Result | None:
                if world.is_first:
                    record = CalibrationRecord(
                        name, checkpoints[-1], prepared.recipe, stats, dataset_facts(data), data.warnings,
                        notes, torch.get_num_threads(), draft=mtp,
                        drafts_for="" if draft is None else served_name(str(model), checkpoints[0].path),
                    )  # fmt: skip
                    return write_output(record, replace(destination, claim=claim))
                return None

            result = world.together(write)  # what goes wrong there ends all of them
            remove_progress(progress_file(path, world.rank))
    seconds = {"load": loaded - start, "calibrate": measured - loaded, "write": perf_counter() - measured}
    return result and replace(result, seconds=seconds)


def _find_checkpoints(names: list[str], recipe: Recipe, destination: Destination) -> list[ModelDirectory]:
    """Find a model and its drafter, before any weight is read; refuse an output that cannot be written."""
    checkpoints = [find_model(name, kind) for name, kind in zip(names, ("model", "drafter"), strict=False)]
    for checkpoint in checkpoints if not destination.in_place else ():
        check_output(destination.path, checkpoint.path, overwrite=destination.overwrite)
    if "json" in recipe.export.formats:
        check_split(checkpoints[-1], recipe.export.tp_size)
    return checkpoints


@contextmanager
def _claimed_output(
    destination: Destination, checkpoints: list[ModelDirectory], world: World, *, resume: bool
) -> Iterator[Claim | None]:
    """Claim the output for the first process, others get None; refuse progress that this run would lose."""
    claim = claimed(destination.path, overwrite=destination.overwrite or destination.in_place)
    saved = progress_file(destination.path, world.rank)
    with ExitStack() as stack:
        claimed_first = world.together(lambda: stack.enter_context(claim) if world.is_first else None)
        world.together(lambda: check_progress(saved, checkpoints, resume=resume))
        yield claimed_first


@dataclass(frozen=True)
class Prepared:
    """A model and the data it will read."""

    recipe: Recipe  # as resolved
    model: PreTrainedModel
    layers: LayerwiseModel | None  # where its weights stay in the checkpoint
    attention: AttentionMap
    data: CalibrationData


def _prepare(checkpoints: list[ModelDirectory], recipe: Recipe, processes: int, *, resume: bool) -> Prepared:
    """Load the data and the model, or its skeleton, and rehearse what will be written."""
    checkpoint, *drafters = checkpoints
    config = load_config(checkpoint, recipe.trust_remote_code)
    states = [layers_read(drafter, config, recipe) for drafter in drafters]
    check_scales(recipe, recipe.export.formats, config, engine_class(config, config.model_type))
    is_default = "seq_len" not in recipe.data.model_fields_set
    seq_len, notes = fit_seq_len(config, recipe.data.seq_len, is_default=is_default)
    by_layer = (offload := resolve_offload(checkpoint, config, recipe, resume=resume)) == "layerwise"

    @cache
    def model() -> PreTrainedModel:
        load = load_skeleton if by_layer else load_model
        return load(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)

    tokenizer = load_tokenizer(checkpoint, recipe.trust_remote_code)
    data_recipe = recipe.data.model_copy(update={"seq_len": seq_len})
    data = load_data(data_recipe, tokenizer, model, MediaReader(checkpoint, config, recipe.trust_remote_code))
    _check_data(data, recipe, needs_whole=by_layer and bool(drafters or data.media))
    check_token_ids(chain.from_iterable(data.samples), tokenizer, model())
    with explain_nonsense(f"this {config.model_type} cannot run as its config says"):
        layers = open_layers(model(), checkpoint, recipe) if by_layer else None
    attention = layers.parts.attention if layers else _map_attention(model(), data)
    attention = attention if layers or drafters else add_draft_layer(attention, model(), checkpoint)
    for drafter, read in zip(drafters, states, strict=True):
        attention = read_by_drafter(attention, model(), drafter, read)
    # an export that must fail should do so before hours of calibration
    make_exports(attention.unit_scales(recipe.strategy, recipe.fp8_dtype), checkpoints[-1], recipe.export)
    reason = None if layers or drafters else reason_against_fp8(model(), attention)
    notes = [*notes, *model_notes(checkpoint, config), *data.warnings, attention.note, reason or ""]
    notes += [] if layers else [_doubt_of_output(model(), attention)]
    device = (layers.device if layers else input_device(model())).type
    size = 1 if data.media else shared_batch_size(data_recipe, device, data.samples, processes)
    resolved = {
        "device": device,
        "dtype": str(model().dtype).removeprefix("torch."),
        "offload": offload,
        "data": data_recipe.model_copy(update={"batch_size": size}),
    }
    data = replace(data, warnings=tuple(filter(None, notes)))
    return Prepared(recipe.model_copy(update=resolved), model(), layers, attention, data)


def _check_data(data: CalibrationData, recipe: Recipe, *, needs_whole: bool) -> None:
    """Refuse data that is too little, and what a model that runs layer by layer does not read."""
    if needs_whole:
        raise InputError(
            "drafters, pictures and sound need the whole model, and this one runs layer by layer; use "
            "--offload none, with enough memory for its weights"
        )
    text = data.summary(recipe.data.skip_first)
    if recipe.headroom == "auto" or recipe.data.until is not None:
        check_enough(text.unrepeated_tokens)
    if not recipe.data.allow_few_tokens:
        text.check()


@torch.inference_mode()
def _doubt_of_output(model: PreTrainedModel, attention: AttentionMap) -> str:
    """Say that the last hidden state or the logits are not finite, as K and V may be; "" if they are."""
    hidden, head, place = attention.last_hidden, model.get_output_embeddings(), "last hidden state"
    if hidden is None:
        return ""
    values = hidden
    if hidden.isfinite().all() and type(head) is nn.Linear and head.in_features == hidden.shape[-1]:
        weight = head.weight  # elsewhere where it is offloaded
        if (weight.device, weight.dtype) == (hidden.device, hidden.dtype):
            values, place = head(hidden), "logits"
    if values.amax().isfinite():
        return ""
    return f"NaN or Inf in the model's {place}: it generates nonsense, whatever its scales; check its weights"


@torch.inference_mode()
def _map_attention(model: PreTrainedModel, data: CalibrationData) -> AttentionMap:
    """Find the model's attention while it reads text, or the first sample with a picture or sound."""
    for piece in data.pieces:
        if piece.media and any(piece.media.counts):
            ids = torch.tensor([piece.ids], device=input_device(model))
            return map_attention(model, {"input_ids": ids, **media_arguments(model, piece.media)})
    return map_attention(model)


def _measure(
    checkpoints: list[ModelDirectory],
    prepared: Prepared,
    output: Path,
    world: World,
    progress: Progress,
    *,
    resume: bool,
) -> tuple[tuple[KVStats, KVStats | None], CalibrationData, list[str]]:
    """Run this process's batches; return statistics of all processes, the data that they read, and notes.

    Statistics of a draft come second.
    """
    recipe, data = prepared.recipe, prepared.data
    size, skip_first, until = int(recipe.data.batch_size), recipe.data.skip_first, recipe.data.until
    batches = data.batches(size, recipe.data)
    world.check_same("data or batches", [data.fingerprint, size])
    own = world.share(batches)
    starts_over = resume and not progress_file(output, world.rank).exists()
    progress.stage("calibrate", sum(batch.num_tokens for batch in own), "tokens")

    def open_share() -> Share:
        inputs = compared_inputs(checkpoints, recipe, data, world)
        saved = SavedProgress(progress_file(output, world.rank), inputs, 60 * recipe.save_minutes)
        reports = progress.advance, progress.skip
        return Share(prepared.model, own, recipe, prepared.attention, saved, *reports)

    def measure_all() -> KVStats:
        if (layers := prepared.layers) is None:
            stats = open_share().read()
            assert stats is not None
            return stats
        limit, scratch = memory_limit(recipe.max_memory), scratch_directory(output)
        return calibrate_layerwise(layers, own, recipe, limit=limit, directory=scratch, progress=progress)

    notes = [] if len(checkpoints) > 1 else _left_alone(prepared.model.config, prepared.attention)
    notes += [NOTHING_SAVED] if starts_over else []
    if until is None:
        stats = world.reduce(world.together(measure_all))
    else:
        stats, stop = read_until(world.together(open_share), batches, world, recipe, data)
        data = data.only(i for batch in batches[: stop.batches] for i in batch.sample_ids)
        notes += [stop.line(stats, sum(batch.num_tokens for batch in batches), until)]
    # counted here, and not where batches run: every process has all data, resumed or not
    stats = replace(stats, text=data.summary(skip_first))
    stats, draft, why = _split_draft(stats, prepared.attention)
    return (stats, draft), data, [data.line, *why, *notes]


def _split_draft(stats: KVStats, attention: AttentionMap) -> tuple[KVStats, KVStats | None, list[str]]:
    """Split statistics into those of the model and of its draft; say why there are none of it."""
    if attention.draft is None or attention.draft.module.name in attention.cached:
        return stats, None, []
    own, name = dict(stats.layers), attention.draft.module.name
    draft, stats = KVStats({name: own.pop(name)}, {}), replace(stats, layers=own)
    if all(tensor.isfinite().all() for tensor in draft.tensors().values()):
        return stats, draft, []
    why = "its K, V or Q hold NaN or Inf; check its weights"
    return stats, None, [f"{name}, which drafts tokens (MTP), is left out and works at scale 1.0: {why}"]


def _left_alone(config: PreTrainedConfig, attention: AttentionMap) -> list[str]:
    """Name the layers that cache no K and V, by the kinds that the config says they are of."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    caching = {module.layer_idx for module in attention.cached.values()}
    caching |= {module.layer_idx for module in attention.shared.values()}
    stateful = {str(i): kind for i, kind in enumerate(kinds) if i not in caching}
    indices = {kind: [i for i in stateful if stateful[i] == kind] for kind in stateful.values()}
    names = "; ".join(f"{kind} ({', '.join(i)})" for kind, i in indices.items())
    line = f"{len(stateful)} of {len(kinds)} layers cache no K and V and are left alone: {names}"
    return [line] if stateful else []
