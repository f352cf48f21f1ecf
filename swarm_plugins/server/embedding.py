"""A server as a child of ``LocalSwarm``: sends events to its parent, takes addresses from it, and ends with it.

Parent and child speak JSON, one line each: stdin brings the list of peers to join by, stdout takes events. stdin
stays open for as long as the parent lives.

Imports nothing heavy: the child must notice early that its parent has gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from swarm_plugins.errors import ConfigError

_POLL_S = 0.5
_LAST_RESORT_S = 15.0


class Embedding:
    """The line to the parent."""

    def __init__(self, events_fd: int, parent: int) -> None:
        self._events_fd = events_fd
        self._parent = parent

    @classmethod
    def take_over(cls) -> Embedding:
        """Takes stdout for events, so that nothing else can be written there, and watches the parent."""
        events_fd = os.dup(1)
        os.dup2(2, 1)
        embedding = cls(events_fd, os.getppid())
        threading.Thread(target=embedding._watch_parent, name="watch the parent", daemon=True).start()
        return embedding

    def read_peers(self) -> list[str]:
        """Waits for the parent's line: the addresses to join by.

        Raises:
            ConfigError: If it is not a list of addresses.
        """
        line = sys.stdin.readline()
        try:
            peers = json.loads(line)
        except ValueError:
            peers = None
        if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
            raise ConfigError(f"expected one line with a JSON list of addresses on stdin, got {line[:200]!r}")
        return peers

    def send(self, event: str, **values: object) -> None:
        """Tells the parent about an event."""
        try:
            os.write(self._events_fd, json.dumps({"event": event, **values}).encode() + b"\n")
        except OSError:
            # The parent has gone or reads no more: the watch ends this process if it has gone.
            return

    def _watch_parent(self) -> None:
        # The kernel's signal at the parent's death is tied to the thread that started this process, which may end
        # long before the parent does; the parent's id is not.
        while os.getppid() == self._parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_RESORT_S)
        os._exit(1)
