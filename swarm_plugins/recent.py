"""A bounded dictionary, above all of other peers: identities are free, so many of them must not fill memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_PEERS = 4096
"""Peers, or pairs of them, that are remembered."""


class Recent(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets the entry set longest ago when there are too many.

    Args:
        most: The most entries.
    """

    def __init__(self, most: int = MAX_PEERS) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        """Sets an entry, which is forgotten last then."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Once(Generic[K]):
    """Tells what has not been said yet."""

    def __init__(self) -> None:
        self._said: Recent[K, None] = Recent()

    def is_first(self, key: K) -> bool:
        """Returns whether this is the first time that it is asked about ``key``."""
        if key in self._said:
            return False
        self._said[key] = None
        return True
