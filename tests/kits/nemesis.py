"""A nemesis: faults that strike a swarm's servers one after another, on a schedule that its seed determines.

```python
with LyingSwarm(directory, spans=[(0, 2), (0, 2), (2, 4), (2, 4)]) as swarm, Nemesis(swarm, seed=7) as nemesis:
    print(nemesis)  # the seed and the schedule: the same seed strikes in the same order
    while nemesis.is_running:
        ...  # work whose results a fault must not change
```

One fault at a time, so with two servers for each block a living and honest one is always left.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import psutil

from kits.faulty_swarm import FaultySwarm
from kits.liars import Liar, LyingSwarm
from recipes.benchmarks.links import Link
from recipes.benchmarks.links.line import Line
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm import LocalSwarm

FaultKind = Literal[
    "kill",  # the server vanishes; at the end of the fault it starts again with the same identity and no memory
    "freeze",  # the process stands still and goes on where it was
    "freeze_daemon",  # only the libp2p daemon stands still
    "other_version",  # it starts again with another model, and at the end with the right one
    "partition",  # nothing arrives, in either direction
    "partition_to",  # what the client sends is lost
    "partition_from",  # what the server sends is lost
    "slow_link",  # each message takes long
    "lie",  # a new server takes its place and lies; at the end an honest one takes over
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one server."""

    kind: FaultKind
    server: int
    """Index of the server."""
    start_s: float
    """Seconds after the start of the nemesis."""
    length_s: float

    def __str__(self) -> str:
        return f"{self.start_s:6.1f} s  {self.kind:<14} server {self.server}  for {self.length_s:.1f} s"


class Victim(Protocol):
    """A swarm whose servers can be struck."""

    @property
    def kinds(self) -> Sequence[FaultKind]:
        """Faults that can strike here."""

    @property
    def num_servers(self) -> int:
        """Servers, with indices from 0."""

    def strike(self, fault: Fault) -> Callable[[], object]:
        """Begins a fault; returns what ends it."""


def schedule(
    seed: int,
    *,
    num_servers: int,
    duration_s: float,
    kinds: Sequence[FaultKind],
    length_s: tuple[float, float] = (0.3, 2.0),
    pause_s: tuple[float, float] = (0.2, 1.0),
) -> list[Fault]:
    """Returns faults that do not overlap; a pure function of its arguments.

    Args:
        seed: Determines everything.
        num_servers: Servers to strike.
        duration_s: End of the last fault at the latest.
        kinds: Kinds to draw from; each is drawn once before any is drawn again.
        length_s: Shortest and longest fault.
        pause_s: Shortest and longest time between faults.

    Raises:
        ConfigError: If a kind is unknown, or there is nothing to draw from.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise ConfigError(f"invalid kinds of faults {unknown or list(kinds)}: expected some of {', '.join(KINDS)}")
    dice = random.Random(seed)
    found: list[Fault] = []
    now = dice.uniform(*pause_s)
    bag: list[FaultKind] = []
    while True:
        bag = bag or dice.sample(list(kinds), len(kinds))
        length = dice.uniform(*length_s)
        if now + length > duration_s:
            return found
        found.append(Fault(kind=bag.pop(), server=dice.randrange(num_servers), start_s=now, length_s=length))
        now += length + dice.uniform(*pause_s)


class Nemesis:
    """Strikes a swarm in a thread, until its schedule is over or it is closed.

    Args:
        swarm: The swarm; it must be running.
        seed: Determines the schedule. None: drawn, and shown by ``print(nemesis)``.
        duration_s: Length of the schedule.
        kinds: Kinds of faults. None: all that can strike this swarm.
        other_model: Directory that ``other_version`` serves; without it that fault is left out.
        length_s: Shortest and longest fault.
        pause_s: Shortest and longest time between faults.

    Raises:
        ConfigError: If a kind of fault is unknown or cannot strike this swarm.
    """

    def __init__(
        self,
        swarm: LyingSwarm | LocalSwarm | Victim,
        *,
        seed: int | None = None,
        duration_s: float = 30.0,
        kinds: Sequence[FaultKind] | None = None,
        other_model: str | Path | None = None,
        length_s: tuple[float, float] = (0.3, 2.0),
        pause_s: tuple[float, float] = (0.2, 1.0),
    ) -> None:
        self.victim = _victim(swarm, other_model)
        self.seed = random.randrange(1 << 32) if seed is None else seed
        possible = self.victim.kinds
        impossible = [kind for kind in kinds or () if kind in KINDS and kind not in possible]
        if impossible:
            raise ConfigError(f"{impossible[0]!r} cannot strike this swarm: expected some of {', '.join(possible)}")
        self.schedule = schedule(
            self.seed,
            num_servers=self.victim.num_servers,
            duration_s=duration_s,
            kinds=possible if kinds is None else kinds,
            length_s=length_s,
            pause_s=pause_s,
        )
        self.num_struck = 0
        """Faults that have begun."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __str__(self) -> str:
        return "\n".join([f"nemesis with seed {self.seed}, {len(self.schedule)} faults:", *map(str, self.schedule)])

    @property
    def is_running(self) -> bool:
        """Whether faults are still to come, or one has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Nemesis:
        """Starts the clock."""
        self._thread = threading.Thread(target=self._run, name="nemesis", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the fault of the moment, and lets the rest be; raises what went wrong in striking. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        started = time.monotonic()
        try:
            for fault in self.schedule:
                if self._stop.wait(max(0.0, started + fault.start_s - time.monotonic())):
                    return
                heal = self.victim.strike(fault)
                self.num_struck += 1
                self._stop.wait(fault.length_s)
                heal()
        except BaseException as exc:  # noqa: BLE001 - raised by close()
            self._error = exc

    def __enter__(self) -> Nemesis:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_LINE_FAULTS: dict[FaultKind, dict[str, bool | Link]] = {
    "freeze": {"is_frozen": True},
    "partition": {"loses_requests": True, "loses_answers": True},
    "partition_to": {"loses_requests": True},
    "partition_from": {"loses_answers": True},
    "slow_link": {"link": Link(rtt_ms=500)},
}
_MIRRORED: dict[FaultKind, FaultKind] = {"partition_to": "partition_from", "partition_from": "partition_to"}
"""The same faults for a line that the server has opened."""


def _strike_line(line: Line, kind: FaultKind) -> Callable[[], object]:
    faults = _LINE_FAULTS[kind]
    sound = {name: getattr(line, name) for name in faults}

    def change(values: Mapping[str, bool | Link]) -> None:
        for name, value in values.items():
            setattr(line, name, value)

    change(faults)
    return lambda: change(sound)


class _InProcess:
    """Strikes servers of this process through the transport that reaches them."""

    def __init__(self, swarm: LyingSwarm, other_model: str | Path | None) -> None:
        self._swarm = swarm
        self._other_model = other_model
        self.num_servers = len(swarm.peers)

    @property
    def kinds(self) -> Sequence[FaultKind]:
        # A lie shows only where answers are checked.
        left_out = set() if self._swarm.config.verify == "on" else {"lie"}
        left_out |= {"other_version"} if self._other_model is None else set()
        return [kind for kind in KINDS if kind not in {"freeze_daemon", *left_out}]

    def strike(self, fault: Fault) -> Callable[[], object]:
        swarm, peer = self._swarm, self._swarm.peers[fault.server]
        if fault.kind in _LINE_FAULTS:
            return _strike_line(swarm.transport.line(peer), fault.kind)
        if fault.kind == "lie":
            liar = swarm.replace(peer, Liar("scaled", factor=1.05))
            return lambda: swarm.replace(liar)
        swarm.kill(peer)
        if fault.kind == "other_version":
            swarm.restart(peer, directory=self._other_model)

        def back() -> None:
            if fault.kind == "other_version":
                swarm.kill(peer)
            swarm.restart(peer)

        return back


class _Processes:
    """Strikes the processes of a local swarm."""

    def __init__(self, swarm: LocalSwarm, other_model: str | Path | None) -> None:
        self._swarm = swarm
        self._other_model = other_model
        self.num_servers = len(swarm.servers)

    @property
    def kinds(self) -> Sequence[FaultKind]:
        left_out = {"other_version"} if self._other_model is None else set()
        if not isinstance(self._swarm, FaultySwarm):
            left_out |= {"partition", "partition_to", "partition_from", "slow_link", "lie"}
        return [kind for kind in KINDS if kind not in left_out]

    def strike(self, fault: Fault) -> Callable[[], object]:
        server = self._swarm.servers[fault.server]
        if isinstance(self._swarm, FaultySwarm):
            if fault.kind == "lie":
                self._swarm.replace_by_liar(fault.server)
                return lambda: self._swarm.restart(fault.server)
            if fault.kind in _LINE_FAULTS and fault.kind != "freeze":
                return self._strike_lines(self._swarm, fault)
        if fault.kind in ("freeze", "freeze_daemon"):
            daemons = psutil.Process(server.pid).children()
            frozen = daemons if fault.kind == "freeze_daemon" else [psutil.Process(server.pid), *daemons]
            for process in frozen:
                process.suspend()

            def thaw() -> None:
                for process in frozen:
                    process.resume()

            return thaw
        server.kill()
        if fault.kind == "other_version":
            self._swarm.restart(fault.server, model=self._other_model)
        return lambda: self._swarm.restart(fault.server)

    @staticmethod
    def _strike_lines(swarm: FaultySwarm, fault: Fault) -> Callable[[], object]:
        mirrored = _MIRRORED.get(fault.kind, fault.kind)
        struck = [_strike_line(line, fault.kind) for line in swarm.lines_to(fault.server)]
        struck += [_strike_line(line, mirrored) for line in swarm.lines_from(fault.server)]

        def heal() -> None:
            for heal_line in struck:
                heal_line()

        return heal


def _victim(swarm: LyingSwarm | LocalSwarm | Victim, other_model: str | Path | None) -> Victim:
    if isinstance(swarm, LyingSwarm):
        return _InProcess(swarm, other_model)
    return _Processes(swarm, other_model) if isinstance(swarm, LocalSwarm) else swarm
