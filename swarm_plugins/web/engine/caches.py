"""Caches of conversations: the next turn prefills only what is new.

A cache of a swarm model is a session that holds servers' memory, so caches are few and short-lived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

_MIN_SHARED_TOKENS = 16
"""A shorter common beginning is computed again: it is hardly more than the template's own words."""


@dataclass
class _Kept:
    key: Hashable
    tokens: tuple[int, ...]
    cache: Any
    since: float


class CacheStore:
    """Keeps caches with the tokens that they hold, the newest ones, within bounds; safe to use from several threads.

    Args:
        max_bytes: Most bytes of keys and values in all caches together, wherever they lie.
        token_bytes: Bytes of keys and values of one token.
        max_caches: Most caches. Each one is a session on every server of its chain.
        max_age_s: Seconds after which an unused one is dropped.
        clock: Seconds, for tests.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        token_bytes: int,
        max_caches: int = 32,
        max_age_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_caches = max_caches
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self.token_bytes = token_bytes
        self._clock = clock
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable, tokens: Sequence[int]) -> tuple[Any, int]:
        """Removes the cache that holds most of the beginning of a prompt, and cuts it to that.

        A cache that shares less than half of its own tokens is left to its conversation.

        Args:
            key: Model with its adapter, and tenant.
            tokens: The prompt; its last token is never in a cache, since its logits are needed.

        Returns:
            The cache and the number of tokens in it; ``(None, 0)`` if none fits.
        """
        with self._lock:
            self._drop_old()
            best, shared = None, _MIN_SHARED_TOKENS - 1
            for kept in self._kept:
                count = min(_common(kept.tokens, tokens), len(tokens) - 1) if kept.key == key else 0
                if count > shared and 2 * count >= len(kept.tokens):
                    best, shared = kept, count
            if best is None:
                return None, 0
            self._kept.remove(best)
        if surplus := len(best.tokens) - shared:
            best.cache.crop(-surplus)
        return best.cache, shared

    def put(self, key: Hashable, tokens: Sequence[int], cache: Any) -> None:
        """Keeps a cache that holds some tokens, unless it is too large, too short to be useful or not croppable."""
        croppable = all(getattr(layer, "is_croppable", False) for layer in getattr(cache, "layers", ()))
        if not croppable or len(tokens) < _MIN_SHARED_TOKENS or len(tokens) * self.token_bytes > self.max_bytes:
            return
        with self._lock:
            self._kept.append(_Kept(key, tuple(tokens), cache, self._clock()))
            self._drop_old()
            while len(self._kept) > self.max_caches or self._bytes() > self.max_bytes:
                del self._kept[0]

    def drop_old(self) -> None:
        """Drops caches that have not been used for too long."""
        with self._lock:
            self._drop_old()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def _drop_old(self) -> None:
        oldest = self._clock() - self.max_age_s
        self._kept = [kept for kept in self._kept if kept.since >= oldest]

    def _bytes(self) -> int:
        return sum(len(kept.tokens) for kept in self._kept) * self.token_bytes


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two texts begin with alike."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
