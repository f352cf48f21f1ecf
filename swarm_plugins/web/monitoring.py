"""``/metrics`` of an API, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm_plugins.backbone.served import stack_of, swarm_connection
from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.tinker.service import TinkerService


class TrainingCollector(Collector):
    """Training of an API: metrics ``swarm_api_training_...``.

    Args:
        service: Has the models in training.
    """

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        trainers, sessions = self._service.trainers, self._service.sessions
        yield GaugeMetricFamily("swarm_api_training_models", "Models in training.", sessions.num_trainings)
        yield GaugeMetricFamily("swarm_api_training_samplers", "Models to sample from.", sessions.num_samplers)
        num_open = self._service.futures.num_open()
        yield GaugeMetricFamily("swarm_api_training_open_calls", "Calls that wait or are computed.", num_open)
        yield CounterMetricFamily("swarm_api_training_steps", "Steps of optimizers.", trainers.num_steps)
        tokens = CounterMetricFamily("swarm_api_training_tokens", "Tokens of texts.", labels=["kind"])
        for kind, number in trainers.num_tokens.items():
            tokens.add_metric([kind], number)
        yield tokens


class ApiCollector(Collector):
    """Generations of an API: metrics ``swarm_api_...``.

    Args:
        engine: Runs them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily("swarm_api_running_requests", "Requests that generate.", engine.running)
        yield GaugeMetricFamily("swarm_api_waiting_requests", "Requests that wait their turn.", engine.waiting)
        yield GaugeMetricFamily("swarm_api_kept_caches", "Conversations kept for their next turn.", len(engine.caches))
        tokens = CounterMetricFamily("swarm_api_tokens", "Tokens of complete generations.", labels=["kind"])
        for kind, number in (
            ("prompt", engine.prompt_tokens),
            ("cached", engine.cached_tokens),
            ("generated", engine.new_tokens),
        ):
            tokens.add_metric([kind], number)
        yield tokens


def metrics_router(engine: Engine, training: TinkerService | None) -> APIRouter:
    """Returns the route ``/metrics``: this process, its requests, and what they have asked of servers."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(ApiCollector(engine))
    if training is not None:
        registry.register(TrainingCollector(training))
    if stack_of(engine.models.base) is not None:
        registry.register(ClientCollector(swarm_connection(engine.models.base)))
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
