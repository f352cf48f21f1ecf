"""A server's counters for Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from swarm_plugins.metrics.client import counted
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import FailureKind
from swarm_plugins.transport.server_info import ServerInfo

_TOKENS = ("prefill", "reused", "decode", "forward", "backward", "check")
_PACKS = (1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the buckets."""


class Monitored(Protocol):
    """A server as monitors see it: a `SwarmServer`."""

    @property
    def service(self) -> Service | ExpertsService | None:
        """What answers requests; None until it has been loaded."""

    @property
    def streams(self) -> StreamCounts:
        """What its streams have carried."""


class ServerCollector(Collector):
    """What a server has computed, refused and carried, and what it holds: metrics ``swarm_server_...``.

    Until its blocks are loaded there is only ``swarm_server_online``, which is 0 then.

    Args:
        server: The server.
    """

    def __init__(self, server: Monitored) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; Prometheus calls it from a thread of its own."""
        service, streams = self._server.service, self._server.streams
        info = None if service is None else service.info()
        is_online = info is not None and info.state == "online"
        yield GaugeMetricFamily("swarm_server_online", "1 if the server takes new sessions, else 0.", int(is_online))
        if service is None or info is None:
            return
        yield _info(service, info)
        yield from _work(service)
        yield _memory(service, "bytes", "Memory in use, by what for.", 0)
        yield _memory(service, "limit_bytes", "Most memory that may be in use, by what for.", 1)
        refusals = {kind: service.counts.refusals[kind] + streams.refused[kind] for kind in get_args(FailureKind)}
        yield counted("swarm_server_refusals", "Requests answered with a failure, by its kind.", "reason", refusals)
        yield CounterMetricFamily("swarm_server_sent_bytes", "Bytes sent to peers.", streams.sent_bytes)
        yield CounterMetricFamily("swarm_server_received_bytes", "Bytes received from peers.", streams.received_bytes)
        if isinstance(service, Service):
            yield from _sessions_and_pushes(service)


def _info(service: Service | ExpertsService, info: ServerInfo) -> Metric:
    identity = service.identity if isinstance(service, Service) else None
    shown = {
        "model": info.model,
        "version": info.version,
        "blocks": f"{info.start}:{info.end}",
        "dtype": info.dtype,
        "quantization": info.quantization,
        "software": info.software,
        "peer": "" if identity is None else identity.peer_id,
    }
    return InfoMetricFamily("swarm_server", "What is served.", shown)


def _work(service: Service | ExpertsService) -> Iterator[Metric]:
    scheduler, tokens = service.scheduler, dict(service.counts.tokens)
    kinds = _TOKENS if isinstance(service, Service) else ("experts",)
    yield counted(
        "swarm_server_tokens",
        "Tokens computed, by kind; decode: one for each row of a step.",
        "kind",
        dict.fromkeys(kinds, 0) | tokens,
    )
    yield CounterMetricFamily(
        "swarm_server_compute_seconds", "Seconds in which the compute thread has worked.", scheduler.busy_s
    )
    yield GaugeMetricFamily("swarm_server_waiting_requests", "Requests that wait or run.", scheduler.num_waiting)
    if isinstance(service, Service):
        packs = dict(scheduler.packs)
        yield HistogramMetricFamily(
            "swarm_server_pack_sessions",
            "Sessions that shared a forward of their steps.",
            buckets=list(_buckets(packs)),
            sum_value=sum(size * number for size, number in packs.items()),
        )


def _buckets(packs: Mapping[int, int]) -> Iterator[tuple[str, float]]:
    """Yields cumulative counts by upper bound."""
    bounds = [(f"{bound}.0", bound) for bound in _PACKS]
    for name, bound in itertools.chain(bounds, [("+Inf", max(packs, default=0))]):
        yield name, sum(number for size, number in packs.items() if size <= bound)


def _memory(service: Service | ExpertsService, unit: str, text: str, index: int) -> Metric:
    parts = {"requests": (service.ledger.used, service.ledger.limit)}
    if isinstance(service, Service):
        kv, graphs, adapters = service.runner.pool, service.activations, service.adapters
        parts["kv"] = (kv.used_bytes, kv.budget_bytes)
        parts["graphs"] = (graphs.used_bytes, graphs.budget_bytes)
        parts["adapters"] = (adapters.used_bytes, adapters.budget_bytes)
    family = GaugeMetricFamily(f"swarm_server_memory_{unit}", text, labels=["part"])
    for part, amounts in parts.items():
        family.add_metric([part], amounts[index])
    return family


def _sessions_and_pushes(service: Service) -> Iterator[Metric]:
    pushes = service.pushes
    yield GaugeMetricFamily("swarm_server_sessions", "Open sessions.", len(service.sessions))
    yield counted(
        "swarm_server_pushes",
        "Hidden states that other servers pushed here.",
        "outcome",
        {"taken": pushes.num_taken, "refused": pushes.num_refused},
    )
    yield CounterMetricFamily(
        "swarm_server_unkept_graphs",
        "Forwards whose graph was not kept, so that their backward ran them again.",
        service.activations.num_unkept,
    )
