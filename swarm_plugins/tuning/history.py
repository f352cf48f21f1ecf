"""A run's history as a bounded number of points for a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_plugins.tuning.computing import Computed
from swarm_plugins.tuning.datums import Datum

REWARD = "reward"
"""A text's input with one number, or several to be averaged: it is only noted."""


@dataclass(frozen=True)
class Tally:
    """Sums over some calls or steps."""

    loss: float = 0.0
    num_losses: int = 0
    """Positions whose loss is not 0: a weight or an advantage of 0 masks the others."""
    reward: float = 0.0
    num_rewards: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    """Until the calls were answered, once it was their turn."""

    @classmethod
    def of(cls, datums: Sequence[Datum], results: Sequence[Computed], seconds: float) -> Tally:
        """Returns the sums of a call."""
        rewards = [float(one.inputs[REWARD].double().mean()) for one in datums if _has_reward(one)]
        return cls(
            loss=sum(float(one.losses.sum()) for one in results),
            num_losses=sum(int(one.losses.count_nonzero()) for one in results),
            reward=sum(rewards),
            num_rewards=len(rewards),
            num_tokens=sum(len(one.tokens) for one in datums),
            seconds=seconds,
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.loss + other.loss,
            self.num_losses + other.num_losses,
            self.reward + other.reward,
            self.num_rewards + other.num_rewards,
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Point:
    """What some steps in a row were like."""

    step: int
    """The last of them."""
    loss: float
    """Mean of a position."""
    reward: float | None
    """Mean of a text; None if none was sent."""
    tokens_per_s: float
    """Tokens of texts, while calls were answered."""


class History:
    """Steps of a run: each a point of its own, and of more steps than points several in one.

    Args:
        max_points: Most points, an even number.
    """

    def __init__(self, max_points: int = 256) -> None:
        self._max_points = max_points
        self._stride = 1
        self._open = Tally()
        self._tallies: list[tuple[int, Tally]] = []

    def add(self, call: Tally) -> None:
        """Counts a call for the next step."""
        self._open += call

    def drop(self) -> None:
        """Forgets the calls since the last step, as it did not take place."""
        self._open = Tally()

    def step(self, number: int, seconds: float) -> None:
        """Ends a step, which itself took so many seconds."""
        tally, self._open = self._open + Tally(seconds=seconds), Tally()
        tallies = self._tallies
        if tallies and (number - 1) % self._stride:
            tallies = [*tallies[:-1], (number, tallies[-1][1] + tally)]
        else:
            tallies = [*tallies, (number, tally)]
        if len(tallies) > self._max_points:
            self._stride *= 2
            pairs = [tallies[index : index + 2] for index in range(0, len(tallies), 2)]
            tallies = [(pair[-1][0], pair[0][1] + pair[1][1]) if len(pair) == 2 else pair[0] for pair in pairs]
        self._tallies = tallies

    def points(self) -> list[Point]:
        """Returns the points so far; safe while another thread adds some."""
        return [
            Point(
                step=step,
                loss=one.loss / max(1, one.num_losses),
                reward=one.reward / one.num_rewards if one.num_rewards else None,
                tokens_per_s=one.num_tokens / one.seconds if one.seconds else 0.0,
            )
            for step, one in self._tallies
        ]


def _has_reward(datum: Datum) -> bool:
    reward = datum.inputs.get(REWARD)
    return reward is not None and reward.numel() > 0 and bool(reward.isfinite().all())
