"""What an engine's loader would do with a directory, without the engine."""

from typing import Any

from calib.scalefiles.folder import ScaleDirectory, ScaleTensor
from calib.scalefiles.names import layer_of
from calib.verify.result import Outcome, Place, Refused, Simulation, default
from calib.verify.rules import Method, Rules
from calib.verify.values import heads_of, one_or_per_head, pair, scalar, simulate_json

Params = dict[tuple[str, str], ScaleTensor]  # (attention module, letter) -> what reaches it

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
    if why := _not_known(directory, rules, method):
        found.outcomes += [Outcome(m, x, "unknown", (), why) for m in modules for x in "kv"]
        return
    params = _params(directory, method, found)
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


def _not_known(directory: ScaleDirectory, rules: Rules, method: Method | None) -> str | None:
    """Say why nobody knows which scales the model's class loads; None where the rules cover it."""
    reads = method is not None and method.kind != "none"
    if not (reads and rules.architectures and any(t.indexed for t in directory.tensors)):
        return None
    named = (directory.config or {}).get("architectures")
    names = [str(name)[:80] for name in named] if isinstance(named, list) else []
    if names and all(name in rules.architectures for name in names):
        return None
    whose = " or ".join(names) or "a model whose config.json names no architecture"
    return (
        f"not known for {whose}: each model class there loads scales in its own way, if at all, "
        f"and the rules hold for {', '.join(rules.architectures)}"
    )


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


def _params(directory: ScaleDirectory, method: Method | None, found: Simulation) -> Params:
    rules, params = found.rules, Params()
    for tensor in directory.tensors:
        module, _, parameter = rules.target(tensor.name, method).rpartition(".attn.")
        if rules.reads == "index" and not tensor.indexed:
            why = f"{tensor.file} is not in the index, so it is not read"
        elif method is None:
            why = "there is no quantization_config, so no layer has a place for it"
            if rules.without_config == "refused":
                raise Refused(
                    f"there is no quantization_config, so '{tensor.name}' is a name the model does "
                    "not have; export the scales in a format with a config"
                )
        elif method.kind == "none":
            why = method.why
        elif module in directory.modules and parameter.endswith("_scale"):
            params[module, parameter.removesuffix("_scale")] = tensor
            continue
        elif rules.unknown == "refused":
            raise Refused(
                f"'{tensor.name}' is a name that the model does not have; its attention modules "
                f"are called '{min(directory.modules, key=_by_layer, default='?')}' and so on"
            )
        else:
            why = "it is not a name that the engine looks for"
        found.ignored.append((tensor.name, why))
    return params


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
