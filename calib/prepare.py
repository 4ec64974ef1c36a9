"""Everything a calibration needs before its first forward pass, checked."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from transformers import PreTrainedConfig, PreTrainedModel

from calib.capture.attention import AttentionMap, map_attention
from calib.capture.capabilities import check_queries, engine_class, reason_against_fp8
from calib.data import CalibrationData, load_data, shared_batch_size
from calib.errors import InputError
from calib.export import check_latent, check_recipe
from calib.files.fingerprint import baked_for
from calib.files.model_directory import ModelDirectory
from calib.layerwise.loop import LayerwiseModel, open_layers
from calib.layerwise.memory import resolve_offload
from calib.layerwise.weights import load_skeleton
from calib.models.config import caches_latents, explain_nonsense, fit_seq_len, load_config
from calib.models.find import find_model
from calib.models.load import check_token_ids, input_device, load_model, load_tokenizer
from calib.models.quantized.detect import quantization_notes
from calib.output.checkpoint_directory import check_output
from calib.output.finish import Destination, make_exports
from calib.recipe import Recipe
from calib.scales.scales import check_one_scale
from calib.scales.tail import check_enough

# seen in vLLM 0.32's class, which hands on the positions that it is given
_PALIGEMMA = (
    "transformers counts PaliGemma's positions from 1 and lets text look ahead; vLLM does neither: "
    "scales are transformers', and --headroom 1.2 makes room for the difference"
)


@dataclass(frozen=True)
class Prepared:
    """A model and the data it will read."""

    model: PreTrainedModel
    layers: LayerwiseModel | None  # where its weights stay in the checkpoint
    data: CalibrationData
    attention: AttentionMap
    recipe: Recipe  # as resolved


def check_before_loading(model_name: str, recipe: Recipe, destination: Destination) -> ModelDirectory:
    """Find the checkpoint, and refuse what cannot be written before any weight is read."""
    for name in recipe.export.formats:
        check_recipe(name, recipe)
    checkpoint = find_model(model_name)
    if not destination.in_place:
        check_output(destination.path, checkpoint.path, overwrite=destination.overwrite)
    return checkpoint


def prepare(checkpoint: ModelDirectory, recipe: Recipe, processes: int = 1) -> Prepared:
    """Load the data and the model, or its skeleton, and rehearse what will be written.

    With batch size 'auto' each of `processes` gets a batch, if there are samples enough.
    """
    config = load_config(checkpoint, recipe.trust_remote_code)
    _check_scales(config, recipe)
    is_default = "seq_len" not in recipe.data.model_fields_set
    seq_len, notes = fit_seq_len(config, recipe.data.seq_len, is_default=is_default)
    recipe = _with_data(recipe, seq_len=seq_len) if notes else recipe
    notes += _model_notes(checkpoint, config)
    recipe = resolve_offload(checkpoint, config, recipe)
    by_layer = recipe.offload == "layerwise"

    @cache
    def model() -> PreTrainedModel:
        load = load_skeleton if by_layer else load_model
        return load(checkpoint, config, recipe.dtype, recipe.device, recipe.trust_remote_code)

    tokenizer = load_tokenizer(checkpoint, recipe.trust_remote_code)
    data = load_data(recipe.data, tokenizer, model)
    data = replace(data, warnings=(*notes, *data.warnings))
    _check_text(recipe, data)
    check_token_ids(chain.from_iterable(data.samples), tokenizer, model())
    with explain_nonsense(f"this {config.model_type} cannot run as its config says"):
        layers = open_layers(model(), checkpoint, recipe) if by_layer else None
    attention = layers.parts.attention if layers else map_attention(model())
    if attention.note:
        data = replace(data, warnings=(*data.warnings, attention.note))
    _rehearse(attention, checkpoint, recipe)
    if layers is None and (reason := reason_against_fp8(model(), attention)):
        data = replace(data, warnings=(*data.warnings, reason))
    device = (layers.device if layers else input_device(model())).type
    size = shared_batch_size(recipe.data, device, data.samples, processes)
    dtype = str(model().dtype).removeprefix("torch.")
    recipe = _with_data(recipe, batch_size=size)
    recipe = recipe.model_copy(update={"device": device, "dtype": dtype})
    return Prepared(model(), layers, data, attention, recipe)


def _check_scales(config: PreTrainedConfig, recipe: Recipe) -> None:
    """Refuse scales that the model's cache has no place for, or that nothing is known of."""
    if caches_latents(config):
        for name in recipe.export.formats:
            check_latent(name)
        check_one_scale(strategy=recipe.strategy, targets=recipe.targets, center_keys=recipe.center_keys)
    elif recipe.targets == "qkv":
        check_queries(engine_class(config, config.model_type), "--targets qkv")


def _model_notes(checkpoint: ModelDirectory, config: PreTrainedConfig) -> list[str]:
    """Say what the user should know of this model."""
    notes = quantization_notes(checkpoint)
    if purpose := baked_for(checkpoint.path):
        notes.append(f"this model is baked for {purpose} (fp8kv bake)")
    if config.model_type == "paligemma":
        notes.append(_PALIGEMMA)
    return notes


def _check_text(recipe: Recipe, data: CalibrationData) -> None:
    """Refuse what the largest values of so few tokens, or of a pass layer by layer, cannot tell."""
    if recipe.data.until is not None and recipe.offload == "layerwise":
        raise InputError(
            "--until: a pass layer by layer reads all text with one layer before the next, so it "
            "cannot stop early; leave --until away, or use --offload none"
        )
    if recipe.headroom == "auto" or recipe.data.until is not None:
        check_enough(sum(max(0, len(each) - recipe.data.skip_first) for each in data.samples))
    if not recipe.data.allow_few_tokens:
        data.summary(recipe.data.skip_first).check()


def _with_data(recipe: Recipe, **changes: int) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})


def _rehearse(attention: AttentionMap, checkpoint: ModelDirectory, recipe: Recipe) -> None:
    # an export that must fail should do so before hours of calibration
    make_exports(attention.unit_scales(recipe.strategy, recipe.fp8_dtype), checkpoint, recipe)
