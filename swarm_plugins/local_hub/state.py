"""What a local Hub knows: its repositories, who may write, the faults to inject, and what was requested."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm_plugins.local_hub.repositories import HubStore

_ANY_USER = "user"
_MAX_REQUESTS = 10_000


@dataclass(frozen=True, slots=True)
class HubRequest:
    """One request that came in."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass(slots=True)
class HubFaults:
    """Faults injected into the next requests."""

    statuses: list[int] = field(default_factory=list)
    """Answers given instead of the next files, one each."""
    cut_after_bytes: list[int] = field(default_factory=list)
    """Bytes after which the connection of each of the next files breaks."""
    ignore_ranges: bool = False
    """Send whole files even if a range is requested."""
    is_down: bool = False
    """Close every connection without an answer."""
    routes: dict[str, list[int | str]] = field(default_factory=dict)
    """For each route (``create_repo``, ``preupload``, ``lfs_batch``, ``lfs_put``, ``commit``, ``create_tag`` ...), the
    fates of its next requests: a status, ``"cut"`` (closed before anything is done), ``"lost"`` (done, but the answer
    is lost) or ``"ok"``."""
    delays_s: dict[str, float] = field(default_factory=dict)
    """For each route, how long every request waits before anything is done."""

    def of_next(self, route: str) -> int | str:
        """Takes the next request's fault from the lists."""
        if self.is_down:
            return "cut"
        scripted = self.routes.get(route)
        return scripted.pop(0) if scripted else "ok"


class HubState:
    """Shared by all connections; each method may be called from any thread."""

    def __init__(self, root: str | Path | None, tokens: Mapping[str, str] | None) -> None:
        self.tokens = tokens
        self.store = HubStore(root)
        self.faults = HubFaults()
        self.requests: list[HubRequest] = []
        self.connections: dict[socket.socket, threading.Thread] = {}
        self._served: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def track(self, connection: socket.socket) -> None:
        """Records a connection and the thread that answers it, so that closing the Hub ends both."""
        with self._lock:
            self.connections[connection] = threading.current_thread()

    def untrack(self, connection: socket.socket) -> None:
        with self._lock:
            self.connections.pop(connection, None)

    def record(self, request: HubRequest) -> None:
        with self._lock:
            self.requests.append(request)
            del self.requests[:-_MAX_REQUESTS]

    def count(self, repo_id: str, path: str, num_bytes: int) -> None:
        """Counts bytes of a file that were sent."""
        with self._lock:
            self._served[repo_id, path] += num_bytes

    def pause(self, route: str) -> bool:
        """Waits for the route's injected delay; True if the Hub was closed meanwhile."""
        delay = self.faults.delays_s.get(route, 0.0)
        return delay > 0 and self._closing.wait(delay)

    def user(self, authorization: str | None) -> str | None:
        """Returns the user whose token a request carries; None without a valid one."""
        token = (authorization or "").removeprefix("Bearer ").strip()
        if not token:
            return None
        return _ANY_USER if self.tokens is None else self.tokens.get(token)

    def may_write(self, user: str | None, repo_id: str) -> bool:
        return user is not None and (self.tokens is None or repo_id.split("/")[0] == user)
