"""The scales in force over HTTP: a route and metrics of a vLLM server, where VLLM_PLUGINS names fp8kv."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from calib.files.names import WATCH_FILE
from calib.serving.vllm_engine import whole_model

ROUTES = "/v1/fp8kv"
ROUTE = f"{ROUTES}/scales"
_CHANGING = ("collective_rpc", "wake_up", "finish_weight_update")


class ScalesEndpoint:
    """Endpoint plugin of vLLM 0.32 and newer: GET /v1/fp8kv/scales, and metrics beside the engine's own."""

    name = "fp8kv"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the route."""

        from fastapi import HTTPException  # type: ignore[import-not-found]

        async def scales() -> dict[str, Any]:
            try:
                return await self._ask()
            except Exception as error:
                raise HTTPException(503, str(error)) from error

        async def watch() -> Any:
            if document := _watched():
                return document
            raise HTTPException(404, "FP8KV_WATCH names no directory, or nothing was read yet")

        app.add_api_route(ROUTE, scales, methods=["GET"])
        app.add_api_route(f"{ROUTES}/watch", watch, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Set the metrics, now and after every call that may change scales."""
        from prometheus_client import REGISTRY, Gauge  # type: ignore[import-not-found]

        if os.environ.get("FP8KV_WATCH"):
            REGISTRY.register(_WatchMetrics())
        texts = {"in_use": "KV scales in use", "total": "KV scales", "problems": "Problems with KV scales"}
        self._gauges = {name: Gauge(f"fp8kv_scales_{name}", text) for name, text in texts.items()}
        self._info = Gauge("fp8kv_scales_info", "Fingerprint of the KV scales in force", ["fingerprint"])
        self._call = engine_client.collective_rpc
        for name in _CHANGING:
            if method := getattr(engine_client, name, None):
                setattr(engine_client, name, self._wrap(method))
        await self._set_metrics()

    def _wrap(self, method: Any) -> Any:
        @wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            finally:
                await self._set_metrics()

        return call

    async def _set_metrics(self) -> None:
        # the call has done what it should, whether or not scales can be read now
        with suppress(Exception):
            await self._ask()

    async def _ask(self) -> dict[str, Any]:
        report = whole_model(await self._call("fp8kv_state"))
        numbers = {"in_use": report.used, "total": report.total, "problems": len(report.problems)}
        for name, number in numbers.items():
            self._gauges[name].set(number)
        self._info.clear()
        self._info.labels(report.fingerprint).set(1)
        return {**numbers, "fingerprint": report.fingerprint, "problems": report.problems}


class _WatchMetrics:
    """Metrics of what the cache held, read from the workers' file whenever they are asked for."""

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; of each layer the head that clips most, or has most zeros."""
        from prometheus_client.core import (  # type: ignore[import-not-found]
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        from calib.evaluate.served.watch_report import Watched, report_on
        from calib.files.text import parse_condition

        try:
            watched = Watched.model_validate(_watched())
            rows = report_on(watched, parse_condition("clipped>0", ("clipped",)), {}).rows
        except ValueError:  # nothing was written yet, or by another version
            return
        tokens = CounterMetricFamily("fp8kv_tokens", "Tokens that were written to the KV cache")
        tokens.add_metric([], watched.tokens)
        yield tokens
        for name, text in (
            ("clipped", "Share of counted tokens with a value at the end of the FP8 range"),
            ("zero", "Share of counted values that are 0 in FP8"),
        ):
            family = GaugeMetricFamily(f"fp8kv_{name}_ratio", text, labels=["layer", "tensor"])
            for row in rows:
                family.add_metric([str(row.layer), row.letter.lower()], getattr(row, name))
            yield family


def _watched() -> dict[str, Any]:
    """Return what the workers have written; nothing where they have not, or do not watch."""
    directory = os.environ.get("FP8KV_WATCH", "")
    try:
        document: dict[str, Any] = json.loads(Path(directory, WATCH_FILE).read_bytes()) if directory else {}
    except (OSError, ValueError):
        return {}
    return document
