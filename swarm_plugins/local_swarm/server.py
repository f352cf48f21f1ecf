"""One process of a local swarm."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from swarm_plugins.child import Process
from swarm_plugins.errors import ConfigError


class _Event(msgspec.Struct):
    """A line of a server's standard output."""

    event: str
    peer_id: str = ""
    addresses: tuple[str, ...] = ()
    start: int = 0
    end: int = 0


class LocalServer(Process):
    """One server process, started by [`LocalSwarm`][swarm_plugins.LocalSwarm]; its standard error goes to a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(command, environment, log)
        self._events: dict[str, _Event] = {}

    @property
    def span(self) -> tuple[int, int]:
        """First block served, and one past the last."""
        if "ready" not in self._events:
            raise ConfigError("this server is not serving yet: start the swarm first")
        return (self._events["ready"].start, self._events["ready"].end)

    @property
    def peer_id(self) -> str:
        """Base58 id of the peer."""
        if "joined" not in self._events:
            raise ConfigError("this server has not joined yet: start the swarm first")
        return self._events["joined"].peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that reach it; none before it has joined."""
        return self._events["joined"].addresses if "joined" in self._events else ()

    @property
    def why(self) -> str:
        """The end of its log, to be appended to a message."""
        lines = self.end_of_log
        return ":\n" + "\n".join(lines) if lines else "; its log is empty"

    def tell_peers(self, addresses: Sequence[str]) -> None:
        """Sends the addresses to join by, which the process waits for."""
        # The caller waits for events next, and finds out there if the process has died.
        with contextlib.suppress(OSError):
            self.write(msgspec.json.encode(list(addresses)))

    def listen(self) -> None:
        """Reads new events, without waiting."""
        with contextlib.suppress(EOFError):
            while (line := self.read_line(0.0)) is not None:
                event = msgspec.json.decode(line, type=_Event)
                self._events[event.event] = event

    def has_reached(self, event: str) -> bool:
        """Returns whether it has ``joined``, so that others can join by its addresses, or is ``ready`` to serve."""
        return event in self._events
