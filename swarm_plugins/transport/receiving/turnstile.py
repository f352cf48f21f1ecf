"""Whose message is decoded and answered next: one at a time, and peers take turns.

Decoding a message and starting its work hold up the event loop, which all streams share. If each was handled as it
comes, a peer with a hundred streams, all full of small messages, would leave one message of a hundred to others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

_Turn = asyncio.Future[None]


class Turnstile:
    """Lets one message through in each round of the event loop; groups take turns, and in a group its peers.

    Args:
        group: Returns the group of a peer.
    """

    def __init__(self, group: Callable[[str], str]) -> None:
        self._group = group
        self._lines: OrderedDict[str, OrderedDict[str, deque[_Turn]]] = OrderedDict()
        """By group and peer; whose turn it is comes first."""
        self._is_taken = False

    async def enter(self, peer: str) -> None:
        """Waits until it is the turn of a message; if none has been let through in this round, not at all."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._let_next)
            return
        turn = loop.create_future()
        self._lines.setdefault(self._group(peer), OrderedDict()).setdefault(peer, deque()).append(turn)
        await turn

    def _let_next(self) -> None:
        while self._lines:
            turn = self._take_first()
            if not turn.done():  # its stream may have ended
                turn.set_result(None)
                turn.get_loop().call_soon(self._let_next)  # behind the task that it wakes
                return
        self._is_taken = False

    def _take_first(self) -> _Turn:
        """Removes the first message of the first peer of the first group; both go to the end."""
        group, peers = self._lines.popitem(last=False)
        peer, line = peers.popitem(last=False)
        turn = line.popleft()
        if line:
            peers[peer] = line
        if peers:
            self._lines[group] = peers
        return turn
