"""A swarm in fast motion: servers join, crash, leave and move by the rules of this package, without a network.

Each simulated server sees the others' records late, loads blocks as slowly as a disk or a download does, and decides
with the same functions as a real one.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from swarm_plugins.errors import ConfigError
from swarm_plugins.routing.placement import Mobility, Move, Placed, is_safe, throughput
from swarm_plugins.routing.turns import Snapshot, Turns


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What happens in a simulation."""

    num_servers: int = 100
    """Servers at the start, and on average."""
    num_blocks: int = 32
    lengths: tuple[int, ...] = (4, 6, 8, 12, 16)
    """Blocks that fit in a server's memory; each is as likely."""
    spread: float = 0.7
    """Standard deviation of the logarithm of the servers' speeds."""
    pinned_share: float = 0.1
    """Servers that stay where they are."""
    tight_share: float = 0.3
    """Servers whose memory holds one span only."""
    warm_up_h: float = 1.0
    """All servers join in its first half; its figures do not count."""
    churn_h: float = 8.0
    """Servers join and leave for so long."""
    quiet_h: float = 3.0
    """Then none does."""
    lifetime_h: float = 8.0
    """How long a server stays, on average."""
    crash_share: float = 0.5
    """Servers that leave without a word: their record lives on for ``ttl_s``."""
    ttl_s: float = 60.0
    lag_s: float = 5.0
    """Until others see a new record."""
    check_s: float = 30.0
    """Between two looks of a server at the records."""
    load_block_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_servers < 1 or not self.lengths or max(self.lengths) > self.num_blocks or min(self.lengths) < 1:
            raise ConfigError(
                f"num_servers is {self.num_servers} and lengths {self.lengths}: expected at least 1 server, and "
                f"lengths of 1 to {self.num_blocks}, the blocks of the model"
            )

    @property
    def churn_begins_s(self) -> float:
        """Seconds of the warm-up."""
        return self.warm_up_h * 3600

    @property
    def churn_ends_s(self) -> float:
        """Seconds until no server joins or leaves any more."""
        return (self.warm_up_h + self.churn_h) * 3600

    @property
    def end_s(self) -> float:
        """Seconds in all."""
        return (self.warm_up_h + self.churn_h + self.quiet_h) * 3600


@dataclass
class Course:
    """What came of a scenario. Values hold from their time to the next."""

    scenario: Scenario
    times_s: list[float] = field(default_factory=list)
    throughputs: list[float] = field(default_factory=list)
    swarms: list[tuple[Placed, ...]] = field(default_factory=list)
    """The servers that serve, or could."""
    moves_s: list[float] = field(default_factory=list)
    """When a move began."""
    last_churn_s: float = 0.0
    server_hours: float = 0.0
    num_uncovered: int = 0
    """Blocks that lost their last server by a move, not by a departure."""

    def spells(self) -> Iterator[tuple[float, float, tuple[Placed, ...]]]:
        """Yields seconds, throughput and servers of each stretch after the warm-up."""
        ends = [*self.times_s[1:], self.scenario.end_s]
        for start, end, value, swarm in zip(self.times_s, ends, self.throughputs, self.swarms, strict=True):
            seconds = end - max(start, self.scenario.churn_begins_s)
            if seconds > 0:
                yield seconds, value, swarm

    def share_of(self, bound: Callable[[tuple[Placed, ...]], float]) -> float:
        """Returns the throughput over time as a share of a bound that depends on the servers."""
        spells = list(self.spells())
        most = sum(seconds * bound(swarm) for seconds, _, swarm in spells)
        return sum(seconds * value for seconds, value, _ in spells) / most if most else 1.0

    @property
    def moves_per_server_hour(self) -> float:
        """Moves after the warm-up, per server and hour."""
        after_s = self.scenario.churn_begins_s
        return sum(moved > after_s for moved in self.moves_s) / max(self.server_hours, 1e-9)

    @property
    def rest_s(self) -> float:
        """Seconds from the last departure or arrival to the beginning of the last move."""
        return max([0.0, *(moved - self.last_churn_s for moved in self.moves_s)])


def mean_coverage(num_blocks: int, servers: tuple[Placed, ...]) -> float:
    """Returns an upper bound of the throughput of any placement: the capacity spread evenly over all blocks."""
    return sum(one.rate * len(one.blocks) for one in servers) / num_blocks


@dataclass
class _Server:
    peer: str
    length: int
    rate: float
    mobility: Mobility
    leaves_s: float
    turns: Turns
    blocks: range | None = None
    """What it serves."""
    target: range | None = None
    """What it loads."""
    is_there: bool = True
    has_served: bool = False

    def record(self) -> Placed:
        """Returns what it announces."""
        shown = self.blocks or self.target or range(self.length)
        return Placed(
            peer=self.peer,
            start=shown.start,
            end=shown.stop,
            rate=self.rate,
            mobility=self.mobility,
            is_online=self.blocks is not None,
            target=self.target if self.has_served else None,
        )


def simulate(scenario: Scenario, progress: Callable[[float], object] = lambda _: None) -> Course:
    """Runs a scenario; ``progress`` is called with the share that is done."""
    return _Simulation(scenario).run(progress)


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.course = Course(scenario)
        self._random = random.Random(scenario.seed)
        self._names = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self._servers: dict[str, _Server] = {}
        self._records: dict[str, Placed] = {}
        self._snapshot: Snapshot | None = None

    def run(self, progress: Callable[[float], object]) -> Course:
        scenario = self.scenario
        for _ in range(scenario.num_servers):
            self._at(self._random.uniform(0, scenario.warm_up_h * 1800), self._join)
        mean_s = scenario.lifetime_h * 3600 / scenario.num_servers
        arrival_s = scenario.churn_begins_s
        while (arrival_s := arrival_s + self._random.expovariate(1 / mean_s)) < scenario.churn_ends_s:
            self._at(arrival_s, self._join)
        while self._events and self._events[0][0] < scenario.end_s:
            self._now, _, event = heapq.heappop(self._events)
            progress(self._now / scenario.end_s)
            event()
        return self.course

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._at(self._now + seconds, event)

    def _seen(self) -> Snapshot:
        """Returns what all servers see; computed once for all of them."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self.scenario.num_blocks, list(self._records.values()))
        return self._snapshot

    def _announce(self, server: _Server) -> None:
        record = server.record()

        def arrive() -> None:
            if server.is_there:
                self._records[server.peer] = record
                self._snapshot = None

        self._after(self.scenario.lag_s, arrive)

    def _note(self) -> None:
        """Writes down the present state."""
        able = [one for one in self._servers.values() if one.has_served]
        course, scenario = self.course, self.scenario
        hours = (self._now - course.times_s[-1]) / 3600 if course.times_s else 0.0
        if course.times_s and course.times_s[-1] >= scenario.churn_begins_s:
            course.server_hours += hours * len(course.swarms[-1])
        course.times_s.append(self._now)
        serving = [replace(one.record(), target=None) for one in able if one.blocks is not None]
        course.throughputs.append(throughput(scenario.num_blocks, serving) if serving else 0.0)
        course.swarms.append(tuple(one.record() for one in able))

    def _join(self) -> None:
        scenario, rng = self.scenario, self._random
        length = rng.choice(scenario.lengths)
        compute, network = rng.lognormvariate(0.0, scenario.spread), rng.lognormvariate(0.0, scenario.spread)
        kinds: list[Mobility] = ["pinned", "drops-first", "loads-first"]
        shares = [scenario.pinned_share, scenario.tight_share, 1 - scenario.pinned_share - scenario.tight_share]
        peer = f"peer{next(self._names)}"
        server = _Server(
            peer=peer,
            length=length,
            rate=100 * min(compute * 8 / length, 2 * network),
            mobility=rng.choices(kinds, shares)[0],
            leaves_s=max(self._now, scenario.churn_begins_s) + rng.expovariate(1 / (scenario.lifetime_h * 3600)),
            turns=Turns(peer),
        )
        self._servers[peer] = server
        self.course.last_churn_s = self._now
        server.target = self._seen().span_of_new(peer, length, server.rate)
        self._announce(server)

        def begin() -> None:
            # Another that joined at the same moment may have chosen the same blocks.
            server.target = self._seen().span_of_new(peer, length, server.rate)
            self._announce(server)
            self._after(length * scenario.load_block_s, lambda: self._arrive(server))

        self._after(2 * scenario.lag_s, begin)
        if server.leaves_s < scenario.churn_ends_s:
            self._at(server.leaves_s, lambda: self._leave(server))

    def _arrive(self, server: _Server) -> None:
        if not server.is_there:
            return
        is_new = not server.has_served
        server.blocks, server.target, server.has_served = server.target, None, True
        self._announce(server)
        self._note()
        if is_new and server.mobility != "pinned":
            self._after(self._random.uniform(0, self.scenario.check_s), lambda: self._check(server))

    def _leave(self, server: _Server) -> None:
        server.is_there = False
        del self._servers[server.peer]
        self.course.last_churn_s = self._now
        self._note()
        is_crash = self._random.random() < self.scenario.crash_share

        def vanish() -> None:
            self._records.pop(server.peer, None)
            self._snapshot = None

        self._after(self.scenario.ttl_s if is_crash else self.scenario.lag_s, vanish)

    def _check(self, server: _Server) -> None:
        """A server looks whether it is its turn."""
        if not server.is_there:
            return
        self._after(self.scenario.check_s, lambda: self._check(server))
        if server.target is not None:
            return
        move = server.turns.mine(self._seen(), self._now)
        if move is not None:
            pause_s = self._random.uniform(0, 1 if move.closes_gap else self.scenario.check_s / 2)
            self._after(pause_s, lambda: self._begin(server, move))

    def _begin(self, server: _Server, move: Move) -> None:
        """It looks again after a random pause, announces the move, and begins it if no other does."""
        if not server.is_there or server.target is not None or server.turns.mine(self._seen(), self._now) != move:
            return
        server.target = move.blocks
        self._announce(server)

        def begin() -> None:
            if not server.is_there:
                return
            others = [one for one in self._seen().movers if one.peer != server.peer]
            if others or not is_safe(self.scenario.num_blocks, self._seen().servers, move):
                server.target = None
                self._announce(server)
                return
            self.course.moves_s.append(self._now)
            if server.mobility == "drops-first":
                self._drop(server)
            self._after(server.length * self.scenario.load_block_s, lambda: self._end_move(server, move))

        self._after(2 * self.scenario.lag_s, begin)

    def _drop(self, server: _Server) -> None:
        self._count_uncovered(server, range(0))
        server.blocks = None
        self._note()

    def _end_move(self, server: _Server, move: Move) -> None:
        if not server.is_there:
            return
        if server.blocks is not None:
            if not is_safe(self.scenario.num_blocks, self._seen().servers, move):
                # Others of the old span have left meanwhile: it stays.
                server.target = None
                self._announce(server)
                return
            self._count_uncovered(server, move.blocks)
        self._arrive(server)

    def _count_uncovered(self, server: _Server, kept: range) -> None:
        others = [one.blocks for one in self._servers.values() if one.peer != server.peer and one.blocks is not None]
        own = server.blocks or range(0)
        lost = [block for block in own if block not in kept and not any(block in other for other in others)]
        self.course.num_uncovered += len(lost)
