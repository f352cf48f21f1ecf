"""A client's requests at one server: how many may be there, and how long one takes without the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

MOST_AT_ONCE = 8
"""Requests at one server, which keeps twice as many of one client if no other has any."""


class Backlog:
    """Requests of training at one server, which carries them out one after another.

    Some are sent with their inputs; of others the server was told ahead, and their inputs come from other servers. The
    latter take no turn of the former: their inputs may come of those, on whatever way through servers that have some
    blocks in common.
    """

    def __init__(self) -> None:
        self._most = MOST_AT_ONCE
        self._num_sent = 0
        """Requests that are sent and not answered."""
        self._sent_tokens = 0
        self._num_told = 0
        """Requests that the server was told of ahead of their inputs, and has not answered."""
        self._told_tokens = 0
        self._asked_tokens = 0
        """Of all requests that are not answered, sent or not."""
        self._answered_at: dict[str, float] = {}
        """By rpc."""
        self._changed = asyncio.Event()

    @contextmanager
    def asking(self, tokens: int) -> Iterator[int]:
        """Yields the tokens of requests that the server has to answer before one that is now made, sent or not."""
        self._asked_tokens += tokens
        try:
            yield self._asked_tokens - tokens
        finally:
            self._asked_tokens -= tokens

    def tokens_before(self, tokens: int) -> int:
        """Returns the tokens that the server has got before those of the request sent to it last."""
        return max(0, self._sent_tokens + self._told_tokens - tokens)

    @asynccontextmanager
    async def turn(self, tokens: int, *, room: int) -> AsyncIterator[None]:
        """Waits until a request may be sent; it counts until the ``with`` block ends.

        Args:
            tokens: Of the request.
            room: Most tokens at the server at once; a request that is alone there may have more. 0: any number.
        """
        while self._num_sent and not (self._num_sent < self._most and _fits(self._sent_tokens + tokens, room)):
            await self._changed.wait()
        self._num_sent += 1
        self._sent_tokens += tokens
        try:
            yield
        finally:
            self._num_sent -= 1
            self._sent_tokens -= tokens
            if not self._num_sent:
                # What it had no place for was too much then; the next batch finds out anew.
                self._most = MOST_AT_ONCE
            self._changed.set()
            self._changed = asyncio.Event()

    def claim(self, tokens: int, *, room: int) -> bool:
        """Counts a request that will wait at the server for its input, until `release`; arguments are those of `turn`.

        Returns False, and counts nothing, if too many do.
        """
        if self._num_told and not (self._num_told < MOST_AT_ONCE and _fits(self._told_tokens + tokens, room)):
            return False
        self._num_told += 1
        self._told_tokens += tokens
        self._asked_tokens += tokens
        return True

    def release(self, tokens: int) -> None:
        """Ends what `claim` has begun."""
        self._num_told -= 1
        self._told_tokens -= tokens
        self._asked_tokens -= tokens

    def refused(self) -> bool:
        """Notes that the server had no place for a request; returns whether it may have one later."""
        if not self._num_sent:
            return False
        self._most = min(self._most, self._num_sent)
        return True

    def answered(self, rpc: str, *, sent: float, now: float, round_trip_s: float) -> float:
        """Notes an answer, and returns how long it would have taken without others of this client before it.

        Args:
            rpc: What was asked.
            sent: When, in seconds of any clock.
            now: When the answer came.
            round_trip_s: Of a message and its answer.
        """
        before = self._answered_at.get(rpc, sent)
        self._answered_at[rpc] = now
        # A server that has just answered begins with this one, whose way there is over.
        return now - max(sent, before - round_trip_s)


def _fits(tokens: int, room: int) -> bool:
    return not room or tokens <= room
