"""Metrics of an API for Prometheus. Extra: ``metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from swarm_plugins.backbone import swarm_connection
from swarm_plugins.errors import SwarmError
from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.web.engine.engine import Engine


class _Client(Collector):
    """What a model has asked of its servers; nothing if it is not on a swarm, or cannot join it.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        try:
            connection = swarm_connection(self._model)
        except SwarmError:
            return
        yield from ClientCollector(connection).collect()


def metrics_router(engine: Engine) -> APIRouter:
    """Returns the route ``/metrics``: this process, its requests, and what they have asked of servers."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    running = Gauge("swarm_api_running_requests", "Requests that generate.", registry=registry)
    running.set_function(lambda: engine.running)
    registry.register(_Client(engine.models.base))
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
