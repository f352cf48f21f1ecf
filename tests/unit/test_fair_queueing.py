"""A lock whose turns follow the time that it was held."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from swarm_plugins.fair_queueing import Clocks, FairLock


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_idle_time_earns_a_credit_and_no_more() -> None:
    clocks = Clocks(credit=2.0)
    clocks.advance("idle", 1.0)
    for _ in range(10):
        clocks.advance("busy", 1.0)
    assert (clocks.start("busy"), clocks.start("idle"), clocks.start("new")) == (10.0, 7.0, 9.0)
    for _ in range(3):
        clocks.advance("idle", 1.0)
    # The credit is used up: both get the same from here on.
    assert (clocks.start("busy"), clocks.start("idle"), clocks.start("new")) == (10.0, 10.0, 9.0)


async def test_whoever_held_it_longest_waits_for_the_others() -> None:
    clock, order = Clock(), list[str]()
    lock = FairLock(clock)

    async def use(name: str, seconds: float) -> None:
        async with lock.turn(name):
            order.append(name)
            await asyncio.sleep(0)
            clock.now += seconds

    # Seven long pieces of one name are there first; short ones of two others go before all but the first of them.
    await asyncio.gather(*(use("long", 5.0) for _ in range(7)), *(use("a", 0.1) for _ in range(3)), use("b", 0.1))
    assert order == ["long", "a", "b", "a", "a", *["long"] * 6]
    # Who comes back starts at the present: b has earned nothing while it was away.
    order.clear()
    await asyncio.gather(use("long", 0.1), *(use("b", 20.0) for _ in range(3)), use("long", 0.1))
    assert order[:3] == ["long", "b", "long"]


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_turn_that_nobody_takes_any_more_is_passed_on(*, is_given: bool) -> None:
    lock, order = FairLock(), list[str]()
    leave = asyncio.Event()

    async def use(name: str) -> None:
        async with lock.turn(name):
            order.append(name)
            await leave.wait()

    first, second, third = (asyncio.create_task(use(name)) for name in ("first", "second", "third"))
    await asyncio.sleep(0)
    if is_given:
        leave.set()
        await first  # the second has been told
    second.cancel()
    leave.set()
    with contextlib.suppress(asyncio.CancelledError):
        await second
    await asyncio.gather(first, third)
    assert order in (["first", "third"], ["first", "second", "third"])
    async with lock.turn("later"):
        pass


async def test_one_at_a_time_also_when_a_holder_fails() -> None:
    lock, inside = FairLock(), list[int]()

    async def use(number: int) -> None:
        async with lock.turn(str(number % 3)):
            inside.append(number)
            assert len(inside) == 1
            await asyncio.sleep(0)
            inside.remove(number)
            if number % 4 == 0:
                raise RuntimeError

    found = await asyncio.gather(*map(use, range(20)), return_exceptions=True)
    assert [isinstance(one, RuntimeError) for one in found] == [number % 4 == 0 for number in range(20)]
