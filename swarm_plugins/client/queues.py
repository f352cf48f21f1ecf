"""This client's training requests at each server: how many may be there, and how long one takes without the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from swarm_plugins.recent import Recent

MOST_AT_ONCE = 8
"""Requests at one server, which keeps twice as many of one client if no other has any."""


@dataclass
class _Queue:
    """This client's requests at one server."""

    most: int = MOST_AT_ONCE
    num_waiting: int = 0
    """Requests that are not sent yet."""
    num_sent: int = 0
    """Requests that are sent and not answered."""
    sent_tokens: int = 0
    """Of these."""
    num_posted: int = 0
    """Requests that the server was told of ahead of their inputs, and has not answered."""
    posted_tokens: int = 0
    """Of these."""
    asked_tokens: int = 0
    """Of all requests that are not answered, sent or not."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_free(self, tokens: int, room: int) -> bool:
        has_room = not room or self.sent_tokens + tokens <= room
        return not self.num_sent or (self.num_sent < self.most and has_room)

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Queues:
    """This client's requests for training, which each server carries out one after another."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._answered_at: Recent[tuple[str, str], float] = Recent()

    @contextmanager
    def asking(self, peer: str, tokens: int) -> Iterator[int]:
        """Yields the tokens of requests that a server has to answer before one that is now made, sent or not."""
        queue = self._queues.setdefault(peer, _Queue())
        queue.asked_tokens += tokens
        try:
            yield queue.asked_tokens - tokens
        finally:
            queue.asked_tokens -= tokens
            self._tidy(peer)

    def tokens_before(self, peer: str, tokens: int) -> int:
        """Returns the tokens that a server has got before those of the request sent to it last."""
        queue = self._queues.get(peer)
        return 0 if queue is None else max(0, queue.sent_tokens + queue.posted_tokens - tokens)

    @asynccontextmanager
    async def turn(self, peer: str, tokens: int, *, room: int) -> AsyncIterator[None]:
        """Waits until a request may be sent; it counts until the ``with`` block ends.

        Args:
            peer: The server.
            tokens: Of the request.
            room: Most tokens at the server at once; a request that is alone there may have more. 0: any number.
        """
        queue = self._queues.setdefault(peer, _Queue())
        queue.num_waiting += 1
        try:
            while not queue.is_free(tokens, room):
                await queue.changed.wait()
        finally:
            queue.num_waiting -= 1
        queue.num_sent += 1
        queue.sent_tokens += tokens
        try:
            yield
        finally:
            queue.num_sent -= 1
            queue.sent_tokens -= tokens
            queue.change()
            self._tidy(peer)

    def _tidy(self, peer: str) -> None:
        queue = self._queues[peer]
        if not (queue.asked_tokens or queue.num_waiting or queue.num_sent):
            del self._queues[peer]

    def claim(self, peer: str, tokens: int, *, room: int) -> bool:
        """Counts a request that will wait at the server for its input, until `release`; arguments are those of `turn`.

        Returns False, and counts nothing, if too many do. It takes no other request's turn: those may be what its input
        comes from, on whatever way through servers that have some blocks in common.
        """
        queue = self._queues.setdefault(peer, _Queue())
        has_room = not room or queue.posted_tokens + tokens <= room
        if queue.num_posted and not (queue.num_posted < MOST_AT_ONCE and has_room):
            return False
        queue.num_posted += 1
        queue.posted_tokens += tokens
        queue.asked_tokens += tokens
        return True

    def release(self, peer: str, tokens: int) -> None:
        """Ends what `claim` has begun."""
        queue = self._queues[peer]
        queue.num_posted -= 1
        queue.posted_tokens -= tokens
        queue.asked_tokens -= tokens
        self._tidy(peer)

    def refused(self, peer: str) -> bool:
        """Notes that a server had no place for a request; returns whether it may have one when others are answered."""
        queue = self._queues.get(peer)
        if queue is None or not queue.num_sent:
            return False
        queue.most = min(queue.most, queue.num_sent)
        return True

    def answered(self, peer: str, rpc: str, *, sent: float, now: float, round_trip_s: float) -> float:
        """Notes an answer, and returns how long it would have taken without others of this client before it.

        Args:
            peer: Who has answered.
            rpc: What was asked.
            sent: When, in seconds of any clock.
            now: When the answer came.
            round_trip_s: Of a message and its answer.
        """
        before = self._answered_at.get((peer, rpc), sent)
        self._answered_at[peer, rpc] = now
        # A server that has just answered begins with this one, whose way there is over.
        return now - max(sent, before - round_trip_s)
