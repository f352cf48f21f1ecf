"""Measuring: interleaved rounds, medians, CPU time and memory of whole process trees."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from rich.progress import Progress

# The kernel counts CPU time in hundredths of a second.
_SHORTEST_CPU_S = 0.1


@dataclass(frozen=True)
class Sample:
    """One round of one arm."""

    seconds: float
    """Duration of the measured part."""
    cpu_s: float
    """CPU seconds of all the arm's processes in the whole round."""


@dataclass
class Arm:
    """One side of a comparison."""

    run: Callable[[], float]
    """Runs one round and returns the seconds of the measured part."""
    pids: tuple[int, ...]
    """Processes of this arm; their children count too."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median time of a round."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def cpu_s(self) -> float:
        """CPU time of all rounds."""
        return sum(sample.cpu_s for sample in self.samples)

    def cpu_ratio(self, base: Arm) -> float | None:
        """Returns the ratio to another arm's CPU time; None if that is too short to measure."""
        return self.cpu_s / base.cpu_s if base.cpu_s >= _SHORTEST_CPU_S else None


def interleave(
    arms: Iterable[Arm], *, rounds: int, warm_up: int = 1, on_round: Callable[[], object] = lambda: None
) -> None:
    """Runs the arms in turns, so that changes in the machine's speed affect all of them.

    The order is reversed every other round, so that no arm always follows a pause.
    """
    arms = list(arms)
    for index in range(warm_up + rounds):
        for arm in arms if index % 2 == 0 else reversed(arms):
            cpu = cpu_seconds(arm.pids)
            seconds = arm.run()
            if index >= warm_up:
                arm.samples.append(Sample(seconds, cpu_seconds(arm.pids) - cpu))
        on_round()


def take_turns(name: str, arms: Iterable[Arm], *, rounds: int, progress: Progress) -> None:
    """Runs the arms in turns, after a round to warm up, and shows how far they are."""
    bar = progress.add_task(name, total=rounds + 1)
    interleave(arms, rounds=rounds, on_round=partial(progress.advance, bar))


def process_tree(pids: Iterable[int]) -> list[psutil.Process]:
    """Returns the living processes and all their descendants, each once."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                found[one.pid] = one
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the CPU seconds (user and system) used by processes and their living descendants."""
    total = 0.0
    for process in process_tree(pids):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def own(file: str, field: str) -> int:
    """Returns a byte count that the kernel keeps for this process, such as ``VmHWM`` in ``status``."""
    for line in Path("/proc/self", file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, *unit = value.split()
            return int(number) * (1024 if unit else 1)
    return 0


def private_bytes(pids: Iterable[int], *, settle_s: float = 1.0) -> int:
    """Returns the proportional set size of processes and their descendants: shared pages count by their share."""
    time.sleep(settle_s)
    total = 0
    for process in process_tree(pids):
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def divided_cores() -> tuple[list[int], list[int]] | None:
    """Returns the first and second half of the cores that this process may use; None if they cannot be divided."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return (cores[:half], cores[half:]) if half else None


@contextlib.contextmanager
def pinned(cores: Collection[int] | None) -> Iterator[None]:
    """Restricts this thread, and the processes that it starts inside the context, to some cores; None: to no others."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Bystanders:
    """Measures the CPU use of all other processes during a run."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), _machine_cpu_s(), _own_cpu_s())

    def cores(self) -> float:
        """Returns the mean number of cores used by others; call it after this process's children have ended."""
        seconds, machine, own = self._before
        others = (_machine_cpu_s() - machine) - (_own_cpu_s() - own)
        return max(0.0, others / (time.monotonic() - seconds))


def _machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _own_cpu_s() -> float:
    """Returns the CPU seconds of this process and of all its descendants, those too that have ended."""
    total = 0.0
    for process in process_tree([os.getpid()]):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
