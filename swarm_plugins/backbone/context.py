"""Finds where a model's blocks run: from the argument, the active strategy, or the environment, in this order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import SwarmConnection, connect
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.text import parse_offload

IN_MEMORY = "none"
"""Instead of settings of offloading: nothing is offloaded, all blocks are in memory."""


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


@dataclass(frozen=True, kw_only=True)
class OnThisMachine:
    """All blocks run in this process."""

    offload: OffloadConfig | None
    """How experts are offloaded. None: all weights are in memory."""
    device: str | None = None
    """Where they run. None: a CUDA device if experts are offloaded and there is one, else the CPU."""

    @classmethod
    def read(cls, offload: OffloadConfig | str, option: str = "offload") -> OnThisMachine:
        """Returns the place of a config, or of its text; ``none`` is memory.

        Raises:
            ConfigError: If the text is malformed; names ``option``.
        """
        if isinstance(offload, OffloadConfig):
            return cls(offload=offload)
        if not isinstance(offload, str):
            raise ConfigError(
                f"{option} is {offload!r}; expected an OffloadConfig, its text such as 'fast=8GB', or {IN_MEMORY!r} "
                "for all blocks in memory"
            )
        return cls(offload=None if offload.strip() == IN_MEMORY else parse_offload(offload, option))


Place = SwarmSettings | OnThisMachine

_active: ContextVar[Place | None] = ContextVar("active_place", default=None)


@contextlib.contextmanager
def active_place(place: Place) -> Iterator[None]:
    """Makes a place the default for models loaded inside; strategies wrap ``configure_model`` in it."""
    token = _active.set(place)
    try:
        yield
    finally:
        _active.reset(token)


def resolve_place(
    initial_peers: Sequence[str] | str | None, config: SwarmConfig | None, offload: OffloadConfig | str | None = None
) -> Place:
    """Returns where to run a model's blocks; raises ConfigError as `find_place` does, or if no place is given."""
    place = find_place(initial_peers, config, offload)
    if place is None:
        raise ConfigError(
            "no swarm to join: pass initial_peers=[...] to from_pretrained, or load the model inside "
            'Trainer(strategy="swarm"), or set the environment variable SWARM_INITIAL_PEERS; '
            "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/Qm..., as 'swarm serve' prints it. To run the blocks "
            f"on this machine, pass offload='fast=8GB' (experts on disk) or offload={IN_MEMORY!r} (all in memory)"
        )
    return place


def find_place(
    initial_peers: Sequence[str] | str | None, config: SwarmConfig | None, offload: OffloadConfig | str | None = None
) -> Place | None:
    """Returns where to run a model's blocks, or None if no place is given anywhere.

    Raises:
        ConfigError: If an address or the settings of offloading are malformed, or two places are given.
    """
    active = _active.get()
    if initial_peers is not None and (offload is not None or isinstance(active, OnThisMachine)):
        raise ConfigError(
            "initial_peers names a swarm and offload this machine, but blocks run in one place: leave one of them out"
        )
    if offload is not None:
        return OnThisMachine.read(offload)
    if initial_peers is None and active is not None:
        if isinstance(active, OnThisMachine) or config is None:
            return active
        return SwarmSettings(initial_peers=active.initial_peers, config=config)
    if initial_peers is not None:
        return _swarm_of(initial_peers, config)
    named, offload = os.environ.get("SWARM_INITIAL_PEERS", ""), os.environ.get("SWARM_OFFLOAD")
    if not offload:
        return _swarm_of(named, config)
    if named.strip():
        raise ConfigError(
            "SWARM_INITIAL_PEERS names a swarm and SWARM_OFFLOAD this machine, but blocks run in one place: unset one "
            "of them"
        )
    return OnThisMachine.read(offload, "SWARM_OFFLOAD")


def _swarm_of(initial_peers: Sequence[str] | str, config: SwarmConfig | None) -> SwarmSettings | None:
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
