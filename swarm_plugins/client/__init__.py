"""The client: a connection to a swarm, chains of servers with gradients, sessions with replay."""

from __future__ import annotations

from swarm_plugins.block_io import CacheOp
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import RemoteBlocks, SwarmConnection, connect

__all__ = ["CacheOp", "RemoteBlocks", "SwarmConfig", "SwarmConnection", "connect"]
