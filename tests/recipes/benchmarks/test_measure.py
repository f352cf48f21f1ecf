from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from recipes.benchmarks import measure
from recipes.benchmarks.measure import (
    Arm,
    Bystanders,
    Sample,
    cpu_seconds,
    divided_cores,
    interleave,
    pinned,
    private_bytes,
    process_tree,
)

HOLD = "import sys; held = bytearray(b'x' * {}); print('ready', flush=True); sys.stdin.read()"
SPIN = "import sys, time; end = time.process_time() + 0.35\nwhile time.process_time() < end: pass\nprint('ready', flush=True); sys.stdin.read()"  # noqa: E501


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate(timeout=10)


def test_arms_take_turns_and_the_order_is_reversed_every_other_round() -> None:
    order: list[str] = []

    def arm(name: str, seconds: float) -> Arm:
        def run() -> float:
            order.append(name)
            return seconds

        return Arm(run, (os.getpid(),))

    interleave([arm("a", 1.0), arm("b", 2.0)], rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_warm_up_rounds_do_not_count() -> None:
    times = iter([100.0, 3.0, 1.0, 2.0])
    arm = Arm(lambda: next(times), (os.getpid(),))
    interleave([arm], rounds=3, warm_up=1)
    assert [sample.seconds for sample in arm.samples] == [3.0, 1.0, 2.0]
    assert arm.median_s == 2.0


def test_cpu_ratio_is_of_all_rounds_and_absent_below_the_clock() -> None:
    base, other = Arm(lambda: 0.0, ()), Arm(lambda: 0.0, ())
    base.samples += [Sample(1.0, 0.2), Sample(1.0, 0.3)]
    other.samples += [Sample(1.0, 0.4), Sample(1.0, 0.6)]
    assert other.cpu_ratio(base) == pytest.approx(2.0)
    base.samples[:] = [Sample(1.0, 0.01)]
    assert other.cpu_ratio(base) is None


def test_cpu_seconds_counts_children() -> None:
    with running(SPIN) as child:
        alone = cpu_seconds([child.pid])
        # User and system time are cut to hundredths, each by itself.
        assert alone >= 0.3
        assert cpu_seconds([os.getpid()]) >= alone


def test_private_bytes_sees_what_a_process_holds() -> None:
    with running(HOLD.format(0)) as empty, running(HOLD.format(100_000_000)) as full:
        held = private_bytes([full.pid], settle_s=0.0) - private_bytes([empty.pid], settle_s=0.0)
    assert held == pytest.approx(100e6, rel=0.05)


def test_a_process_that_is_gone_counts_as_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=10)
    assert process_tree([process.pid]) == []
    assert cpu_seconds([process.pid]) == 0.0


def test_bystanders_are_what_the_machine_did_less_what_we_did(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, machine, own = iter([100.0, 110.0]), iter([50.0, 65.0]), iter([2.0, 7.0])
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(measure, "_machine_cpu_s", lambda: next(machine))
    monkeypatch.setattr(measure, "_own_cpu_s", lambda: next(own))
    assert Bystanders().cores() == pytest.approx((15.0 - 5.0) / 10.0)


def test_children_that_live_are_no_bystanders() -> None:
    work = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nsys.stdin.read()"
    before = measure._own_cpu_s()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert measure._own_cpu_s() - before >= 0.4
        child.communicate()


def test_a_process_named_twice_counts_once() -> None:
    assert len({one.pid for one in process_tree([os.getpid()] * 2)}) == len(process_tree([os.getpid()] * 2))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin processes")
def test_pinned_processes_stay_on_their_cores_and_this_one_gets_its_own_back() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    script = "import os; print(*os.sched_getaffinity(0))"
    with pinned([one]):
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == [str(one)]
    assert os.sched_getaffinity(0) == before
    with pinned(None):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cores", "expected"), [({3}, None), ({0, 5}, ([0], [5])), ({0, 1, 2, 3, 4}, ([0, 1], [2, 3, 4]))]
)
def test_cores_are_divided_in_halves(
    cores: set[int], expected: tuple[list[int], list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    assert divided_cores() == expected
