"""How busy a thread is: an exponential average of its busy share."""

from __future__ import annotations

import math

__all__ = ["BusyMeter"]


class BusyMeter:
    """Averages busy (1) and idle (0) time, recent seconds more than old ones.

    One thread calls ``begin`` and ``end``; any thread may read.

    Args:
        window_s: Time constant of the average.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        """Starts idle."""
        self._window_s = window_s
        # One tuple, replaced as a whole: a reader in another thread never sees half an update.
        self._state: tuple[float, float, bool] | None = None

    def begin(self, now: float) -> None:
        """Notes that work begins."""
        self._state = (now, self.share(now), True)

    def end(self, now: float) -> None:
        """Notes that work ends."""
        self._state = (now, self.share(now), False)

    def share(self, now: float) -> float:
        """Returns the average at time ``now``, between 0 and 1."""
        if self._state is None:
            return 0.0
        since, value, is_busy = self._state
        goal = 1.0 if is_busy else 0.0
        return goal + (value - goal) * math.exp(-max(0.0, now - since) / self._window_s)
