"""Trainers of a run in processes of their own, see `run_member`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_servers import WarmServers

from swarm_plugins import LocalSwarm

HERE = Path(__file__).parent
RUN = {"steps_per_round": 2, "straggler_s": 30.0, "dead_s": 5.0, "poll_s": 0.25}
_WAIT_S = 240.0


class Process:
    """A Trainer's process, and what it has said so far."""

    def __init__(self, warm: WarmServers, directory: Path, seed: int, **settings: Any) -> None:
        run = RUN | settings.pop("run", {})
        arguments = [str(directory), json.dumps({"seed": seed, "run": run} | settings)]
        errors, stderr = os.pipe()
        self._stderr = os.fdopen(errors, "rb")
        try:
            self._process = warm.start([sys.executable, str(HERE / "run_member.py"), *arguments], stderr)
        finally:
            os.close(stderr)
        self.lines: list[dict[str, Any]] = []
        self.digests: dict[int, str] = {}
        self.errors = ""
        self._readers = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith(b"{"):
                said = json.loads(line)
                if "round" in said:
                    assert self.digests.setdefault(said["round"], said["digest"]) == said["digest"]
                self.lines.append(said)

    def _read_errors(self) -> None:
        for line in self._stderr:
            self.errors += line.decode()

    def wait_for(self, what: Callable[[Process], bool]) -> None:
        until = time.monotonic() + _WAIT_S
        while not what(self):
            assert self._process.poll() is None or what(self), self.errors[-3000:]
            assert time.monotonic() < until, self.errors[-3000:]
            time.sleep(0.05)

    def reaches(self, round_: int) -> None:
        self.wait_for(lambda one: any(line.get("round", -1) >= round_ for line in one.lines))

    def begin(self) -> None:
        self.wait_for(lambda one: bool(one.lines))
        self._say("begin")

    def end(self) -> int:
        self._say("end")
        return self.ended()

    def _say(self, word: str) -> None:
        self._process.stdin.write(f"{word}\n".encode())

    def ended(self) -> int:
        status = self._process.wait(timeout=_WAIT_S)
        for reader in self._readers:
            reader.join(timeout=10)
        return status

    def kill(self) -> None:
        self._process.kill()
        self.ended()

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            stream.close()


@pytest.fixture(scope="module")
def warm_trainers(swarm: LocalSwarm) -> Iterator[WarmServers]:
    """Starts Trainers from one process that has imported what they need."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SWARM_INITIAL_PEERS": " ".join(swarm.initial_peers),
    }
    warm = WarmServers(environment, (), ["trainer_kit", "swarm_plugins.transport.lasting"])
    warm.open()
    yield warm
    warm.close()


@pytest.fixture
def start(warm_trainers: WarmServers, model: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start_one(seed: int, **settings: Any) -> Process:
        started.append(Process(warm_trainers, model, seed, **settings))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def check_survivors(start: Callable[..., Process], *, num_rounds: int) -> None:
    """Of four Trainers one is killed, one sends garbage, one is late: all that live have the same adapter."""
    first, killed, garbage, late = (start(seed, step_s=0.1, sends_garbage=seed == 2) for seed in range(4))
    for one in (first, killed, garbage):
        one.begin()
        one.reaches(0)
    killed.wait_for(lambda one: any(line.get("peers") == 3 for line in one.lines))
    begin = max(first.digests)
    killed.reaches(begin + 3)
    killed.kill()
    late.begin()
    late.wait_for(lambda one: bool(one.digests))
    first.reaches(max(begin + num_rounds, max(late.digests) + 3))
    assert first.end() == 0, first.errors[-3000:]
    garbage.kill()
    last = max(first.digests)
    late.reaches(last)
    rounds = set(range(begin, last + 1))
    joined = min(late.digests)
    assert begin < joined < last
    # One that was killed may have been the only one to close its last round.
    del killed.digests[max(killed.digests)]
    for one, its in ((killed, range(begin, begin + 3)), (garbage, rounds), (late, range(joined, last + 1))):
        # Not all: one that gets no processor for long takes over the state of the others, who have gone on.
        common = sorted({*its} & set(one.digests) & set(first.digests))
        assert len(common) > len(its) // 2
        assert [one.digests[round_] for round_ in common] == [first.digests[round_] for round_ in common]
    # Garbage that can be read is counted; its norm is bounded.
    told = [line for line in first.lines if line.get("round", -1) > begin]
    assert sum(line["counted"] >= 2 for line in told) > num_rounds // 2
    assert max(line["loss"] for line in told) < 2 * told[0]["loss"]
