"""A server as a child of ``LocalSwarm``: sends events to its parent, takes addresses from it, and ends with it.

Parent and child speak JSON, one line each: stdin brings the list of peers to join by, stdout takes events. stdin
stays open for as long as the parent lives.

Imports nothing heavy: the child must notice early that its parent has gone.
"""

from __future__ import annotations

import json
import os
import select
import sys

from swarm_plugins.child import end_with
from swarm_plugins.errors import ConfigError


class Embedding:
    """The line to the parent."""

    def __init__(self, events_fd: int) -> None:
        self._events_fd = events_fd

    @classmethod
    def take_over(cls) -> Embedding:
        """Takes stdout for events, so that nothing else can be written there, and watches the parent."""
        events_fd = os.dup(1)
        os.dup2(2, 1)
        end_with(os.getppid())
        return cls(events_fd)

    def read_peers(self) -> list[str]:
        """Waits for the parent's line: the addresses to join by.

        Raises:
            ConfigError: If it is not a list of addresses, or the parent has gone.
        """
        line = sys.stdin.readline()
        try:
            peers = json.loads(line)
        except ValueError:
            peers = None
        if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
            raise ConfigError(f"expected one line with a JSON list of addresses on stdin, got {line[:200]!r}")
        # If it died before this process looked up its parent, `end_with` watches the wrong one.
        asked = select.poll()
        asked.register(sys.stdin, select.POLLHUP)
        if asked.poll(0):
            raise ConfigError("the process that started this server has ended, so the server ends, too")
        return peers

    def send(self, event: str, **values: object) -> None:
        """Tells the parent about an event."""
        try:
            os.write(self._events_fd, json.dumps({"event": event, **values}).encode() + b"\n")
        except OSError:
            # The parent has gone or reads no more: `end_with` ends this process if it has gone.
            return
