"""The decode steps of a session on one server, and whether another server would be clearly faster."""

from __future__ import annotations

from collections import deque
from statistics import median

from swarm_plugins.book.rules import Rules


class StepTimes:
    """Remembers how long steps took."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._recent: deque[float] = deque(maxlen=rules.kept_steps)
        self._left = rules.compared_steps

    def add(self, seconds: float) -> bool:
        """Records a step; returns whether it is time to compare."""
        self._recent.append(seconds)
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._rules.compared_steps
        return True

    def is_move_worth(self, step_s: float, replay_s: float) -> bool:
        """Returns whether the rest of a session should move.

        It should once the steps have taken longer, by as much as a replay would take, than they would have elsewhere:
        then no other rule is always better by more than a factor of two, however long the session lasts.

        Args:
            step_s: Seconds of a step elsewhere.
            replay_s: Seconds of the replay there.
        """
        rules = self._rules
        now_s = median(list(self._recent)[-rules.compared_steps :])
        lost_s = sum(max(seconds - step_s, 0.0) for seconds in self._recent)
        is_clear = now_s > rules.clearly_faster * step_s + rules.move_noise_s
        return is_clear and lost_s > replay_s + rules.move_s

    def postpone(self) -> None:
        """Waits longer before the next comparison, because a move has failed."""
        self._left = self._rules.kept_steps
