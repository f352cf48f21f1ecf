"""Settings that cannot work are refused before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.daemon.process import _check_port_free, _translate
from swarm_plugins.transport.p2p_channel import protocol_name
from swarm_plugins.transport.reach.addresses import peer_id_in, with_port

PEER = "12D3KooWHTzWXxbE9AWiBme5J3Az76rw2KWvTFW2nRUwFGLbbjDn"
ADDRESS = f"/ip4/1.2.3.4/tcp/31337/p2p/{PEER}"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        pytest.param({"initial_peers": ["1.2.3.4:31337"]}, "'1.2.3.4:31337' is not a libp2p address", id="host-port"),
        pytest.param({"initial_peers": ["/ip4/1.2.3.4/tcp/31337"]}, "has no peer id: expected /ip4/", id="no-id"),
        pytest.param({"initial_peers": [f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}x"]}, "is not a libp2p address", id="bad-id"),
        pytest.param({"initial_peers": ADDRESS}, "expected a list of addresses", id="string"),
        pytest.param({"host_maddrs": ["/ip4/1.2.3.4/tcp/99999"]}, "is not a libp2p address", id="port"),
        pytest.param({"announce_maddrs": ["/ip4/1.2.3.4/tcp/0"]}, "give the real port", id="announce-zero"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        NodeConfig(**settings)  # type: ignore[arg-type]


def test_peer_ids_are_read_off_addresses() -> None:
    assert peer_id_in(ADDRESS) == PEER


def test_a_port_that_the_system_chose_is_kept() -> None:
    listening = [f"/ip6/::1/tcp/5/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/7/p2p/{PEER}", f"/ip4/10.0.0.1/tcp/7/p2p/{PEER}"]
    assert with_port("/ip4/0.0.0.0/tcp/0", listening) == "/ip4/0.0.0.0/tcp/7"
    assert with_port("/ip4/0.0.0.0/tcp/3", listening) == "/ip4/0.0.0.0/tcp/3"
    assert with_port("/ip4/0.0.0.0/tcp/0", []) == "/ip4/0.0.0.0/tcp/0"


def test_unknown_rpc_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown rpc 'rpc_x': expected one of rpc_info, rpc_forward"):
        protocol_name("rpc_x")


def test_a_port_in_use_is_noticed_although_libp2p_would_share_it() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already in use; give another port"):
            _check_port_free(address)
    _check_port_free(address)
    _check_port_free("/ip4/127.0.0.1/tcp/0")
    with pytest.raises(ConfigError, match=r"/dns4/localhost/tcp/31337: expected an IP address of this machine"):
        _check_port_free("/dns4/localhost/tcp/31337")


@pytest.mark.parametrize(
    ("reason", "kind", "complaint"),
    [
        ("Daemon failed to start: failed to connect to bootstrap peers", TransportError, f"initial peers.*{ADDRESS}"),
        ("p2pd binary not found at /x", TransportError, "pip install --force-reinstall hivemind"),
        ("Daemon failed to start in 60.0 seconds", TransportError, "not started within 60 s, 2 times"),
        (
            "Daemon failed to start: 2026/11/21 07:59:06 failed to listen on any addresses: [/ip4/1.2.3.4/tcp/1]",
            ConfigError,
            r"^cannot listen on /ip4/127.0.0.1/tcp/0: failed to listen on any addresses: \[.*\]; use an address of",
        ),
        ("Daemon failed to start: panic: broken", TransportError, "does not start: panic: broken"),
        ("something else", TransportError, "does not start: something else"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_the_daemons_complaints_become_typed_errors(reason: str, kind: type[Exception], complaint: str) -> None:
    config = NodeConfig(initial_peers=(ADDRESS,), identity=Path("id"))
    error = _translate(RuntimeError(reason), config)
    assert type(error) is kind
    with pytest.raises(kind, match=complaint):
        raise error
