"""The decode steps of a session on one server, and whether another server would be clearly faster."""

from __future__ import annotations

from collections import deque
from statistics import median

_KEPT = 32
"""Steps that are remembered."""
_CHECK_STEPS = 4
_CLEARLY = 2.0
_NOISE_S = 0.01
"""A session moves to a server that is faster by this factor and more."""
_MOVE_S = 0.2
"""Time of a move that does not depend on its length."""


class StepTimes:
    """Remembers how long steps took."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._left = _CHECK_STEPS

    def add(self, seconds: float) -> bool:
        """Records a step; returns whether it is time to compare."""
        self._recent.append(seconds)
        self._left -= 1
        if self._left > 0:
            return False
        self._left = _CHECK_STEPS
        return True

    def is_move_worth(self, step_s: float, replay_s: float) -> bool:
        """Returns whether the rest of a session should move.

        It should once the steps have taken longer, by as much as a replay would take, than they would have elsewhere:
        then no other rule is always better by more than a factor of two, however long the session lasts.

        Args:
            step_s: Seconds of a step elsewhere.
            replay_s: Seconds of the replay there.
        """
        now_s = median(list(self._recent)[-_CHECK_STEPS:])
        lost_s = sum(max(seconds - step_s, 0.0) for seconds in self._recent)
        return now_s > _CLEARLY * step_s + _NOISE_S and lost_s > replay_s + _MOVE_S

    def postpone(self) -> None:
        """Waits longer before the next comparison, because a move has failed."""
        self._left = _KEPT
