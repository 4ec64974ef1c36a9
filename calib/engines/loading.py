"""What an engine's loader would do with a directory, without the engine."""

from collections import defaultdict
from collections.abc import Collection

from calib.engines.catalogue import Engine, Method
from calib.engines.classes import K_ALONE, TRANSFORMERS, Fates, fate_of, naming, owner
from calib.engines.latents import flags_at_one
from calib.engines.model import check_model
from calib.engines.outcome import NotKnown, Outcome, Place, Refused, Simulation, default
from calib.engines.quantization_config import choose_method, excluded_by, method_name, turns_fp8_on
from calib.engines.values import heads_of, one_or_per_head, pair, scalar, simulate_json
from calib.files.cache_type import Convention, is_for_nvfp4, nvfp4_convention
from calib.files.config import can_be_split
from calib.files.model_directory import ModelDirectory
from calib.files.names import layer_of
from calib.files.scale_files import ScaleTensor

Params = dict[tuple[str, str], ScaleTensor]  # (attention module, letter) -> what reaches it
Reached = tuple[str, str] | str  # the key of Params, or why it reaches none

# what the model's class does with a scale that no layer computes with
_FATES = {
    "dropped": "the model's class drops it",
    "no place": "the attention layers of the model's class have no place for scales",
    "partly": "the model's class does not load all: ",
}
ONE_GPU = Place()


def simulate(
    directory: ModelDirectory,
    rules: Engine,
    place: Place = ONE_GPU,
    nvfp4: Convention | None = None,
    *,
    at_one: bool = False,
) -> Simulation:
    """Load `directory` as the engine would in `place`; `nvfp4`: what its values follow, if known.

    By default that is what its files say. `at_one`: it has no scales, but latents (MLA) that were
    baked, and is simulated with the flags with which the engine caches these.
    """
    found = Simulation(rules)
    try:
        _load(directory, place, found)
        if at_one:
            found.flag = flags_at_one(rules, directory.config)
        if found.is_good:
            found.problem = _of_latents(directory, found)
        if found.is_good and (nvfp4 := nvfp4 or nvfp4_convention(directory)):
            found.problem = _of_other_convention(nvfp4, rules)
    except Refused as error:
        found.refused, found.outcomes = str(error), []
    except NotKnown as error:
        # scales may lie apart from the weights, which show the attention modules
        modules = directory.modules or {tensor.parsed.module for tensor in directory.tensors}
        ordered = sorted(modules, key=_by_layer)
        found.outcomes = [Outcome(m, x, "unknown", (), str(error)) for m in ordered for x in "kv"]
    return found


def _load(directory: ModelDirectory, place: Place, found: Simulation) -> None:
    rules = found.engine
    check_model(directory, rules)
    if place.ranks > 1:
        _check_split(directory, place)
    if rules.reads == "json":
        _known(rules.fates(directory.config, ""))
        simulate_json(directory, place, found)
        return
    if rules.reads == "index" and (missing := directory.missing):
        raise Refused(f"the index names {missing[0]}, which is not there; write the index again")
    nvfp4 = is_for_nvfp4(directory)
    found.flag = rules.nvfp4.flag if nvfp4 and rules.nvfp4 else rules.flag
    method = choose_method(directory, rules)
    if not nvfp4 and method and turns_fp8_on(directory, method):
        found.flag = None
    fates = _fates(directory, rules, method)
    if fates and (other := _of_other_backend(directory, rules, fates)):
        fates, found.flag = other, " ".join(filter(None, [rules.transformers_flag, found.flag]))
    params = _params(directory, method, fates, found)
    for module in sorted(directory.modules, key=_by_layer):
        found.outcomes += _outcomes(directory, module, params, method, place)
    if place.fnuz and method and not method.doubles_fnuz and found.is_good:
        found.problem = (
            "the engine does not double scales for an FP8 type that ends at 240, and files hold "
            "them for 448: K and V are clipped at 0.54 of absmax; export --format modelopt"
        )


def _of_latents(directory: ModelDirectory, found: Simulation) -> str | None:
    """What is wrong with loaded scales of latents (MLA); 1.0 does no harm."""
    rules = found.engine
    needless = all(value == 1.0 for outcome in found.outcomes for value in outcome.values)
    if needless or not (rules.latent_spoils and rules.class_caches_latents(directory.config)):
        return None
    return f"{rules.latent}; fp8kv strip removes them, fp8kv bake makes 1.0 right"


def _of_other_convention(nvfp4: Convention, rules: Engine) -> str | None:
    """What is wrong with the values for an NVFP4 cache that the engine loads."""
    wants = rules.nvfp4
    if wants is None or nvfp4.divisor == wants.divisor:
        return None
    if nvfp4.divisor is None:
        return f"it wants absmax / {wants.divisor}, and whether these are that is {nvfp4.because}"
    size = "small" if nvfp4.divisor > wants.divisor else "large"
    return (
        f"it wants absmax / {wants.divisor}, and these are absmax / {nvfp4.divisor}, 6 times too "
        f"{size}: {wants.other}; fp8kv convert --to {wants.format}"
    )


def _check_split(directory: ModelDirectory, place: Place) -> None:
    layers = range(1 if directory.num_layers is None else directory.num_layers)
    for heads, kv_heads in {heads_of(directory, layer) for layer in layers}:
        if not can_be_split(heads, kv_heads, place.ranks):
            raise Refused(
                f"the model's {heads} query heads and {kv_heads} KV heads cannot be split evenly "
                f"over {place.ranks} GPUs"
            )


def _fates(directory: ModelDirectory, rules: Engine, method: Method | None) -> Fates | None:
    """What the model's class does with each name; None where the class does not matter."""
    if (method and method.kind == "none") or not directory.tensors:
        return None
    kind = "" if method is None else method_name(directory)
    scheme = (directory.quantization or {}).get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head":
        kind += " attn_head"
    modules = sorted(directory.modules, key=_by_layer)
    return _known(rules.fates(directory.config, kind, modules))


def _of_other_backend(directory: ModelDirectory, rules: Engine, fates: Fates) -> Fates | None:
    """The fates in the engine's backend for transformers' code, where it alone loads latents'."""
    config = directory.config
    others = rules.fates(config, method_name(directory) + TRANSFORMERS)
    if not rules.class_caches_latents(config) or isinstance(others, str | None):
        return None
    owners = {t.name: owner(t.parsed, directory.modules) or "" for t in directory.tensors}
    names = {naming(t.name, t.parsed, owners[t.name]) for t in directory.tensors}
    own, other = ({each.get(name) for name in names} for each in (fates, others))
    return others if other == {"loaded"} != own else None


def _known(fates: Fates | str | None) -> Fates | None:
    if isinstance(fates, str):
        raise NotKnown(fates)
    return fates


def _params(
    directory: ModelDirectory, method: Method | None, fates: Fates | None, found: Simulation
) -> Params:
    params, names = Params(), defaultdict[str | None, set[str]](set)
    _check_misnamed(directory, found)
    if found.engine.reads == "index":
        found.ignored += [
            (each.name, f"{each.file} is not in the index, so it is not read") for each in directory.unlisted
        ]
    for tensor in _tensors(directory, found):
        module = owner(tensor.parsed, directory.modules)
        names[module].add(naming(tensor.name, tensor.parsed, module or ""))
    for tensor in _tensors(directory, found):
        module = owner(tensor.parsed, directory.modules)
        excluded = method and method.exclude_drops and module and _excluded(directory, module)
        if excluded:
            reached: Reached = excluded
        elif fates is None or method is None or module is None or tensor.parsed.letters == "q":
            reached = _by_name(directory, tensor, method, found.engine)
        else:
            reached = _by_class(tensor, module, fates, names[module], found)
        if isinstance(reached, str):
            found.ignored.append((tensor.name, reached))
        else:
            params[reached] = tensor
    return params


def _tensors(directory: ModelDirectory, found: Simulation) -> list[ScaleTensor]:
    """The scales of the files that the engine reads, in the order of the files."""
    if found.engine.reads == "index":
        return directory.tensors
    return sorted(directory.tensors + directory.unlisted, key=lambda tensor: tensor.file)


def _excluded(directory: ModelDirectory, module: str) -> str | None:
    """Why an attention module has no place for scales, if the config leaves it out."""
    entry = excluded_by(directory.quantization or {}, module)
    return entry and f"exclude has '{entry[:60]}', so that attention has no place for scales"


def _check_misnamed(directory: ModelDirectory, found: Simulation) -> None:
    if directory.misnamed and found.engine.unknown == "refused":
        raise Refused(f"'{directory.misnamed[0]}' is a name that the model does not have")
    found.ignored += [(name, f"'{name}' is no name of a scale") for name in directory.misnamed]


def _by_class(
    tensor: ScaleTensor, module: str, fates: Fates, beside: Collection[str], found: Simulation
) -> Reached:
    """Where the model's class puts a scale of `module`, which has others under names `beside`."""
    name = naming(tensor.name, tensor.parsed, module)
    fate, _, why = fate_of(fates, name, beside).partition(": ")
    if fate == "unknown":
        raise NotKnown(f"not known: the model's class was never run with '{tensor.name}'")
    found.fates.add(fate)
    if fate == "loaded" or why == K_ALONE:
        return module, tensor.parsed.letters[0]
    if fate in ("crash", "refused"):
        raise Refused(f"the model's class does not start with '{tensor.name}': {why}")
    return f"{_FATES[fate]}{why}"


def _by_name(directory: ModelDirectory, tensor: ScaleTensor, method: Method | None, rules: Engine) -> Reached:
    """Where a scale goes by its name alone."""
    if method is None:
        if rules.without_config == "refused":
            raise Refused(
                f"there is no quantization_config, so '{tensor.name}' is a name the model does "
                "not have; export the scales in a format with a config"
            )
        return "there is no quantization_config, so no layer has a place for it"
    if method.kind == "none":
        return method.why
    module, _, parameter = rules.target(tensor.name, method).rpartition(".attn.")
    if module in directory.modules and parameter.endswith("_scale"):
        return module, parameter.removesuffix("_scale")
    if rules.unknown == "refused":
        raise Refused(
            f"'{tensor.name}' is a name that the model does not have; its attention modules "
            f"are called '{min(directory.modules, key=_by_layer, default='?')}' and so on"
        )
    return "it is not a name that the engine looks for"


def _outcomes(
    directory: ModelDirectory, module: str, params: Params, method: Method | None, place: Place
) -> list[Outcome]:
    tensors = {letter: params.get((module, letter)) for letter in "kvq"}
    if method is None or method.kind == "none":
        return [default(module, letter) for letter in "kv"]
    if method.kind == "scalar":
        if not method.reads_q:
            tensors["q"] = None
        return scalar(module, tensors, method, 2.0 if place.fnuz and method.doubles_fnuz else 1.0)
    if method.kind == "pair":
        return pair(module, tensors, params.get((module, "kv")))
    scheme = (directory.quantization or {}).get("kv_cache_scheme") or {}
    per_head = scheme.get("strategy") == "attn_head"
    return one_or_per_head(directory, module, tensors, place if per_head else None)


def _by_layer(module: str) -> tuple[int, str]:
    return layer_of(module) or 0, module
