"""A client's counters for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from swarm_plugins.client import SwarmConnection

_PASSES = ("forward", "backward", "step")
_FAILURES = (
    *("TransportError", "RequestTimeoutError", "StreamLostError", "SessionLostError", "ProtocolError"),
    *("RemoteError", "RefusedError", "CapacityError", "OverloadedError", "SpanMovedError"),
)
"""Shown before they happen: Prometheus cannot tell the first one of a kind from a counter it has not seen before."""


class ClientCollector(Collector):
    """What a client has asked of its servers, and at what cost: metrics ``swarm_client_...``.

    ```python
    registry.register(ClientCollector(swarm_plugins.backbone.swarm_connection(model)))
    ```

    Args:
        connection: The client's connection, which all models that use the same swarm and settings share.
    """

    def __init__(self, connection: SwarmConnection) -> None:
        self._counts = connection.counts

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; Prometheus calls it from a thread of its own."""
        counts, streams = self._counts, self._counts.streams
        yield counted(
            "swarm_client_passes",
            "Passes through the chain that succeeded: of a batch (forward, backward), or a step of a session.",
            "kind",
            dict.fromkeys(_PASSES, 0) | dict(counts.passes),
        )
        trips = SummaryMetricFamily(
            "swarm_client_round_trip_seconds", "Seconds from a request to its answer.", labels=["kind"]
        )
        waited_s = dict(counts.waited_s)
        for work, number in dict(counts.round_trips).items():
            kind = work.removeprefix("rpc_").replace(" ", "_")
            trips.add_metric([kind], count_value=number, sum_value=waited_s.get(work, 0.0))
        yield trips
        yield counted(
            "swarm_client_failures",
            "Failures of servers, by the kind of the error.",
            "kind",
            {_kind(name): number for name, number in (dict.fromkeys(_FAILURES, 0) | dict(counts.failures)).items()},
        )
        yield CounterMetricFamily("swarm_client_retries", "Requests made again after a failure.", counts.retries)
        yield CounterMetricFamily("swarm_client_replays", "Sessions replayed on another server.", counts.replays)
        yield CounterMetricFamily("swarm_client_bans", "Servers left out for a while after a failure.", counts.bans)
        yield CounterMetricFamily("swarm_client_sent_bytes", "Bytes sent to servers.", streams.sent_bytes)
        yield CounterMetricFamily("swarm_client_received_bytes", "Bytes received from servers.", streams.received_bytes)


def counted(name: str, text: str, label: str, numbers: Mapping[str, float]) -> CounterMetricFamily:
    """Returns a counter with one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in numbers.items():
        family.add_metric([value], number)
    return family


def _kind(error: str) -> str:
    """Returns ``request_timeout`` for ``RequestTimeoutError``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", error.removesuffix("Error")).lower()
