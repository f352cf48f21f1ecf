"""Where servers should be: the span of one that joins, and which one should move next.

A server of rate ``r`` (tokens a second through its whole span) adds ``r`` to the throughput of each of its blocks. The
swarm is as fast as its slowest block, so moves are judged by a soft minimum over the blocks, and first of all by how
many blocks have no server. After Borzunov et al. 2023, "Distributed inference and fine-tuning of large language models
over the Internet", section 3.2; the rule by which one server at a time moves is our own.

All functions are pure: whoever has the same records computes the same move.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from swarm_plugins.borders import NO_TIES, pieces
from swarm_plugins.errors import ConfigError
from swarm_plugins.routing.span_table import Floats, SpanTable, Step

Mobility = Literal["pinned", "drops-first", "loads-first"]
"""``pinned``: stays. ``drops-first``: memory holds one span only. ``loads-first``: serves the old span meanwhile."""

_MIN_GAIN = 0.2
"""A move is worth it if it brings this share of what the same server would bring if it were new."""
_MAX_RATE = 10.0
"""A rate above this many times the median counts as so many: servers announce their rates themselves."""
_MAX_LOSS = 0.25
"""The first of several moves may lower the throughput by this share until the others are made."""
_AHEAD_UP_TO = 24
"""Servers among which several moves are looked ahead; larger swarms are smooth enough for single ones."""
_DEPTH = 3
"""Moves that are looked ahead."""
_WIDTH = 24
"""Tables that are kept at each depth."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A server, with the data that placement needs."""

    peer: str
    start: int
    end: int
    rate: float
    """Tokens per second through the whole span. 0: unknown, counted as the median of the others."""
    mobility: Mobility = "pinned"
    is_online: bool = True
    """Whether it serves its blocks already. One that still loads counts, but none may leave a block to it."""
    target: range | None = None
    """The span that it is moving to, where it counts; none may leave a block to it, old or new. None: it stays."""

    @property
    def blocks(self) -> range:
        """The span that it serves, or loads first."""
        return range(self.start, self.end)

    @property
    def is_relied_on(self) -> bool:
        """Whether others may leave its blocks to it."""
        return self.is_online and self.target is None


class Move(NamedTuple):
    """A server that should move, and where to."""

    peer: str
    blocks: range
    closes_gap: bool
    """Whether it brings back blocks that have no server: it should not wait."""


def rank(peer: str) -> bytes:
    """Returns what orders peers alike everywhere, and unlike their ids, which one can choose for a prefix."""
    return hashlib.blake2b(peer.encode(), digest_size=8).digest()


def throughput(num_blocks: int, servers: Sequence[Placed]) -> float:
    """Returns the tokens per second of the whole swarm: those of its slowest block."""
    return float(_table(num_blocks, servers).coverage.min())


def best_span(
    num_blocks: int, servers: Sequence[Placed], length: int, rate: float = 0.0, tied: Collection[int] = NO_TIES
) -> range:
    """Returns the consecutive blocks where a new server raises the swarm's throughput most; the first wins a tie.

    They are fewer than ``length`` if tied blocks leave no place for as many.

    Args:
        num_blocks: Blocks of the model.
        servers: Those that are there.
        length: Blocks of the new server.
        rate: See `Placed`.
        tied: Blocks that run on the server of the block before; see `swarm_plugins.borders`.

    Raises:
        ConfigError: If the model has fewer blocks, none are wanted, or no piece of the model is as small.
    """
    if not 1 <= length <= num_blocks:
        raise ConfigError(f"cannot serve {length} blocks: expected 1 to {num_blocks}, the blocks of the model")
    for fewer in range(length, 0, -1):
        # It comes from outside of the model, where it covers nothing.
        new = Placed(peer="", start=num_blocks, end=num_blocks + fewer, rate=rate, is_online=False)
        for step in _table(num_blocks, [*servers, new], tied).best_steps([len(servers)]):
            return range(step.start, step.start + fewer)
    needed = min(len(piece) for piece in pieces(range(num_blocks), tied))
    raise ConfigError(f"cannot serve {length} blocks: {needed} of this model's or more only run together")


def next_move(num_blocks: int, servers: Sequence[Placed], tied: Collection[int] = NO_TIES) -> Move | None:
    """Returns the move that helps the swarm most, or None if none helps clearly. No move uncovers a block.

    A gap is closed by any server that can. Otherwise a move has to raise the soft minimum by `_MIN_GAIN` of what the
    server would add to a balanced swarm if it were new; in small swarms, the first of a few moves may do so together
    with the others. As each move raises it, servers come to rest unless others join or leave. Ties are broken by a hash
    of the peer's id.
    """
    order = sorted(servers, key=lambda one: rank(one.peer))
    movable = [index for index, one in enumerate(order) if one.mobility != "pinned" and one.is_relied_on]
    if not movable:
        return None
    table = _table(num_blocks, order, tied)
    steps = table.best_steps(movable)
    if not steps:
        return None
    step: Step | None = steps[0]
    closes_gap = steps[0].num_gaps < table.num_gaps
    if not closes_gap and len(order) <= _AHEAD_UP_TO:
        step = _first_of_several(table, movable)
    elif not closes_gap and table.gain(steps[0]) < _MIN_GAIN * table.share(steps[0].server):
        return None
    if step is None:
        return None
    return Move(order[step.server].peer, range(step.start, step.start + len(order[step.server].blocks)), closes_gap)


class _Path(NamedTuple):
    first: Step
    share: float
    """The movers' share of the capacity."""
    table: SpanTable


def _first_of_several(table: SpanTable, movable: Sequence[int]) -> Step | None:
    """Returns the first of the few moves that help most together, if they help clearly: a beam search.

    After the first move the others are found again, or better ones: the costs that can be reached never rise, so that
    nothing goes in circles.
    """
    paths: list[_Path | None] = [None]
    best: tuple[float, Step] | None = None
    lowest = (1 - _MAX_LOSS) * table.coverage.min()
    for _ in range(_DEPTH):
        found: dict[bytes, tuple[float, _Path]] = {}
        for path in paths:
            before = table if path is None else path.table
            for step in before.best_steps(movable, _WIDTH):
                after = before.after(step)
                if step.num_gaps > table.num_gaps or after.coverage.min() < lowest:
                    continue
                share = table.share(step.server) + (0.0 if path is None else path.share)
                first = step if path is None else path.first
                found.setdefault(after.starts.tobytes(), (step.cost, _Path(first, share, after)))
                if table.gain(step) >= _MIN_GAIN * share and (best is None or step.cost < best[0]):
                    best = (step.cost, first)
        paths = [path for _, path in sorted(found.values(), key=lambda one: one[0])[:_WIDTH]]
    return None if best is None else best[1]


def is_safe(num_blocks: int, servers: Sequence[Placed], move: Move) -> bool:
    """Returns whether every block that the mover holds keeps a server, after the move and while it is made."""
    mover = next((one for one in servers if one.peer == move.peer), None)
    if mover is None:
        return True
    kept = range(0) if mover.mobility == "drops-first" else move.blocks
    others = [one.blocks for one in servers if one.is_relied_on and one.peer != move.peer]
    return all(block in kept or any(block in held for held in others) for block in mover.blocks)


def _table(num_blocks: int, servers: Sequence[Placed], tied: Collection[int] = NO_TIES) -> SpanTable:
    spans = [one.target or one.blocks for one in servers]
    return SpanTable(
        np.array([span.start for span in spans], dtype=np.int64),
        np.array([len(span) for span in spans], dtype=np.int64),
        _rates(servers),
        np.array([one.is_relied_on for one in servers], dtype=np.bool_),
        np.array([one.mobility != "drops-first" for one in servers], dtype=np.bool_),
        num_blocks,
        tied,
    )


def _rates(servers: Sequence[Placed]) -> Floats:
    """Returns rates that are finite and above 0; unknown ones as the median, invented ones bounded."""
    rates = np.array([one.rate if math.isfinite(one.rate) else 0.0 for one in servers], dtype=np.float64)
    known = rates[rates > 0]
    median = float(np.median(known)) if len(known) else 1.0
    return np.where(rates > 0, np.minimum(rates, _MAX_RATE * median), median)
