"""What a link between two peers does to their bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm_plugins.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Way:
    """One direction of a link.

    Raises:
        ConfigError: If a figure is out of its range.
    """

    delay_ms: float = 0.0
    """How long a byte travels."""
    jitter_ms: float = 0.0
    """Most that is added to the delay, at random. Bytes stay in order."""
    mbit: float | None = None
    """Rate in Mbit/s; None: without limit."""
    loss: float = 0.0
    """Probability that a packet of 1,500 bytes has to be sent again; what follows waits for it."""

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms"):
            _check_ms(name, getattr(self, name))
        if self.mbit is not None and not (_is_finite(self.mbit) and self.mbit > 0):
            raise ConfigError(f"invalid mbit {self.mbit!r}: give a rate above 0, in Mbit/s")
        if not (_is_finite(self.loss) and self.loss < 1):
            raise ConfigError(f"invalid loss {self.loss!r}: give a probability of at least 0 and less than 1")


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between two peers; without ``back``, both directions are alike.

    Raises:
        ConfigError: If a figure is out of its range.
    """

    rtt_ms: float = 0.0
    """Round-trip time; each direction takes half of it."""
    jitter_ms: float = 0.0
    """As in `Way`, for each direction."""
    mbit: float | None = None
    """As in `Way`, for each direction."""
    loss: float = 0.0
    """As in `Way`, for each direction."""
    back: Way | None = None
    """The direction of answers, if it differs."""

    def __post_init__(self) -> None:
        _check_ms("rtt_ms", self.rtt_ms)
        if not isinstance(self.back, Way | None):
            raise ConfigError(f"invalid back {self.back!r}: give one direction, such as Way(delay_ms=20, mbit=100)")
        self.ways()

    def ways(self) -> tuple[Way, Way]:
        """Returns the direction of requests and that of answers."""
        there = Way(delay_ms=self.rtt_ms / 2, jitter_ms=self.jitter_ms, mbit=self.mbit, loss=self.loss)
        return there, self.back or there


def _is_finite(figure: object) -> bool:
    """Returns whether a figure is a number of at least 0."""
    return isinstance(figure, (int, float)) and 0 <= figure < math.inf


def _check_ms(name: str, figure: object) -> None:
    if not _is_finite(figure):
        raise ConfigError(f"invalid {name} {figure!r}: give milliseconds, 0 or more")


NETWORKS = {
    "1gbit-5ms": Link(rtt_ms=5, mbit=1000),
    "100mbit-5ms": Link(rtt_ms=5, mbit=100),
    "100mbit-100ms": Link(rtt_ms=100, mbit=100),
}
"""The networks of Petals' evaluation (Borzunov et al. 2023, "Petals", section 3.3)."""
