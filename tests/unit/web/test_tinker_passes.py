"""Training calls of several clients that wait at once share a pass, in fair turns, and none takes another with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch

from swarm_plugins.errors import NumericError
from swarm_plugins.fair_queueing import FairLock
from swarm_plugins.tuning.datums import Datum, LossCall
from swarm_plugins.tuning.joint import Call
from swarm_plugins.web.tinker.passes import Passes

pytestmark = pytest.mark.anyio
LOSS = LossCall.of("cross_entropy", {})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Tuner:
    """Stands for a model: what it computes alone."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def compute(self, datums: Sequence[Datum], loss: LossCall, *, backward: bool, stop: Event) -> Any:
        return ["alone"]

    def fail(self, why: str) -> None:
        self.faults.append(why)


class Recorded:
    """In place of the joint model: which calls came together."""

    def __init__(self) -> None:
        self.passes: list[list[Any]] = []
        self.free = Event()
        self.free.set()
        self.answer: Callable[[Any], Any] = lambda call: [call.tuner]
        self.cleared = 0

    def can_take(self, tuner: Any) -> bool:
        return True

    def clear(self) -> None:
        self.cleared += 1

    def compute(self, calls: Sequence[Any], *, backward: bool) -> list[Any]:
        self.passes.append([call.tuner for call in calls])
        assert self.free.wait(60)
        return [self.answer(call) for call in calls]


@pytest.fixture
async def passes() -> AsyncIterator[tuple[Any, Recorded]]:
    with ThreadPoolExecutor(2) as threads:
        one, joint = Passes(None, FairLock(places=2), threads), Recorded()
        one._joint = joint  # type: ignore[assignment]
        yield one, joint


def call(tuner: Any, length: int = 4) -> Call:
    return Call(tuner, [Datum(torch.zeros(length, dtype=torch.int64), {})], LOSS)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def under_way(passes: tuple[Any, Recorded]) -> asyncio.Task[Any]:
    """A pass that others have to wait for, until the event is set."""
    one, joint = passes
    joint.free.clear()
    task = asyncio.create_task(one.compute("first", call(Tuner()), backward=True))
    await until(lambda: len(joint.passes) == 1)
    return task


async def test_those_that_wait_share_a_pass(passes: tuple[Any, Recorded]) -> None:
    one, joint = passes
    first = await under_way(passes)
    models = [Tuner() for _ in range(3)]
    tasks = [asyncio.create_task(one.compute("ben", call(model), backward=True)) for model in models]
    other = asyncio.create_task(one.compute("ben", call(Tuner()), backward=False))
    await until(lambda: len(one._waiting) == 4)
    joint.free.set()
    assert await asyncio.gather(*tasks) == [[model] for model in models]
    await asyncio.gather(first, other)
    # What wants no gradients is computed without.
    assert sorted(len(each) for each in joint.passes) == [1, 1, 3]


async def test_a_fault_of_the_pass_is_an_answer_and_refuses_the_next_step(
    passes: tuple[Any, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, joint = passes

    def broken(calls: Sequence[Any], *, backward: bool) -> list[Any]:
        raise MemoryError("no room for gradients")

    monkeypatch.setattr(joint, "compute", broken)
    trained, scored = Tuner(), Tuner()
    for model, backward in ((trained, True), (scored, False)):
        with pytest.raises(MemoryError, match="no room for gradients"):
            await one.compute("ben", call(model), backward=backward)
    assert (trained.faults, scored.faults) == (["no room for gradients"], [])


async def test_passes_are_bounded(passes: tuple[Any, Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.passes._MAX_TOKENS", 10)
    one, joint = passes
    first = await under_way(passes)
    lengths = (4, 5, 4, 3)
    tasks = [asyncio.create_task(one.compute("ben", call(Tuner(), length), backward=True)) for length in lengths]
    # A long one goes by itself, without waiting for those that are shared.
    assert await one.compute("ben", call(Tuner(), 11), backward=True) == ["alone"]
    await until(lambda: len(one._waiting) == 4)
    joint.free.set()
    await asyncio.gather(first, *tasks)
    assert [len(each) for each in joint.passes] == [1, 2, 2]


async def test_a_key_with_many_models_does_not_go_first(
    passes: tuple[Any, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.passes._MAX_CALLS", 2)
    one, joint = passes
    first = await under_way(passes)
    many = [asyncio.create_task(one.compute("first", call(Tuner()), backward=True)) for _ in range(8)]
    await until(lambda: len(one._waiting) == 8)
    model = Tuner()
    few = asyncio.create_task(one.compute("ben", call(model), backward=True))
    await until(lambda: len(one._waiting) == 9)
    joint.free.set()
    await asyncio.gather(first, few, *many)
    # After the pass that was under way it is the turn of the key that has had nothing.
    assert joint.passes[1][0] is model


async def test_a_fault_is_its_own_clients(passes: tuple[Any, Recorded]) -> None:
    one, joint = passes
    first = await under_way(passes)
    sound, odd = Tuner(), Tuner()
    joint.answer = lambda each: NumericError("NaN") if each.tuner is odd else [each.tuner]
    tasks = [asyncio.create_task(one.compute("ben", call(model), backward=True)) for model in (odd, sound)]
    await until(lambda: len(one._waiting) == 2)
    joint.free.set()
    found = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert isinstance(found[1], NumericError)
    assert found[2] == [sound]


async def test_who_leaves_does_not_take_the_others_along(passes: tuple[Any, Recorded]) -> None:
    one, joint = passes
    first = await under_way(passes)
    models = [Tuner() for _ in range(3)]
    tasks = [asyncio.create_task(one.compute("ben", call(model), backward=True)) for model in models]
    await until(lambda: len(one._waiting) == 3)
    tasks[0].cancel()  # while it waits
    await until(lambda: len(one._waiting) == 2)
    joint.free.set()
    await first
    joint.free.clear()
    await until(lambda: len(joint.passes) == 2)
    tasks[1].cancel()  # while it is computed
    await until(tasks[1].done)
    joint.free.set()
    assert await tasks[2] == [models[2]]
    assert joint.passes[1] == models[1:]
    assert joint.cleared == 1
    assert not one._waiting


class Long(Tuner):
    """Stands for a call of many batches: it goes on until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[Event] = []
        self.free = Event()

    def compute(self, datums: Sequence[Datum], loss: LossCall, *, backward: bool, stop: Event) -> Any:
        self.stops.append(stop)
        assert self.free.wait(60)
        return ["too late"]


async def test_who_leaves_a_long_call_stops_it_and_has_the_turn_until_it_ends() -> None:
    long = Long()
    with ThreadPoolExecutor(2) as threads:
        one = Passes(None, FairLock(), threads)
        try:
            left = asyncio.create_task(one.compute("anna", call(long, 10_000), backward=True))
            await until(lambda: bool(long.stops))
            other = asyncio.create_task(one.compute("ben", call(Tuner(), 10_000), backward=True))
            for _ in range(2):  # as at the end of the API, after that of the session
                left.cancel()
                await until(long.stops[0].is_set)
                # A thread is free, but it is not the other's turn.
                await asyncio.gather(*(asyncio.sleep(0) for _ in range(10)))
                assert not left.done()
                assert not other.done()
        finally:
            long.free.set()
        assert await other == ["alone"]
        with pytest.raises(asyncio.CancelledError):
            await left
