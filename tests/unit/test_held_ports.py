"""A local swarm's ports stay its own while their server is down."""

from __future__ import annotations

import socket

import pytest

from swarm_plugins.local_swarm.ports import HeldPorts

HOST = "127.0.0.1"


def daemon_on(port: int) -> socket.socket:
    """Listens as libp2p does."""
    daemon = socket.socket()
    daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    daemon.bind((HOST, port))
    daemon.listen()
    return daemon


def test_no_other_gets_the_port_of_a_server_that_is_down_and_the_server_gets_it_again() -> None:
    held = HeldPorts()
    with daemon_on(0) as daemon:
        port = daemon.getsockname()[1]
        address = f"/ip4/{HOST}/tcp/{port}/p2p/12D3KooW"
        held.hold([address, address])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=60)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port))
    with daemon_on(port) as daemon, socket.create_connection((HOST, port), timeout=60):
        held.hold([address])
    held.close()
    held.close()


def test_addresses_without_a_port_of_this_machine_are_left_alone() -> None:
    held = HeldPorts()
    held.hold(["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW", f"/ip4/{HOST}/tcp/0", "/dns4/example.org/tcp/4001", "/p2p/1"])
    held.close()
