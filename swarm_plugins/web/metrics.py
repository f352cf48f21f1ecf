"""``/metrics``: what the API has done, and what its client asked of the swarm, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from torch import nn

from swarm_plugins.backbone.served import stack_of, swarm_connection
from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.web.engine.engine import Engine


class ApiCollector(Collector):
    """Generations of an API: metrics ``swarm_api_...``.

    Args:
        engine: Runs them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        engine = self._engine
        yield GaugeMetricFamily("swarm_api_running", "Generations under way.", engine.running)
        yield GaugeMetricFamily("swarm_api_waiting", "Generations that wait their turn.", engine.waiting)
        yield GaugeMetricFamily("swarm_api_kept_caches", "Conversations kept for their next turn.", len(engine.caches))
        tokens = CounterMetricFamily("swarm_api_tokens", "Tokens of complete generations.", labels=["kind"])
        for kind, number in (
            ("prompt", engine.prompt_tokens),
            ("cached", engine.cached_tokens),
            ("generated", engine.new_tokens),
        ):
            tokens.add_metric([kind], number)
        yield tokens


def metrics_app(engine: Engine, model: nn.Module) -> Any:
    """Returns an ASGI app that answers Prometheus."""
    registry = CollectorRegistry()
    registry.register(ApiCollector(engine))
    if stack_of(model) is not None:
        registry.register(ClientCollector(swarm_connection(model)))
    return make_asgi_app(registry)
