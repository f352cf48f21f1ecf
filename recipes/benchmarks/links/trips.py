"""How many messages, one after the other, work needs: what distance costs, without a clock."""

from __future__ import annotations

from collections import Counter


class Trips:
    """Counts the longest chain of one-way messages, each sent by the receiver of the one before and after it arrived.

    So does a Lamport clock (1978). What a peer sends may not depend on what it got before, so the count is exact only
    while one piece of work is under way.
    """

    def __init__(self) -> None:
        self._length: Counter[str] = Counter()

    def length(self, peer: str) -> int:
        """Returns the length of the longest chain that has arrived at a peer."""
        return self._length[peer]

    def departs(self, sender: str) -> int:
        """Returns the length of a chain that ends with a message sent now."""
        return self._length[sender] + 1

    def arrives(self, receiver: str, length: int) -> None:
        """Notes the arrival of the last message of a chain."""
        self._length[receiver] = max(self._length[receiver], length)
