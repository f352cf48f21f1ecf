"""Peers of a run agree on every round, whoever joins late, leaves, hangs or is lost."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import virtual_time
from run_kit import Trainee, World, agreed


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main, timeout_s=3600)


async def started(world: World, num_peers: int, **settings: Any) -> list[Trainee]:
    trainees = [Trainee(world, number, **settings) for number in range(num_peers)]
    for one in trainees:
        await one.join()
    return trainees


def test_all_have_the_same_state_in_each_of_twenty_rounds() -> None:
    async def main() -> None:
        world = World()
        trainees = await started(world, 3)
        for one in trainees:
            one.train(20)
        for one in trainees:
            await one.done()
        assert agreed(*trainees) == 21
        assert len(set(trainees[0].digests.values())) == 21
        assert all(is_in for one in trainees for is_in in one.is_in)
        await world.transport.close()

    run(main())


def test_a_peer_alone_makes_rounds_of_its_own() -> None:
    async def main() -> None:
        world = World()
        (alone,) = await started(world, 1)
        alone.train(3)
        await alone.done()
        assert len(alone.digests) == 4
        await world.transport.close()

    run(main())
