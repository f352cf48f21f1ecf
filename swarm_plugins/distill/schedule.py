"""When the distillation term counts, and how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from swarm_plugins.errors import ConfigError

_KINDS = ("stop", "linear")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The weight of the distillation term at each optimizer step."""

    stop_at: int | float
    """First step without the term: a step as an integer, or a fraction of the run, from 0.0 to 1.0."""
    alpha: float = 1.0
    """Weight of the term at the first step."""
    kind: Literal["stop", "linear"] = "stop"
    """``stop``: the full weight until the stop. ``linear``: falls to zero at the stop."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_at, bool) or not isinstance(self.stop_at, int | float):
            raise ConfigError(
                f"stop_at={self.stop_at!r} must be a step such as 4000, or a fraction of the run such as 0.7"
            )
        if isinstance(self.stop_at, int) and self.stop_at < 0:
            raise ConfigError(f"stop_at={self.stop_at} must be at least 0; 0 is a run without distillation")
        if isinstance(self.stop_at, float) and not 0 <= self.stop_at <= 1:
            raise ConfigError(
                f"stop_at={self.stop_at} is a float, thus a fraction of the run, and must lie from 0.0 to 1.0; give a "
                "number of steps as an integer"
            )
        if not 0 <= self.alpha <= 1:
            raise ConfigError(
                f"alpha={self.alpha} must lie from 0 to 1: it is the weight of the distillation term, which is added "
                "to the student's own loss"
            )
        if self.kind not in _KINDS:
            raise ConfigError(f"schedule={self.kind!r} must be one of {', '.join(map(repr, _KINDS))}")

    def stop_step(self, total_steps: float) -> int:
        """Returns the first step without the term, in a run of so many optimizer steps.

        Raises:
            ConfigError: If the stop is a fraction and the run has no known end.
        """
        if isinstance(self.stop_at, int):
            return self.stop_at
        if not math.isfinite(total_steps) or total_steps < 0:
            raise ConfigError(
                f"stop_at={self.stop_at} is a fraction, but the number of steps of the run is not known; limit the run "
                "(max_steps or max_epochs), or give stop_at as a number of steps"
            )
        # At least one, so that a trial run of one step goes the same way.
        return max(1, round(self.stop_at * total_steps)) if self.stop_at > 0 else 0

    def weight(self, step: int, stop_step: int) -> float:
        """Returns the weight of the term at an optimizer step, counted from 0."""
        if step >= stop_step:
            return 0.0
        return self.alpha * (1 - step / stop_step) if self.kind == "linear" else self.alpha


def check_temperature(temperature: float) -> None:
    """Raises ConfigError unless the temperature is a positive, finite number."""
    if not (0 < temperature < math.inf):
        raise ConfigError(
            f"temperature={temperature} must be above 0 and finite; 1 leaves the distributions as they are"
        )
