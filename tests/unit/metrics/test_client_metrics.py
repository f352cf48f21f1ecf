"""What a client's metrics say after work, failures and repairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.backbone import swarm_connection
from swarm_plugins.errors import ConfigError, RequestTimeoutError
from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import tiny_model
from tests.unit.metrics.metrics_kit import Samples, fail_over, generate, load, train


def test_passes_and_round_trips_are_counted(model: Path) -> None:
    with InProcessSwarm(model) as swarm:
        sample = Samples(ClientCollector(swarm.connection))
        assert sample("swarm_client_passes_total", kind="step") == 0
        assert sample("swarm_client_failures_total", kind="stream_lost") == 0
        generate(load(swarm))
        train(swarm)
        passes = {kind: sample("swarm_client_passes_total", kind=kind) for kind in ("forward", "backward", "step")}
        assert passes == {"forward": 1, "backward": 1, "step": 4}
        # Two servers each.
        trips = {kind: sample("swarm_client_round_trip_seconds_count", kind=kind) for kind in ("forward", "session")}
        assert trips == {"forward": 2, "session": 8}
        assert sample("swarm_client_round_trip_seconds_sum", kind="session") > 0
        for name in ("retries", "replays", "bans"):
            assert sample(f"swarm_client_{name}_total") == 0


def test_a_lost_server_is_a_failure_a_ban_and_a_replay(model: Path) -> None:
    with InProcessSwarm(model, spans=[(0, 4), (0, 4)]) as swarm:
        sample = Samples(ClientCollector(swarm.connection))
        fail_over(swarm)
        assert sample("swarm_client_replays_total") == 1
        assert sample("swarm_client_retries_total") == sample("swarm_client_bans_total") == 1
        assert sample("swarm_client_failures_total", kind="stream_lost") == 1


def test_counts_survive_the_end_of_the_connection(model: Path) -> None:
    with InProcessSwarm(model) as swarm:
        generate(load(swarm))
        sample = Samples(ClientCollector(swarm.connection))
        before = sample("swarm_client_sent_bytes_total")
    assert sample("swarm_client_sent_bytes_total") == before > 0


def test_kinds_of_failures_are_words(model: Path) -> None:
    swarm = InProcessSwarm(model)
    swarm.connection.counts.failed(RequestTimeoutError("late"))
    assert Samples(ClientCollector(swarm.connection))("swarm_client_failures_total", kind="request_timeout") == 1


def test_a_model_names_its_connection(model: Path) -> None:
    with InProcessSwarm(model) as swarm:
        assert swarm_connection(load(swarm, adapter=True)) is swarm.connection
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no block on a swarm: load the model with"):
        swarm_connection(tiny_model("llama"))
