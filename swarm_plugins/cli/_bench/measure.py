"""How things are measured: interleaved rounds, medians, CPU time and memory of whole process trees."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

__all__ = ["Arm", "Sample", "cpu_seconds", "interleave", "private_bytes", "process_tree"]


@dataclass(frozen=True)
class Sample:
    """One round of one arm."""

    seconds: float
    """Time of the measured part."""
    cpu_s: float
    """CPU seconds of all processes of the arm during the whole round."""


@dataclass
class Arm:
    """One of the things that are compared.

    ``run`` does one round and returns the seconds of the part that counts.
    """

    run: Callable[[], float]
    pids: tuple[int, ...]
    """Processes that work for this arm; their children count too."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median time of a round."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def median_cpu_s(self) -> float:
        """Median CPU time of a round."""
        return statistics.median(sample.cpu_s for sample in self.samples)


def interleave(
    arms: Iterable[Arm], *, rounds: int, warm_up: int = 1, on_round: Callable[[], object] = lambda: None
) -> None:
    """Runs the arms in turns, so that a machine that slows down or speeds up does so for all of them.

    The order is reversed every other round: none is always the one after a pause.
    """
    arms = list(arms)
    for index in range(warm_up + rounds):
        for arm in arms if index % 2 == 0 else reversed(arms):
            cpu = cpu_seconds(arm.pids)
            seconds = arm.run()
            if index >= warm_up:
                arm.samples.append(Sample(seconds, cpu_seconds(arm.pids) - cpu))
        on_round()


def process_tree(pids: Iterable[int]) -> list[psutil.Process]:
    """Returns living processes and all their descendants, each once."""
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
    """Returns the CPU seconds, user and system, that processes and their living descendants have used."""
    total = 0.0
    for process in process_tree(pids):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


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
