"""Answers on their way to readers that may take them slowly, or never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from swarm_plugins.server.failures import RequestError

_PEER_SHARE = 0.25
"""Share of the limit that one peer's answers may take, unless it is a single one."""


class UnsentAnswers:
    """Bounds the memory of answers that have not been sent.

    A small request can have an answer of hundreds of megabytes, which stays in memory until the other end has read it.

    Args:
        limit_bytes: Most bytes of all answers together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._of_peer: Counter[str] = Counter()

    @contextmanager
    def holding(self, peer: str, num_bytes: int) -> Iterator[None]:
        """Counts an answer while it is being sent.

        Raises:
            RequestError: ``overloaded`` if too much waits to be read.
        """
        own = self._of_peer[peer]
        if self._of_peer.total() + num_bytes > self.limit_bytes or (
            own and own + num_bytes > _PEER_SHARE * self.limit_bytes
        ):
            raise RequestError(
                "overloaded",
                f"answers of {own} bytes to this client and {self._of_peer.total()} bytes to all wait to be read, "
                f"{num_bytes} more exceed the limit of {self.limit_bytes}: read faster, or ask for less at once",
            )
        self._of_peer[peer] += num_bytes
        try:
            yield
        finally:
            self._of_peer[peer] -= num_bytes
            if not self._of_peer[peer]:
                del self._of_peer[peer]
