"""What a server's metrics say after real requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.metrics.server import ServerCollector
from swarm_plugins.server.service import ExpertsService
from swarm_plugins.testing.in_process import InProcessSwarm
from tests.unit.metrics.metrics_kit import Samples, Server, generate, load, send_nonsense, train


@pytest.fixture
def swarm(model: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(model, spans=[(0, 4)]) as running:
        yield running


@pytest.fixture
def server(swarm: InProcessSwarm) -> Server:
    return Server(swarm, swarm.peers[0])


@pytest.fixture
def sample(server: Server) -> Samples:
    return Samples(ServerCollector(server))


def test_tokens_are_counted_by_kind(swarm: InProcessSwarm, sample: Samples) -> None:
    kinds = ("prefill", "decode", "forward", "backward", "check")
    assert [sample("swarm_server_tokens_total", kind=kind) for kind in kinds] == [0, 0, 0, 0, 0]
    generate(load(swarm))
    assert [sample("swarm_server_tokens_total", kind=kind) for kind in kinds] == [10, 6, 0, 0, 0]
    train(swarm)
    assert [sample("swarm_server_tokens_total", kind=kind) for kind in kinds] == [10, 6, 10, 10, 0]


def test_packs_and_seconds_of_compute(swarm: InProcessSwarm, sample: Samples) -> None:
    assert sample("swarm_server_compute_seconds_total") == 0
    generate(load(swarm))
    assert sample("swarm_server_pack_sessions_count") == sample("swarm_server_pack_sessions_sum") == 4
    first = sample("swarm_server_compute_seconds_total")
    generate(load(swarm))
    assert 0 < first < sample("swarm_server_compute_seconds_total")


def test_buckets_of_packs_are_cumulative(server: Server, sample: Samples) -> None:
    assert server.service is not None
    server.service.scheduler.packs.update({1: 3, 3: 2, 100: 1})
    found = {le: sample("swarm_server_pack_sessions_bucket", le=le) for le in ("1.0", "2.0", "4.0", "64.0", "+Inf")}
    assert found == {"1.0": 3, "2.0": 3, "4.0": 5, "64.0": 5, "+Inf": 6}
    assert sample("swarm_server_pack_sessions_sum") == 3 * 1 + 2 * 3 + 100


def test_memory_and_sessions_are_those_that_are_open(swarm: InProcessSwarm, sample: Samples) -> None:
    cache = generate(load(swarm))
    used = sample("swarm_server_memory_bytes", part="kv")
    assert 0 < used <= sample("swarm_server_memory_limit_bytes", part="kv")
    assert sample("swarm_server_sessions") == 1
    del cache
    gc.collect()
    deadline = time.monotonic() + 30
    while sample("swarm_server_sessions") and time.monotonic() < deadline:
        time.sleep(0.01)
    while sample("swarm_server_memory_bytes", part="kv") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sample("swarm_server_sessions") == sample("swarm_server_memory_bytes", part="kv") == 0
    train(swarm)
    assert sample("swarm_server_memory_bytes", part="adapters") > 0


def test_a_refused_request_is_counted_by_its_reason(swarm: InProcessSwarm, server: Server, sample: Samples) -> None:
    send_nonsense(swarm, swarm.peers[0])
    assert sample("swarm_server_refusals_total", reason="bad_request") == 1
    assert sample("swarm_server_refusals_total", reason="overloaded") == 0
    server.streams.refused["overloaded"] += 2  # before a request was read
    assert sample("swarm_server_refusals_total", reason="overloaded") == 2


def test_both_ends_count_the_same_bytes(swarm: InProcessSwarm, sample: Samples) -> None:
    generate(load(swarm))
    client = Samples(ClientCollector(swarm.connection))
    sent, received = (client(f"swarm_client_{way}_bytes_total") for way in ("sent", "received"))
    assert sample("swarm_server_received_bytes_total") == sent > 0
    assert sample("swarm_server_sent_bytes_total") == received > 0


def test_a_holder_of_experts_shows_what_it_has(swarm: InProcessSwarm, server: Server) -> None:
    whole = server.service
    assert whole is not None
    service = ExpertsService(announced=whole.announced, held=None, scheduler=whole.scheduler)  # type: ignore[arg-type]
    service.counts.tokens["experts"] += 9
    server.service = service  # type: ignore[assignment]
    sample = Samples(ServerCollector(server))
    assert sample("swarm_server_tokens_total", kind="experts") == 9
    assert sample("swarm_server_memory_limit_bytes", part="requests") == service.ledger.limit
    names = {family.name for family in sample.registry.collect()}
    assert not names & {"swarm_server_sessions", "swarm_server_pushes", "swarm_server_pack_sessions"}


def test_the_state_is_shown_and_before_loading_nothing_else(
    swarm: InProcessSwarm, server: Server, sample: Samples
) -> None:
    assert sample("swarm_server_online") == 1
    service = server.service
    assert service is not None
    info = next(
        one for family in sample.registry.collect() for one in family.samples if one.name == "swarm_server_info"
    )
    assert (info.labels["blocks"], info.labels["model"], info.value) == ("0:4", "tiny-llama", 1)
    service.draining.leave()
    assert sample("swarm_server_online") == 0
    server.service = None
    assert sample("swarm_server_online") == 0
    assert [family.name for family in sample.registry.collect()] == ["swarm_server_online"]
