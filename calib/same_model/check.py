"""One answer to "are these scales of this model?": all facts that both sides know must agree.

Imported without torch, which only marks of weights need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calib.errors import Fp8kvError, InputError
from calib.files.calibration import read_report
from calib.files.config import Config, text_config
from calib.files.fingerprint import fingerprint, read_bake
from calib.files.model_directory import ModelDirectory, open_model_directory
from calib.files.names import CALIBRATION_FILE, CONFIG_FILE, JSON_FILE, PACK_FILE, WATCH_FILE
from calib.files.strict_json import read_object

if TYPE_CHECKING:
    from calib.same_model.marks import Marks
    from calib.scales.stats import KVStats

# sizes of the language model, in which configs of one type differ between models
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "n_embd", "n_head")

# what is known of a layer, in words for messages -> the values that fit: "K heads" -> {2}
LayerFacts = Mapping[str, Set[object]]


@dataclass(frozen=True)
class ModelFacts:
    """A model, as its files or scales that were measured on it describe it; None: not known."""

    name: str  # in messages
    config: Config = field(default_factory=dict)  # config.json, or a part of it
    settings: Any = None  # of the config, which decide how K and V are made
    fingerprints: Mapping[str, str] | None = None
    baked_for: str | None = None  # fp8 or int8
    baked_as: Set[str] = frozenset()  # fingerprints of the baked model
    num_layers: int | None = None  # of any kind
    layers: Mapping[int, LayerFacts] | None = None  # that cache K and V
    shared_layers: Set[int] = frozenset()  # that read another layer's cache, and may have scales
    marks: Callable[[], Marks] | None = None  # reading weights takes a while


def check_same_model(scales: ModelFacts, model: ModelFacts, advice: str = "calibrate that model") -> None:
    """Refuse scales of another model; facts that one side does not know are not compared."""
    for compare, refusal in FACTS.items():
        if difference := compare(scales, model):
            weights = "the weights beside them" if scales.name == model.name else f"'{model.name}'"
            names = {"scales": scales.name, "model": model.name, "weights": weights}
            sentence = refusal.format(difference=difference, **names)
            raise InputError(f"{sentence}; {advice}")


def scales_facts(
    path: Path, stats: KVStats | None = None, report: dict[str, Any] | None = None
) -> ModelFacts:
    """Read what the directory of scales or statistics at `path`, or its `report`, says of their model."""
    directory = path if path.is_dir() else path.parent
    if report is None:
        report = read_report(directory) if (directory / CALIBRATION_FILE).exists() else {}
    model, saved = report.get("measured_on") or report, report.get("marks")
    document = saved if isinstance(saved, dict) else {}

    def read_marks() -> Marks:
        from calib.same_model.marks import Marks

        return Marks.from_json(saved, f"'{directory / CALIBRATION_FILE}'")

    return ModelFacts(
        str(path),
        known_config(directory),
        document.get("settings"),
        {key: model[key] for key in ("checkpoint", "weights") if key in model},
        num_layers=document.get("layers"),
        layers=None if stats is None else statistics_layers(stats),
        marks=None if saved is None else read_marks,
    )


def model_facts(checkpoint: ModelDirectory, modules: Iterable[str] | None = None) -> ModelFacts:
    """Collect what `checkpoint` says; with its attention `modules` also the marks of its weights."""
    path, bake = checkpoint.path, read_bake(checkpoint)
    facts = ModelFacts(checkpoint.name or str(path), checkpoint.config, num_layers=checkpoint.num_layers)
    if bake:
        names = {fingerprint(checkpoint)}
        if (path / CALIBRATION_FILE).exists():  # scales may be of the directory that it was copied from
            names.add(read_report(path)["checkpoint"])
        # the calibration there may be of the model before it was baked, whose scales do not fit
        names -= {str(bake.get("source"))}
        facts = replace(facts, baked_for=str(bake["for"]), baked_as=names)
    if modules is None:
        return facts
    from calib.same_model.marks import settings_of, take_marks

    settings = settings_of(path, checkpoint.config)
    return replace(facts, settings=settings, marks=cache(partial(take_marks, checkpoint, modules)))


def check_weights(directory: Path, checkpoint: ModelDirectory) -> None:
    """Refuse a calibration in `directory` of other weights than those of `checkpoint`."""
    from calib.scales.stats_file import load_stats  # with torch

    if (directory / CALIBRATION_FILE).exists():
        check_same_model(scales_facts(directory), model_facts(checkpoint, load_stats(directory).layers))


def open_with_weights(path: Path) -> ModelDirectory | None:
    """Open a model directory; None where its weights are missing or cannot be read."""
    with suppress(Fp8kvError, OSError):
        return open_model_directory(path, needs_scales=False)
    return None


def weight_warnings(directories: Iterable[Path], checkpoint: ModelDirectory) -> list[str]:
    """Say which calibrations in `directories` are of other weights than those of `checkpoint`."""
    warnings = []
    for directory in directories:
        try:
            check_weights(directory, checkpoint)
        except InputError as error:
            warnings.append(str(error))
    return warnings


def directory_facts(
    path: Path, checkpoint: ModelDirectory | None = None, modules: Iterable[str] = ()
) -> ModelFacts:
    """Read what a directory says of its model; without `checkpoint`, by its calibration's marks."""
    from calib.same_model.marks import settings_of

    own_marks = scales_facts(path).marks
    if checkpoint:
        facts = model_facts(checkpoint, modules)
        with suppress(Fp8kvError):
            if facts.marks and facts.marks():
                return facts
        return replace(facts, marks=own_marks)  # weights that cannot be compared
    config = known_config(path)
    settings = settings_of(path, dict(config)) if (path / CONFIG_FILE).exists() else None
    return ModelFacts(str(path), config, settings, marks=own_marks)


def statistics_layers(stats: KVStats) -> dict[int, LayerFacts]:
    """Collect the shapes of K, V and Q that were measured, by layer."""
    return {
        layer.layer_idx: {
            "the name": {name},
            "a cache of": {"latents" if layer.latent else "K and V"},
            **{f"{letter.upper()} heads": {len(getattr(layer, letter).amax)} for letter in "kvq"},
            **{f"{letter.upper()} channels": {getattr(layer, letter).amax.numel()} for letter in "kv"},
        }
        for name, layer in stats.layers.items()
    }


def known_config(directory: Path) -> Config:
    """Return the config.json of a directory, or the part of it that its scales' own files repeat."""
    is_pack = (directory / PACK_FILE).exists()  # whose manifest names no config.json
    if (directory / CONFIG_FILE).is_file() and not is_pack:
        return read_object(directory / CONFIG_FILE)
    if (directory / CALIBRATION_FILE).is_file():
        config = read_object(directory / CALIBRATION_FILE).get("config")
        return config if isinstance(config, dict) else {}
    if (directory / JSON_FILE).is_file():
        return {"model_type": read_object(directory / JSON_FILE).get("model_type")}
    if (directory / WATCH_FILE).is_file():  # of the model that was served, if it is here
        served = Path(str(read_object(directory / WATCH_FILE).get("model")))
        with suppress(OSError, ValueError):  # not here, damaged, or not a path
            return read_object(served / CONFIG_FILE) if served.is_absolute() else {}
    return {}


def config_summary(config: Config) -> dict[str, Any]:
    """Return the part of a config that tells models apart, for a calibration to keep."""
    summary = {key: config[key] for key in ("architectures", "model_type", *_SIZES) if key in config}
    text = config.get("text_config")
    return summary | ({"text_config": config_summary(text)} if isinstance(text, dict) else {})


def config_difference(one: Config, two: Config) -> tuple[str, str] | None:
    """Return the first value of each config by which they are of different models."""
    types, second_types = _model_types(one), _model_types(two)
    are_nested = len(types) == len(second_types) == 2
    # an image model's language model is served alone, too
    is_same = types[-1:] == second_types[-1:] if are_nested else {*types} & {*second_types}
    if types and second_types and not is_same:
        return f"model_type {types[-1]}", second_types[-1]
    names, second_names = one.get("architectures"), two.get("architectures")
    if not (types and second_types) and names and second_names and names != second_names:
        return f"architectures {str(names)[:80]}", str(second_names)[:80]
    for key in _SIZES:
        size, second_size = text_config(one).get(key), text_config(two).get(key)
        if type(size) is type(second_size) is int and size != second_size:
            return f"{key} {size}", str(second_size)
    return None


def _model_types(config: Config) -> list[str]:
    """Return the model's type and, where it has more parts, its language model's."""
    configs = [config] if config is text_config(config) else [config, text_config(config)]
    return [name[:80] for name in (each.get("model_type") for each in configs) if isinstance(name, str)]


def _compare_baking(scales: ModelFacts, model: ModelFacts) -> str | None:
    if scales.marks and model.marks:  # weights tell more: a copy in another format has another fingerprint
        return model.baked_for if model.baked_for and compare_weights(scales, model) else None
    measured = (scales.fingerprints or {}).get("checkpoint")
    return model.baked_for if measured and measured not in model.baked_as else None


def _compare_configs(scales: ModelFacts, model: ModelFacts) -> str | None:
    values = config_difference(scales.config, model.config)
    return values and f"its config says {values[0]}, that of '{model.name}' {values[1]}"


def _compare_settings(scales: ModelFacts, model: ModelFacts) -> str | None:
    values = settings_difference(scales, model)
    return values and f"its config says {values[0]}, that of '{model.name}' {values[1]}"


def settings_difference(a: ModelFacts, b: ModelFacts) -> tuple[str, str] | None:
    """Return the first value of each by which K and V of equal weights differ, such as a base of RoPE."""
    one, two = a.settings, b.settings
    if not (isinstance(one, dict) and isinstance(two, dict)):
        return None
    key = next((key for key in sorted(one.keys() & two.keys()) if one[key] != two[key]), None)
    return key and (f"{key} {one[key]!s:.200}", f"{two[key]!s:.200}")


def _compare_layers(scales: ModelFacts, model: ModelFacts) -> str | None:
    count, model_count = scales.num_layers, model.num_layers
    if type(count) is type(model_count) is int and count != model_count:
        return f"it has {count} layers, and '{model.name}' {model_count} layers"
    if not scales.layers:
        return None
    if model.layers is None:
        last = max(scales.layers)
        is_beyond = model_count is not None and last >= model_count
        return f"it has a layer {last}, and '{model.name}' {model_count} layers" if is_beyond else None
    where = f"'{model.name}' caches K and V in {len(model.layers)} layers"
    if unknown := sorted(scales.layers.keys() - model.layers.keys() - model.shared_layers):
        return f"it has a layer {unknown[0]}, and {where}"
    if missing := sorted(model.layers.keys() - scales.layers.keys()):
        return f"it lacks layers {', '.join(map(str, missing))}, and {where}"
    for index, layer in sorted(model.layers.items()):
        for fact, values in scales.layers[index].items():
            if values.isdisjoint(layer.get(fact, values)):
                return f"layer {index} has {fact} {_show(values)}, and {_show(layer[fact])} in '{model.name}'"
    return None


def _show(values: Set[object]) -> str:
    return " or ".join(sorted(map(str, values)))


def _compare_fingerprints(scales: ModelFacts, model: ModelFacts) -> str | None:
    one, two = scales.fingerprints or {}, model.fingerprints or {}
    return next((key for key in one.keys() & two.keys() if one[key] != two[key]), None)


def compare_weights(scales: ModelFacts, model: ModelFacts) -> str | None:
    """Say by which weight K and V of the two are not the same, where marks of both are known."""
    if scales.marks is None or model.marks is None:
        return None
    from calib.same_model.mark_comparison import OtherWeightsError, compare_marks

    try:
        compare_marks(scales.marks(), model.marks())
    except OtherWeightsError as error:
        return str(error)
    return None


_NOT_BAKED = "'{model}' is baked for {difference}, and the scales in '{scales}' were not measured on it"
_OTHER_MODEL = "'{scales}' is of another model: {difference}"
# what scales and a model must agree on: what says the difference in words -> the refusal
FACTS = {
    _compare_baking: _NOT_BAKED,
    _compare_configs: _OTHER_MODEL,
    _compare_layers: _OTHER_MODEL,
    _compare_fingerprints: "'{scales}' is of another model or revision than '{model}'",
    _compare_settings: _OTHER_MODEL,
    compare_weights: "the scales of '{scales}' do not fit {weights}: {difference}",
}
