"""The scales in force over HTTP: a route and metrics of a vLLM server, where VLLM_PLUGINS names fp8kv."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from calib.engines.loaded_scales import ScalesInForce
from calib.files.names import WATCH_FILE
from calib.files.text import parse_condition
from calib.serving.plugin import errors_to, wrap
from calib.serving.vllm_engine import STATE, WRITE

ROUTES = "/v1/fp8kv"
ROUTE = f"{ROUTES}/scales"
_CHANGING = ("collective_rpc", "wake_up", "finish_weight_update")
_SHARES = {
    "clipped": "Share of counted tokens with a value at the end of the FP8 range",
    "saturated": "Share of counted values at the end of the FP8 range",
    "zero": "Share of counted values that are 0 in FP8",
}


class ScalesEndpoint:
    """Endpoint plugin of vLLM 0.32 and newer: GET /v1/fp8kv/scales, and metrics beside the engine's own."""

    name = "fp8kv"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the routes, which answer 503 where workers do not, 404 where none watch, 425 too early."""
        from fastapi import HTTPException  # type: ignore[import-not-found]

        def refuse(error: Exception) -> NoReturn:
            raise HTTPException(503, str(error)) from error

        async def scales() -> dict[str, Any]:
            with errors_to(refuse):
                report = await self._ask()
            facts = {"fingerprint": report.fingerprint, "problems": report.problems, "fnuz": report.fnuz}
            layers = [_show_layer(*layer) for layer in report.stored]
            return {**_numbers(report), **facts, "server": report.server, "layers": layers}

        async def watch() -> Any:
            with errors_to(_note):  # an engine that is idle may not have written its last minutes
                await self._call(WRITE)
            if document := _watched():
                return document
            if os.environ.get("FP8KV_WATCH"):
                raise HTTPException(425, "nothing was read yet")
            raise HTTPException(404, "FP8KV_WATCH names no directory")

        app.add_api_route(ROUTE, scales, methods=["GET"])
        app.add_api_route(f"{ROUTES}/watch", watch, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Set the metrics, now and after every call that may change scales."""
        from prometheus_client import REGISTRY, Gauge  # type: ignore[import-not-found]

        # several API servers share gauges
        texts = {"in_use": "KV scales in use", "total": "KV scales", "problems": "Problems with KV scales"}
        self._gauges = {name: Gauge(f"fp8kv_scales_{name}", text) for name, text in texts.items()}
        self._info = Gauge("fp8kv_scales_info", "Fingerprint of the KV scales in force", ["fingerprint"])
        self._call = engine_client.collective_rpc
        for name in _CHANGING:
            if hasattr(engine_client, name):
                wrap(engine_client, name)(self._call_and_ask)
        with errors_to(_note):
            await self._ask()
        if os.environ.get("FP8KV_WATCH"):
            REGISTRY.register(self)

    async def _call_and_ask(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await call(*args, **kwargs)
        finally:  # the call has done what it should, whether or not scales can be read now
            with errors_to(_note):
                await self._ask()

    async def _ask(self) -> ScalesInForce:
        (state,) = await self._call(STATE)
        report = ScalesInForce(**state)
        for name, number in _numbers(report).items():
            self._gauges[name].set(number)
        self._info.clear()
        self._info.labels(report.fingerprint).set(1)
        return report

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of the traffic, of each layer's worst head."""
        from prometheus_client.core import (  # type: ignore[import-not-found]
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        from calib.evaluate.served.watch_report import Watched, report_on

        try:
            watched = Watched.model_validate(_watched())
        except ValueError:  # nothing was written yet, or by another version
            return
        yield CounterMetricFamily("fp8kv_tokens", "Tokens written to the KV cache", watched.tokens)
        rows = report_on(watched, parse_condition("clipped>0", ("clipped",)), {}).rows
        for name, text in _SHARES.items():
            shares = GaugeMetricFamily(f"fp8kv_{name}_ratio", text, labels=["layer", "tensor"])
            for row in rows:
                shares.add_metric([str(row.layer), row.letter.lower()], getattr(row, name))
            yield shares


def _note(error: Exception) -> None:
    """Log why scales or the traffic could not be asked for now; a later request asks again."""
    logging.getLogger("vllm.fp8kv").debug(f"fp8kv: {type(error).__name__}: {error}")


def _numbers(report: ScalesInForce) -> dict[str, int]:
    return {"in_use": report.used, "total": report.total, "problems": len(report.problems)}


def _show_layer(index: int, cache: str, *scales: Sequence[float]) -> dict[str, Any]:
    # JSON has no NaN
    k, v = ([value if isfinite(value) else None for value in values] for values in scales)
    return {"layer": index, "cache": cache, "k": k, "v": v}


def _watched() -> dict[str, Any]:
    """Return what the engine has written; nothing where it has not, or is not watched."""
    directory = os.environ.get("FP8KV_WATCH")
    try:
        document: dict[str, Any] = json.loads(Path(directory, WATCH_FILE).read_bytes()) if directory else {}
    except (OSError, ValueError):  # not there yet, or damaged
        return {}
    return document
