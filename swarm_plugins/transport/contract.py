"""The contract between client and server: which rpc there are, and under which names libp2p knows them.

Each rpc is a two-way stream of frames (wire.py). hivemind's typed servicers would wrap every frame in a protobuf
message, with two copies and a new task each, and believe an 8-byte length that the peer declares.
"""

from __future__ import annotations

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.channel import RPC_NAMES

__all__ = ["PROTOCOL_VERSION", "protocol_name"]

PROTOCOL_VERSION = 1
"""Raised when old and new peers could not understand each other; they then refuse each other's streams by name."""


def protocol_name(rpc: str) -> str:
    """Returns the libp2p protocol id of an rpc.

    Raises:
        ConfigError: If there is no such rpc.
    """
    if rpc not in RPC_NAMES:
        raise ConfigError(f"unknown rpc {rpc!r}; known are {', '.join(RPC_NAMES)}")
    return f"/swarm_plugins/{PROTOCOL_VERSION}/{rpc}"
