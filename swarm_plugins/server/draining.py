"""Draining: blocks that take no new sessions, until the last open one has ended or the time is over.

A server that moves drains the span it leaves; one that ends drains everything. Open sessions go on, with their forks,
and forward and backward requests are answered: a client that replans in time never notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from swarm_plugins.server.failures import RequestError
from swarm_plugins.transport.server_info import ServerInfo

_POLL_S = 0.05


class Draining:
    """Which blocks take new sessions; a part of each `Service`."""

    def __init__(self) -> None:
        self._kept: range | None = None
        self.is_leaving = False
        """Whether the server is about to end."""

    def shown(self, info: ServerInfo) -> ServerInfo:
        """Returns what a server announces, in the state ``draining`` if it is leaving."""
        return msgspec.structs.replace(info, state="draining") if self.is_leaving else info

    def begin(self, kept: range) -> None:
        """Refuses new sessions from now on, except on blocks that are ``kept``."""
        self._kept = kept

    def leave(self) -> None:
        """Refuses all new sessions, for good."""
        self.is_leaving = True

    def end(self) -> None:
        """Takes new sessions on all blocks again, unless the server is leaving."""
        self._kept = None

    def check(self, blocks: range) -> None:
        """Refuses a new session on blocks that are drained.

        Raises:
            RequestError: ``draining``, which makes clients look up the swarm again.
        """
        kept = range(0) if self.is_leaving else self._kept
        if kept is not None and not (blocks.start in kept and blocks.stop - 1 in kept):
            raise RequestError(
                "draining",
                f"this server is leaving blocks {blocks.start}:{blocks.stop} and takes no new session on them: "
                "look up the swarm again",
            )


async def wait_until_ended(num_open: Callable[[], int], longest_s: float) -> int:
    """Waits until no session, or no request, is open; returns how many are left after ``longest_s``."""
    deadline = asyncio.get_running_loop().time() + longest_s
    while (left := num_open()) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
    return left
