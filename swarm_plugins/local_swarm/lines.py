"""What may lie between the servers of a local swarm and all who call them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec


class Ports(msgspec.Struct, frozen=True):
    """Where servers listen, and where others reach them."""

    own: tuple[int, ...]
    """A server's own port, which nobody calls directly."""
    for_clients: tuple[int, ...]
    """The port that it announces."""
    for_servers: tuple[tuple[int, ...], ...]
    """``for_servers[caller][called]``."""


@runtime_checkable
class Lines(Protocol):
    """Carries the connections to and between servers: the hook by which a `LocalSwarm` gets distance or faults.

    ``recipes/benchmarks/links`` in a checkout has one that adds delay, rate and loss. A port cannot tell who calls, so
    each caller has one of its own. But peers tell each other all ports that they know, so only one kind is open at a
    time: those between servers while they join, then those for clients.
    """

    def start(self, num_servers: int) -> Ports:
        """Begins to listen."""
        ...

    def admit(self, server: int) -> None:
        """Lets a server connect to the others, which clients cannot reach by its ports; `shut` ends that."""
        ...

    def shut(self) -> None:
        """Keeps the connections between servers as they are, and lets clients connect to all of them."""
        ...

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        ...
