"""The HTTP endpoint, and the options of `swarm serve` that open it."""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.errors import ConfigError
from swarm_plugins.metrics.endpoint import Endpoint


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something else listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one.getsockname()[1]


def test_it_shows_the_process_and_closes_its_port() -> None:
    with Endpoint("127.0.0.1", 0) as endpoint:
        url = endpoint.url
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert "process_resident_memory_bytes" in found
        assert "python_info" not in found, "nothing of prometheus_client's global registry"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_two_endpoints_share_nothing() -> None:
    with Endpoint("127.0.0.1", 0) as one, Endpoint("127.0.0.1", 0) as two:
        assert one.port != two.port
        assert one.registry is not two.registry


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot serve metrics on port 0 of 203\.0\.113\.1: .*--metrics-host"):
        Endpoint("203.0.113.1", 0).__enter__()


def serve(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", "m", *options])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


def test_a_port_in_use_is_one_sentence(taken: int) -> None:
    code, text = serve("--metrics-port", str(taken))
    assert code == 2
    assert text == (
        f"swarm serve: cannot serve metrics on port {taken} of 127.0.0.1: Address already in use; give another "
        "--metrics-port (0: any free one) or --metrics-host"
    )


def test_an_impossible_port_is_a_wrong_call() -> None:
    assert serve("--metrics-port", "70000")[0] == 2


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "swarm_plugins.metrics.endpoint", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert serve("--metrics-port", "0") == (
        1,
        "swarm serve: the package prometheus_client is missing: install it, in the checkout, with: "
        "pip install -c constraints.txt -e '.[metrics]'",
    )
