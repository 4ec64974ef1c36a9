"""Loading of a directory as an engine does it, simulated without the engine: `simulate`."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from calib.engines.catalogue import Engine, Method
from calib.engines.model_classes import K_ALONE, TRANSFORMERS, Fates, architecture, find_fate, split_name
from calib.engines.outcome import (
    LayerScale,
    NotKnown,
    Outcome,
    Place,
    Refused,
    Simulation,
    SimulationEnd,
    heads_of,
    layer_scales,
)
from calib.engines.quantization_config import choose_method, excluded_by, method_name, turns_fp8_on
from calib.files.cache_type import Convention, asks_for_heads, is_for_nvfp4, nvfp4_convention
from calib.files.config import LAYER_KEYS, can_be_split, text_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import INDEX_FILE, JSON_FILE, STATS_FILE, layer_of, way_back
from calib.files.scale_files import ScalesJson, ScaleTensor

Key = tuple[str, str]  # attention module, and the letters that a scale is of
ONE_GPU = Place()
_COUNTS = (*LAYER_KEYS, "num_attention_heads", "num_key_value_heads")
_CLASS_REASONS = {
    Outcome.DROPPED: "the model's class drops it",
    Outcome.NO_PLACE: "the attention layers of the model's class have no place for scales",
    Outcome.PARTLY: "the model's class does not load all",
}


def simulate(
    directory: ModelDirectory,
    engine: Engine,
    place: Place = ONE_GPU,
    nvfp4: Convention | None = None,
    *,
    at_one: bool = False,
) -> Simulation:
    """Load `directory` as the engine would in `place`; `nvfp4`: what its values follow, if known.

    By default that is what its files say. `at_one`: it has no scales, but latents (MLA) that were
    baked, and is simulated with the flags with which the engine caches these.
    """
    simulation = Simulation(engine, asks_for_heads=asks_for_heads(directory))
    try:
        _check_model(directory, engine)
        if place.ranks > 1:
            _check_split(directory, place)
        if engine.reads == "json":
            _load_json(directory, place, simulation)
        else:
            _load_tensors(directory, place, simulation)
        if at_one:
            simulation.flag = _flags_at_one(engine, directory.config)
        if simulation.is_good:
            simulation.problem = _latents_problem(simulation, directory.config)
        if simulation.is_good and (nvfp4 := nvfp4 or nvfp4_convention(directory)):
            simulation.problem = _convention_problem(nvfp4, engine)
    except Refused as error:
        simulation.refused, simulation.outcomes = str(error), []
    except SimulationEnd as error:
        # scales may lie apart from the weights, which show the attention modules
        modules = directory.modules or {tensor.parsed.module for tensor in directory.tensors}
        modules = modules or {f"layer {i}" for i in (directory.json.layer_scales if directory.json else ())}
        has_q = any(tensor.parsed.letters == "q" for tensor in directory.tensors)
        layers = product(sorted(modules, key=_layer_order), "kvq" if has_q else "kv")
        simulation.outcomes = [LayerScale(m, x, error.outcome, (), str(error)) for m, x in layers]
    return simulation


def _check_model(directory: ModelDirectory, engine: Engine) -> None:
    """Raise what becomes of a directory whose config is not a model's, or not that of its weights."""
    if not directory.has_config:
        return
    if field := _wrong_field(directory):
        raise Refused(field) if engine.ran else NotKnown(f"not known: {field}")
    count = directory.num_layers
    layers = {layer for layer in directory.layers if not directory.predicts_extra_tokens(layer)}
    if not layers or count is None:
        return
    if len(layers) < count:
        raise NotKnown(f"not known: config.json says {count} layers, and there are weights of {len(layers)}")
    if max(layers) >= count:
        text = f"config.json says {count} layers, and there are weights of layer {max(layers)}"
        raise Refused(text) if engine.unknown == "refused" else NotKnown(f"not known: {text}")


def _wrong_field(directory: ModelDirectory) -> str | None:
    """Say which field of the config keeps every engine from starting."""
    model_type = directory.config.get("model_type")
    if not (isinstance(model_type, str) and model_type):
        return "config.json has no model_type"
    config = directory.text_config
    key = next((key for key in _COUNTS if key in config and not _is_count(config[key], key)), None)
    return key and f"config.json says {key} {str(config[key])[:40]}"


def _is_count(value: Any, key: str) -> bool:
    if value is None:
        return key != "num_hidden_layers"  # any other number has another name too, or follows
    if isinstance(value, list):
        return key not in LAYER_KEYS  # heads may differ from layer to layer
    return type(value) is int and value >= 1


def _check_split(directory: ModelDirectory, place: Place) -> None:
    layers = range(1 if directory.num_layers is None else directory.num_layers)
    for heads, kv_heads in {heads_of(directory, layer) for layer in layers}:
        if not can_be_split(heads, kv_heads, place.ranks):
            counts = f"the model's {heads} query heads and {kv_heads} KV heads"
            raise Refused(f"{counts} cannot be split evenly over {place.ranks} GPUs")


def _load_tensors(directory: ModelDirectory, place: Place, simulation: Simulation) -> None:
    engine = simulation.engine
    if engine.reads == "index" and (missing := directory.missing):
        advice = way_back(missing[0], is_missing=True)
        raise Refused(f"the index names {missing[0]}, which is missing; {advice}")
    nvfp4 = is_for_nvfp4(directory)
    simulation.flag = engine.nvfp4.flag if nvfp4 and engine.nvfp4 else engine.flag
    method = choose_method(directory, engine)
    if not (nvfp4 or engine.is_drafter(directory.config)) and method and turns_fp8_on(directory, method):
        simulation.flag = None
    modules, fates = sorted(directory.modules, key=_layer_order), None
    if directory.tensors and not (method and method.kind == "none"):  # else the model's class does not matter
        fates = engine.fates(directory.config, _config_kind(directory, method), modules)
    if isinstance(fates, str):
        raise NotKnown(fates)
    if fates and (backend := _transformers_fates(directory, engine, fates)):
        fates = backend
        simulation.flag = " ".join(filter(None, [engine.transformers_flag, simulation.flag]))
    tensors = _loaded_tensors(directory, method, fates, simulation)
    _set_draft_fate(directory, method, simulation)
    for module in modules:
        simulation.outcomes += layer_scales(directory, module, tensors, method, place)
    if place.fnuz and method and not method.doubles_fnuz and simulation.is_good:
        simulation.problem = (
            "the engine does not double scales for an FP8 type that ends at 240, and files hold "
            "them for 448: K and V are clipped at 0.54 of absmax; export --format modelopt"
        )


def _config_kind(directory: ModelDirectory, method: Method | None) -> str:
    """Return the kind of quantization config, as tables of classes call it."""
    kind = "" if method is None else method_name(directory)
    return f"{kind} attn_head" if asks_for_heads(directory) else kind


def _set_draft_fate(directory: ModelDirectory, method: Method | None, simulation: Simulation) -> None:
    """Say whether the class of a layer that drafts tokens (MTP) loads its scales, where it has some."""
    engine, config, modules = simulation.engine, directory.config, directory.draft_modules
    names = {split_name(tensor, modules)[1]: tensor.name for tensor in directory.draft_tensors}
    loaded = engine.draft_names(config, _config_kind(directory, method))
    if crashing := names.keys() & engine.draft_crashes.get(architecture(config) or "", ()):
        reason = f"its class of the layer that drafts tokens (MTP) fails at '{names[min(crashing)]}'"
        simulation.problem = f"with speculative decoding it does not start: {reason}; calibrate again"
    elif unknown := names.keys() - {*loaded}:
        layer = f"'{names[min(unknown)]}', of a layer that drafts tokens (MTP)"
        simulation.draft = f"{layer}, is not known to load: it works at 1.0"
    elif names:
        simulation.draft = "the layer that drafts tokens (MTP) loads its scales"


def _loaded_tensors(
    directory: ModelDirectory, method: Method | None, fates: Fates | None, simulation: Simulation
) -> dict[Key, ScaleTensor]:
    """Return the tensors that reach attention layers, and note the others in `simulation.ignored`."""
    engine, tensors = simulation.engine, directory.tensors
    is_exception = architecture(directory.config) in engine.unknown_exceptions
    if (engine.unknown == "refused") != is_exception:
        if directory.misnamed:
            raise Refused(f"'{directory.misnamed[0]}' is a name that the model does not have")
        if not is_exception and directory.index is None and (directory.path / STATS_FILE).is_file():
            raise Refused(f"without {INDEX_FILE} it takes {STATS_FILE} for weights; move that file elsewhere")
    simulation.ignored += [(name, f"'{name}' is not the name of a scale") for name in directory.misnamed]
    if directory.json and not tensors:
        reason = f"no tensor holds scales, only {JSON_FILE}, so it computes with 1.0"
        simulation.ignored.append((JSON_FILE, reason))
    if engine.reads == "index":
        reason = "{} is not in the index, so it is not read"
        simulation.ignored += [(tensor.name, reason.format(tensor.file)) for tensor in directory.unlisted]
    else:
        tensors = sorted(tensors + directory.unlisted, key=lambda tensor: tensor.file)
    names = [split_name(tensor, directory.modules) for tensor in tensors]
    siblings = defaultdict[str | None, set[str]](set)
    for module, name in names:
        siblings[module].add(name)
    loaded = dict[Key, ScaleTensor]()
    for tensor, (module, name) in zip(tensors, names, strict=True):
        fate = None
        if fates is not None and tensor.parsed.letters != "q":
            fate = find_fate(fates, name, siblings[module])
        destination = _destination(directory, tensor, module, method, fate, simulation)
        if isinstance(destination, str):
            simulation.ignored.append((tensor.name, destination))
        else:
            loaded[destination] = tensor
    return loaded


def _destination(
    directory: ModelDirectory,
    tensor: ScaleTensor,
    module: str | None,
    method: Method | None,
    fate: str | None,
    simulation: Simulation,
) -> Key | str:
    """Return where a scale goes, or why it is ignored: by its class's `fate`, else by its name."""
    engine = simulation.engine
    if method is None:
        if engine.without_config == "refused":
            raise Refused(
                f"config.json has no quantization_config, so '{tensor.name}' is a name the model does "
                "not have; export the scales in a format with a config"
            )
        return "config.json has no quantization_config, so no layer has a place for it"
    if method.kind == "none":
        return method.why
    if method.exclude_drops and module and (entry := excluded_by(directory.quantization or {}, module)):
        return f"exclude has '{entry[:60]}', so that attention has no place for scales"
    if module and fate:
        word, _, reason = fate.partition(": ")
        outcome = Outcome(word)
        if outcome is Outcome.UNKNOWN:
            raise NotKnown(f"not known: the model's class was never run with '{tensor.name}'")
        simulation.fates.add(outcome)
        if outcome is Outcome.LOADED or reason == K_ALONE:
            return module, tensor.parsed.letters[0]
        if outcome in (Outcome.CRASH, Outcome.REFUSED):
            raise Refused(f"the model's class does not start with '{tensor.name}': {reason}")
        return ": ".join(filter(None, [_CLASS_REASONS[outcome], reason]))
    target, _, parameter = engine.target(tensor.name, method).rpartition(".attn.")
    if target in directory.modules and parameter.endswith("_scale"):
        return target, parameter.removesuffix("_scale")
    if engine.unknown == "refused":
        raise Refused(
            f"'{tensor.name}' is a name that the model does not have; its attention modules "
            f"are called '{min(directory.modules, key=_layer_order, default='?')}' and so on"
        )
    return "it is not a name that the engine looks for"


def _convention_problem(nvfp4: Convention, engine: Engine) -> str | None:
    """Say what is wrong with the values for an NVFP4 cache that the engine loads."""
    target = engine.nvfp4
    if target is None or nvfp4.divisor == target.divisor:
        return None
    if nvfp4.divisor is None:
        return f"it wants absmax / {target.divisor}, and whether these are that is {nvfp4.evidence}"
    size = "small" if nvfp4.divisor > target.divisor else "large"
    return (
        f"it wants absmax / {target.divisor}, and these are absmax / {nvfp4.divisor}, 6 times too "
        f"{size}: {target.mismatch}; fp8kv convert --to {target.format}"
    )


def _layer_order(module: str) -> tuple[int, str]:
    return layer_of(module) or 0, module


def _load_json(directory: ModelDirectory, place: Place, simulation: Simulation) -> None:
    """Load as vLLM 0.4: after one mistake every scale is 1.0."""
    config, scales = directory.config, directory.json
    simulation.flag = simulation.engine.flag
    if isinstance(reason := simulation.engine.fates(config, ""), str):
        raise NotKnown(reason)
    layers = directory.num_layers or 0
    count = layers if layers < 100_000 else 0
    count = count or len(next(iter(scales.ranks.values()), {}) if scales else {})
    tensors = directory.tensors + directory.unlisted
    simulation.ignored += [(tensor.name, f"only {JSON_FILE} is read") for tensor in tensors]
    mistake = scales and _json_mistake(scales, config, count, place.ranks)
    simulation.ignored += [(JSON_FILE, mistake)] if mistake else []
    for layer, letter in product(range(count), "kv"):
        scale = LayerScale(f"layer {layer}", letter)
        if scales and not mistake:
            values = tuple(scales.ranks[rank][layer] for rank in range(place.ranks))
            scale = replace(scale, status=Outcome.LOADED, values=values, reason="")
        simulation.outcomes.append(scale)


def _json_mistake(scales: ScalesJson, config: dict[str, Any], layers: int, ranks: int) -> str | None:
    """Say why the loader throws the file away: it then logs, and serves on with 1.0."""
    model_type = config.get("model_type")
    if "model_type" not in scales.model_fields_set:
        return "it has no model_type, so all of it is thrown away"
    if model_type is not None and scales.model_type != model_type:
        return f"its model_type is {str(scales.model_type)[:80]!r}, the model's {model_type!r}: thrown away"
    if scales.dtype != "float8_e4m3fn":
        return f"its dtype is {scales.dtype!r}; only 'float8_e4m3fn' is read"
    if set(scales.ranks) != {*range(ranks)}:
        return f"it is for {len(scales.ranks)} ranks, not for {ranks}: thrown away"
    wrong = {layer for rank in scales.ranks.values() for layer in set(range(layers)) ^ set(rank)}
    return f"layer {min(wrong)} is missing or too many; every layer must be listed" if wrong else None


def _transformers_fates(directory: ModelDirectory, engine: Engine, fates: Fates) -> Fates | None:
    """Return the fates in the engine's backend for transformers' code, where it alone loads all scales."""
    backend_fates = engine.fates(directory.config, method_name(directory) + TRANSFORMERS)
    if not engine.class_caches_latents(directory.config) or isinstance(backend_fates, str | None):
        return None
    names = {split_name(tensor, directory.modules)[1] for tensor in directory.tensors}
    own, backend = ({table.get(name) for name in names} for table in (fates, backend_fates))
    return backend_fates if backend == {"loaded"} != own else None


def _latents_problem(simulation: Simulation, config: Mapping[str, Any]) -> str | None:
    """Say what is wrong with loaded scales of latents; 1.0 does no harm."""
    engine = simulation.engine
    is_harmless = all(value == 1.0 for scale in simulation.outcomes for value in scale.values)
    if is_harmless or not (engine.latent_spoils and engine.class_caches_latents(config)):
        return None
    return f"{engine.latent}; fp8kv strip removes them, fp8kv bake makes 1.0 right"


def _flags_at_one(engine: Engine, config: Mapping[str, Any]) -> str:
    """Return the flags with which the engine keeps a model's latents in FP8 at scale 1.0.

    Raises:
        Refused: it has no such cache.
        NotKnown: or whether it has is not known, as it may cache K and V of heads.
    """
    if engine.latent_refused:
        raise Refused(engine.latent_refused)
    name, model_type = architecture(config), text_config(config).get("model_type")
    if name in engine.latent_classes_at_one:
        return engine.flag
    if engine.classes and engine.is_run_version:
        ways = (way for way in engine.caches.types.get("fp8", ()) if "heads" not in way.attention)
        if engine.class_caches_latents(config) or any(model_type in (way.models or ()) for way in ways):
            return engine.flag
        if any(kind.endswith(TRANSFORMERS) for kind in engine.classes.results.get(name or "", {})):
            return f"{engine.transformers_flag} {engine.flag}"
    subject = str(name or model_type)[:80]
    raise NotKnown(f"whether it caches latents (MLA) of {subject}, as 1.0 needs, is not known")


def find_flags_at_one(engine: Engine, config: Mapping[str, Any]) -> str | None:
    """Return the flags that keep latents in FP8 at scale 1.0; None where there are none, or none known."""
    try:
        return _flags_at_one(engine, config)
    except SimulationEnd:
        return None
