"""What ``recipes.benchmarks together`` and the processes of its members tell each other."""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a member trains."""

    directory: str
    initial_peers: tuple[str, ...]
    run_id: str | None
    """None: it trains alone."""
    steps_per_round: int
    part: str
    documents: int
    seed: int
    seconds: float
    looks: int
    """Number of adapters that are kept on the way, at equal distances, and evaluated afterwards."""
    learning_rate: float
    evaluates: bool
    """Whether it measures the held-out loss: peers of a run have the same adapters."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The model is loaded."""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What a member has reached."""

    seconds: tuple[float, ...]
    """Of each look, since the beginning."""
    losses: tuple[float, ...]
    """Held-out loss at each look, per token; empty if it was not measured."""
    steps: int
    rounds: int
    digest: str
    """Of the shared state at the end; empty if it trained alone."""
