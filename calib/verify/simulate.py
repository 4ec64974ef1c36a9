"""What an engine's loader would do with a directory, without the engine."""

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from calib.scalefiles.folder import ScaleDirectory, ScaleTensor
from calib.scalefiles.names import layer_of
from calib.verify.classes import K_ALONE, Fates, fate_of, naming, owner
from calib.verify.result import Outcome, Place, Refused, Simulation, default
from calib.verify.rules import Method, Rules
from calib.verify.values import heads_of, one_or_per_head, pair, scalar, simulate_json

Params = dict[tuple[str, str], ScaleTensor]  # (attention module, letter) -> what reaches it
Reached = tuple[str, str] | str  # the key of Params, or why it reaches none

# what the model's class does with a scale that no layer computes with
_FATES = {
    "dropped": "the model's class drops it",
    "no place": "the attention layers of the model's class have no place for scales",
    "partly": "the model's class does not load all: ",
    "unknown": "whether the model's class loads this name is not known",
}
ONE_GPU = Place()
IGNORED_SCHEME = Method(
    kind="none",
    why="its kv_cache_scheme is not static FP8 with one scale per layer, so scales are ignored",
)


def simulate(directory: ScaleDirectory, rules: Rules, place: Place = ONE_GPU) -> Simulation:
    """Load `directory` as the engine would in `place`."""
    found = Simulation(rules)
    try:
        _load(directory, place, found)
    except Refused as error:
        found.refused, found.outcomes = str(error), []
    return found


def _load(directory: ScaleDirectory, place: Place, found: Simulation) -> None:
    rules = found.rules
    if place.ranks > 1:
        _check_split(directory, place)
    if rules.reads == "json":
        simulate_json(directory, place, found)
        return
    if rules.reads == "index" and (missing := directory.missing):
        raise Refused(f"the index names {missing[0]}, which is not there; write the index again")
    method = _method(directory, rules)
    found.flag = None if method and method.turns_fp8_on else rules.flag
    modules = sorted(directory.modules, key=_by_layer)
    fates = _fates(directory, rules, method)
    if isinstance(fates, str):
        found.outcomes += [Outcome(m, x, "unknown", (), fates) for m in modules for x in "kv"]
        return
    params = _params(directory, method, fates, found)
    for module in modules:
        found.outcomes += _outcomes(directory, module, params, method, place)
    if place.fnuz and method and not method.doubles_fnuz and found.is_good:
        found.problem = (
            "the engine does not double scales for an FP8 type that ends at 240, and files hold "
            "them for 448: K and V are clipped at 0.54 of absmax; export --format modelopt"
        )


def _check_split(directory: ScaleDirectory, place: Place) -> None:
    heads, kv_heads = heads_of(directory)
    larger, smaller = max(kv_heads, place.ranks), min(kv_heads, place.ranks)
    # each rank gets as much as the others
    if heads % place.ranks or larger % smaller:
        raise Refused(
            f"the model's {heads} query heads and {kv_heads} KV heads cannot be split evenly "
            f"over {place.ranks} GPUs"
        )


def _method(directory: ScaleDirectory, rules: Rules) -> Method | None:
    config = directory.quantization
    if config is None:
        return rules.without_method
    name = config.get("quant_method") or ("modelopt" if config is directory.modelopt else None)
    method = rules.methods.get(str(name), rules.methods.get("*"))
    if method is None:
        raise Refused(f"quant_method {str(name)[:40]!r} is not one that it reads KV scales under")
    if method.needs_algo and not directory.algorithms.get("quant_algo"):
        raise Refused(
            "quant_algo is missing or null, as ModelOpt writes it where only the KV cache is "
            "quantised; export the scales in another format"
        )
    groups = config.get("config_groups")
    if method.groups_need_weights and isinstance(groups, dict):
        _check_groups(groups)
    scheme = config.get("kv_cache_scheme")
    if method.scheme == "tensor":
        return method if _is_static_tensor(scheme) else IGNORED_SCHEME
    if method.scheme:
        _check_scheme(scheme, method.scheme)
    return method


def _fates(directory: ScaleDirectory, rules: Rules, method: Method | None) -> Fates | str | None:
    """What the model's class does with each name; None where the class does not matter."""
    if (method and method.kind == "none") or not any(t.indexed for t in directory.tensors):
        return None
    config, kind = directory.quantization or {}, "none"
    if method is not None:
        kind = str(config.get("quant_method") or "modelopt")
        scheme = config.get("kv_cache_scheme")
        if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head":
            kind += " attn_head"
    return rules.fates(directory.config or {}, kind)


def _check_groups(groups: dict[str, Any]) -> None:
    for name, group in groups.items():
        if isinstance(group, dict) and not group.get("weights"):
            raise Refused(
                f"config_groups has '{name[:40]}' without weights, as llm-compressor writes it for "
                "queries, and it cannot read that; write it again with fp8kv convert --to vllm"
            )


def _is_static_tensor(scheme: Any) -> bool:
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    if not isinstance(scheme, dict) or scheme.get("dynamic"):
        return False
    return wanted.items() <= scheme.items() and bool(scheme.get("symmetric", True))


def _check_scheme(scheme: Any, rule: str) -> None:
    if scheme is None:
        return
    scheme = scheme if isinstance(scheme, dict) else {}
    wrong = [scheme.get("type") != "float", scheme.get("num_bits") != 8]
    if all(wrong) or (any(wrong) and rule == "both"):
        raise Refused(
            f"kv_cache_scheme has num_bits {scheme.get('num_bits')}, type {scheme.get('type')}; "
            "it must be 8 and float"
        )
    if (strategy := scheme.get("strategy")) not in ("tensor", "attn_head"):
        raise Refused(f"kv_cache_scheme has strategy {strategy}; it must be tensor or attn_head")
    if not scheme.get("symmetric"):
        raise Refused("kv_cache_scheme must say symmetric: true")


def _params(
    directory: ScaleDirectory, method: Method | None, fates: Fates | None, found: Simulation
) -> Params:
    params, names = Params(), defaultdict[str | None, set[str]](set)
    for tensor in directory.tensors:
        module = owner(tensor.parsed, directory.modules)
        names[module].add(naming(tensor.name, module or ""))
    for tensor in directory.tensors:
        module = owner(tensor.parsed, directory.modules)
        if found.rules.reads == "index" and not tensor.indexed:
            reached: Reached = f"{tensor.file} is not in the index, so it is not read"
        elif fates is None or method is None or module is None or tensor.parsed.letters == "q":
            reached = _by_name(directory, tensor, method, found.rules)
        else:
            reached = _by_class(tensor, module, fates, names[module], found)
        if isinstance(reached, str):
            found.ignored.append((tensor.name, reached))
        else:
            params[reached] = tensor
    return params


def _by_class(
    tensor: ScaleTensor, module: str, fates: Fates, beside: Collection[str], found: Simulation
) -> Reached:
    """Where the model's class puts a scale of `module`, which has others under names `beside`."""
    fate = fate_of(fates, naming(tensor.name, module), beside)
    found.fate, _, why = fate.partition(": ")
    if found.fate == "loaded" or why == K_ALONE:
        return module, tensor.parsed.letters[0]
    if found.fate in ("crash", "refused"):
        raise Refused(f"the model's class does not start with '{tensor.name}': {why}")
    return f"{_FATES[found.fate]}{why}"


def _by_name(
    directory: ScaleDirectory, tensor: ScaleTensor, method: Method | None, rules: Rules
) -> Reached:
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
    directory: ScaleDirectory, module: str, params: Params, method: Method | None, place: Place
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
