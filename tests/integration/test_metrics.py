"""`swarm serve --metrics-port` of a real server, scraped after real requests."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest
import torch
from programs import Programs
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from serve_kit import ADDRESS, found_in_line, serving

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.client import SwarmConnection, connect
from swarm_plugins.metrics.client import ClientCollector
from swarm_plugins.testing.models import save_tiny

IDS = torch.tensor([[5, 17, 99, 23]])


def scraped(url: str) -> dict[tuple[str, ...], float]:
    """The samples by name and values of labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }


METRICS = r"^Metrics: (http://127\.0\.0\.1:\d+/metrics)$"
OPTIONS = ("--blocks", "0:4", "--metrics-port", "0", "--drain-s", "0")


def client_bytes(connection: SwarmConnection) -> list[float | None]:
    registry = CollectorRegistry()
    registry.register(ClientCollector(connection))
    return [registry.get_sample_value(f"swarm_client_{way}_bytes_total") for way in ("sent", "received")]


@pytest.mark.swarm
def test_a_server_shows_what_its_client_has_asked(tmp_path: Path, programs: Programs) -> None:
    model = save_tiny("llama", tmp_path / "tiny-llama")
    log = tmp_path / "stderr"
    with serving(programs, model, log, *OPTIONS) as process:
        url, address = found_in_line(process, METRICS, log), found_in_line(process, ADDRESS, log)
        with connect([address], SwarmConfig()) as connection:
            remote = AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)
            remote.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            server, (sent, received) = scraped(url), client_bytes(connection)
            assert connection.peers is not None
            info = connection.loop.run(connection.peers.info(address.rpartition("/")[2]))
        assert server["swarm_server_online",] == 1
        assert server["swarm_server_tokens_total", "prefill"] == 4
        assert server["swarm_server_tokens_total", "decode"] == 3
        assert info.served_tokens == 7, "for `swarm top`"
        assert server["swarm_server_compute_seconds_total",] > 0
        assert server["swarm_server_memory_limit_bytes", "kv"] == 1 << 30
        assert sent is not None
        assert received is not None
        states = 4 * IDS.numel() * remote.config.hidden_size
        # The end of a stream may still be on its way.
        assert server["swarm_server_received_bytes_total",] == pytest.approx(sent, abs=64)
        assert server["swarm_server_sent_bytes_total",] == pytest.approx(received, abs=64)
        assert min(sent, received) > states
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
    with pytest.raises(OSError, match="refused"):
        scraped(url)


@pytest.mark.swarm
def test_metrics_are_there_while_the_blocks_are_loaded(tmp_path: Path, programs: Programs) -> None:
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    os.mkfifo(nowhere / "config.json")  # a disk that does not answer
    log = tmp_path / "stderr"
    with serving(programs, nowhere, log, *OPTIONS) as process:
        found = scraped(found_in_line(process, METRICS, log))
        assert found.get(("swarm_server_online",), 0.0) == 0
        assert found["process_resident_memory_bytes",] > 0
