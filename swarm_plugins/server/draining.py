"""Draining: blocks that take no new sessions, until the last open one has ended or the time is over.

A server that moves drains the span it leaves; one that ends drains everything. Open sessions go on, with their forks,
and forward and backward requests are answered: a client that replans in time never notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from swarm_plugins.server.failures import RequestError
from swarm_plugins.transport.messages import ServerInfo

_POLL_S = 0.05


class Draining:
    """Which blocks take new sessions; a part of each `Service`."""

    def __init__(self) -> None:
        self._kept: range | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether no block takes new sessions: the server is about to end."""
        return self._kept is not None and not self._kept

    def shown(self, info: ServerInfo) -> ServerInfo:
        """Returns what a server announces, in the state ``draining`` if it is leaving."""
        return msgspec.structs.replace(info, state="draining") if self.is_leaving else info

    def begin(self, kept: range = range(0)) -> None:
        """Refuses new sessions from now on, except on blocks that are ``kept``."""
        self._kept = kept

    def end(self) -> None:
        """Takes new sessions again."""
        self._kept = None

    def check(self, blocks: range) -> None:
        """Refuses a new session on blocks that are drained.

        Raises:
            RequestError: ``draining``, which makes clients look up the swarm again.
        """
        if self._kept is not None and not (blocks.start in self._kept and blocks.stop - 1 in self._kept):
            raise RequestError(
                "draining",
                f"this server is leaving blocks {blocks.start}:{blocks.stop} and takes no new session on them: "
                "look up the swarm again",
            )


async def wait_until_ended(num_open: Callable[[], int], drain_s: float) -> int:
    """Waits until no session is open, ``drain_s`` at most; returns how many are left."""
    deadline = asyncio.get_running_loop().time() + drain_s
    while (left := num_open()) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
    return left
