"""Finds the swarm of a model: from the argument, the active strategy, or the environment, in this order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import SwarmConnection, connect
from swarm_plugins.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SwarmSettings:
    """Which swarm to use, and how."""

    initial_peers: tuple[str, ...]
    """Addresses to join the swarm through."""
    config: SwarmConfig
    """Settings of the client."""

    def connection(self) -> SwarmConnection:
        """Returns the connection that all models with these settings share; it may not be started yet."""
        return connect(self.initial_peers, self.config)


_active: ContextVar[SwarmSettings | None] = ContextVar("active_swarm", default=None)


@contextlib.contextmanager
def active_swarm(settings: SwarmSettings) -> Iterator[None]:
    """Makes a swarm the default for models loaded inside; strategies wrap ``configure_model`` in it."""
    token = _active.set(settings)
    try:
        yield
    finally:
        _active.reset(token)


def resolve_settings(initial_peers: Sequence[str] | str | None, config: SwarmConfig | None) -> SwarmSettings:
    """Returns the swarm to use; raises ConfigError if no peers are given anywhere, or an address is malformed."""
    settings = find_settings(initial_peers, config)
    if settings is None:
        raise ConfigError(
            "no swarm to join: pass initial_peers=[...] to from_pretrained, or load the model inside "
            'Trainer(strategy="swarm"), or set the environment variable SWARM_INITIAL_PEERS; '
            "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/Qm..., as 'swarm serve' prints it"
        )
    return settings


def find_settings(initial_peers: Sequence[str] | str | None, config: SwarmConfig | None) -> SwarmSettings | None:
    """Returns the swarm to use, or None if no peers are given anywhere.

    Raises:
        ConfigError: If an address is malformed.
    """
    active = _active.get()
    if initial_peers is None and active is not None:
        return active if config is None else SwarmSettings(initial_peers=active.initial_peers, config=config)
    if initial_peers is None:
        initial_peers = os.environ.get("SWARM_INITIAL_PEERS", "")
    if isinstance(initial_peers, str):
        initial_peers = initial_peers.replace(",", " ").split()
    peers = tuple(peer.strip() for peer in initial_peers)
    if not peers:
        return None
    for peer in peers:
        if not peer.startswith("/") or "/p2p/" not in peer:
            raise ConfigError(
                f"{peer!r} is not a peer address; expected one like /ip4/203.0.113.7/tcp/31337/p2p/Qm..., "
                "as 'swarm serve' prints it"
            )
    return SwarmSettings(initial_peers=peers, config=config or SwarmConfig())
