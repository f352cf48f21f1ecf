"""Gives up a message whose bytes come too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm_plugins.transport import limits


class Pace:
    """Watches one body after the other while it arrives.

    Args:
        loop: Runs the timer.
        is_paused: Returns whether this end does not read now: then the sender is not to blame.
        give_up: Called with what the sender has done, for a message.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, is_paused: Callable[[], bool], give_up: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._is_paused = is_paused
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0
        """Of the body that arrives; 0: none does."""
        self._received = 0
        self._since = 0.0

    def begin(self, num_bytes: int) -> None:
        """Notes that a body begins to arrive."""
        self.num_bytes, self._received, self._since = num_bytes, 0, self._loop.time()

    def advance(self, num_bytes: int) -> None:
        """Notes bytes that have come."""
        self._received += num_bytes

    def watch(self) -> None:
        """Watches the body if there is one. Called when no more bytes are at hand: most bodies need no timer."""
        if self.num_bytes and self._timer is None:
            self._timer = self._loop.call_later(limits.FIRST_MESSAGE_TIMEOUT_S, self._look)

    def end(self) -> None:
        """Notes that the body is complete, or dropped. Idempotent."""
        self.num_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        allowed_s = limits.FIRST_MESSAGE_TIMEOUT_S + self._received / limits.MIN_RECEIVE_BYTES_PER_S
        took_s = self._loop.time() - self._since
        left_s = min(allowed_s, limits.MAX_MESSAGE_S) - took_s
        if self._is_paused():
            left_s = limits.FIRST_MESSAGE_TIMEOUT_S
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._give_up(f"has sent {self._received} of {self.num_bytes} bytes of a message in {took_s:.0f} s: too slow")
