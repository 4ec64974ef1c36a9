"""New scales for an engine that runs: in every copy of every worker, and compared afterwards."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from calib.engines.loaded_scales import ScalesInForce
from calib.errors import InputError
from calib.files.names import parse_scale_name
from calib.files.stored_scales import is_usable
from calib.serving.vllm_engine import SET


class ScalesNotDeliveredError(RuntimeError):
    """A running engine does not compute with the scales that it was given; names rank, layer and copy."""


def push_scales(engine: Any, scales: Mapping[str, Tensor]) -> Any:
    """Put scales into every copy that the workers of a running vLLM hold; return their fingerprint, in hex.

    `engine` is a `vllm.LLM`, or an `AsyncLLM`, of which the fingerprint is to be awaited; fp8kv must be
    installed where its workers run. `scales` are what `calib.scales_for` returns: float32 [1], or
    [heads, 1, 1], by names such as `model.layers.0.self_attn.k_scale`. From then on they count as the files'.

    Raises `InputError` where a name is not a scale's or the engine cannot take them, and
    `ScalesNotDeliveredError`, naming rank, layer and copy, where a worker computes with others all the same.
    """
    layers: dict[str, dict[str, list[float]]] = {}
    for name, scale in scales.items():
        parsed = parse_scale_name(name)
        if parsed is None or not is_usable(values := scale.flatten().tolist()):
            raise InputError(
                f"{name} is not a KV-cache scale that an engine can use; give what scales_for returns"
            )
        for letter in parsed.letters:
            layers.setdefault(str(parsed.layer), {})[letter] = values
    # of data parallelism an AsyncLLM's own call answers for the first engine alone
    ask_all = getattr(getattr(engine, "engine_core", None), "call_utility_all_async", None)
    try:
        if ask_all:
            return _check_later(ask_all("collective_rpc", SET, None, (layers,), None))
        answer = engine.collective_rpc(SET, args=(layers,))
    except (AttributeError, NotImplementedError) as error:
        raise InputError(
            f"{type(engine).__name__} takes no scales ({error}): give a vllm.LLM or AsyncLLM, with fp8kv "
            "installed where it runs; if VLLM_PLUGINS is set, it must name fp8kv"
        ) from error
    return _check_later(answer) if inspect.isawaitable(answer) else _check(answer)


async def _check_later(answers: Any) -> str:
    # of every engine a list, or the one list of one
    return _check([x[0] if isinstance(x, list) else x for x in await answers])


def _check(states: Sequence[dict[str, Any]]) -> str:
    reports = [ScalesInForce(**state) for state in states]
    for index, report in enumerate(reports):
        if report.problems or not report.total:
            raise ScalesNotDeliveredError(f"engine {index}: {report}" if len(reports) > 1 else str(report))
    return reports[0].fingerprint
