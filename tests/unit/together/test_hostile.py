"""What one peer of a run cannot do to the others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from run_kit import QUICK, SHAPES, Trainee, World, agreed, identity_of

from swarm_plugins.together.outer import SharedState, write_update
from swarm_plugins.transport.run_messages import BlobPart, BlobRequest


async def honest(world: World, num_peers: int, until_round: int, **settings: Any) -> list[Trainee]:
    trainees = [Trainee(world, number, **settings) for number in range(num_peers)]
    for one in trainees:
        await one.join()
    for one in trainees:
        one.train(until_round)
    return trainees


async def test_a_record_that_leaves_all_others_out_is_not_taken() -> None:
    world = World()
    trainees = await honest(world, 3, 8)
    hostile = Trainee(world, 9)
    await hostile.join()

    async def close_alone() -> None:
        while True:
            now = hostile.peer.round
            blob = write_update([np.full(shape, 50.0, np.float32) for shape in now.shapes])
            own = hostile.peer._seal.contribution(
                round_=now.state.round,
                base=now.state.digest,
                blob=hostile.peer._blobs.keep(blob),
                samples=1000,
            )
            if now.add(hostile.peer_id, own):
                now.record = hostile.peer._seal.record(
                    round_=now.state.round, base=now.state.digest, contributions=(own,)
                )
            await asyncio.sleep(0.1)

    attack = asyncio.create_task(close_alone())
    started = asyncio.get_running_loop().time()
    for one in trainees:
        await one.done()
    # Rounds take as long as four steps do.
    assert asyncio.get_running_loop().time() - started >= 8 * 4 * trainees[0].step_s * 0.25
    attack.cancel()
    await hostile.kill()
    await world.transport.close()
    agreed(*trainees)
    assert all(one.is_in[-1] for one in trainees)
    weights = np.concatenate([part.ravel() for part in trainees[0].peer.round.state.weights])
    assert np.abs(weights).max() < 500


async def test_the_largest_updates_move_the_weights_little() -> None:
    async def norm_after(*, is_hostile: bool) -> float:
        world = World()
        trainees = await honest(world, 4, 10)
        if is_hostile:
            last = trainees[-1]
            last.update = lambda: write_update([np.full(shape, 99.0, np.float32) for shape in last.peer.round.shapes])  # type: ignore[method-assign]
        for one in trainees:
            await one.done()
        await world.transport.close()
        assert agreed(*trainees) == 11
        assert all(is_in for one in trainees for is_in in one.is_in)
        return float(np.linalg.norm(np.concatenate([part.ravel() for part in trainees[0].peer.round.state.weights])))

    calm = await norm_after(is_hostile=False)
    # Without a bound it would be hundreds.
    assert await norm_after(is_hostile=True) < 5 * calm


async def test_a_slow_peer_is_waited_for_before_its_first_step_has_ended() -> None:
    world = World()
    fast, slow = await honest(world, 2, 6)
    fast.step_s, slow.step_s = 0.2, 3.0
    for one in (fast, slow):
        await one.done()
    await world.transport.close()
    assert agreed(fast, slow) == 7
    assert all(slow.is_in[1:])


async def test_peers_that_are_joining_have_no_say() -> None:
    """Two with the same seed begin with the same weights, which are more than those of one that has trained."""
    world = World()
    (alone,) = await honest(world, 1, 30)
    await asyncio.sleep(50)
    before = alone.peer.round.state.round
    assert before > 5
    joiners = [Trainee(world, 7, identity=identity_of(number)) for number in (20, 21)]
    await asyncio.gather(*(one.join() for one in joiners))
    assert alone.peer.round.state.round >= before
    assert all(one.peer.round.state.round >= before for one in joiners)
    for one in joiners:
        one.train(30)
    for one in (alone, *joiners):
        await one.done()
    await world.transport.close()
    assert sorted(alone.digests) == list(range(31))


async def far_ahead(world: World) -> Trainee:
    """A stranger that claims to have a state of a late round."""
    hostile = Trainee(world, 9)
    weights = tuple(np.full(shape, 666.0, np.float32) for shape in SHAPES)
    hostile.peer._enter(SharedState(1 << 50, 0, weights, weights))
    hostile.peer._is_joining = False
    world.handlers[hostile.peer_id] = {"rpc_run": hostile.peer.answer}
    await hostile.peer._greetings.look_up()
    return hostile


async def test_a_state_that_nobody_serves_does_not_keep_a_peer_from_joining() -> None:
    world = World()
    (alone,) = await honest(world, 1, 20)
    await asyncio.sleep(12)
    hostile = await far_ahead(world)
    served = hostile.peer._blobs.part
    hostile.peer._blobs.part = lambda request: served(msgspec.structs.replace(request, digest=b""))  # type: ignore[method-assign]
    joiner = Trainee(world, 2)
    await joiner.join()
    assert joiner.peer.round.state.digest.hex() in alone.digests.values()
    joiner.train(20)
    for one in (alone, joiner):
        await one.done()
    await hostile.kill()
    await world.transport.close()
    assert agreed(alone, joiner) > 5


async def test_a_stranger_with_a_further_state_replaces_no_work(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    (alone,) = await honest(world, 1, 20)
    await asyncio.sleep(12)
    hostile = await far_ahead(world)
    for _ in range(80):
        await hostile.peer._greetings.greet()
        await asyncio.sleep(0.5)
    await alone.done()
    await hostile.kill()
    await world.transport.close()
    assert sorted(alone.digests) == list(range(21))
    warnings = [one.message for one in caplog.records if "begun apart" in one.message]
    assert len(warnings) == 1
    assert hostile.peer_id in warnings[0]
    assert max(np.abs(part).max() for part in alone.peer.round.state.weights) < 100


async def test_an_update_in_drops_ends_nobodys_training() -> None:
    world = World()
    trainees = await honest(world, 3, 6)
    drip = trainees[0]
    plain = drip.peer._blobs.part

    def part(request: BlobRequest) -> BlobPart:
        return plain(msgspec.structs.replace(request, num_bytes=1))

    drip.peer._blobs.part = part  # type: ignore[method-assign]
    for one in trainees[1:]:
        await one.done()
    await drip.kill()
    await world.transport.close()
    assert agreed(*trainees[1:]) == 7
    assert all(one.is_in[-1] for one in trainees[1:])


async def test_no_more_contributions_are_kept_than_a_run_has_peers() -> None:
    world = World()
    (first,) = await honest(world, 1, 3)
    now = first.peer.round
    for number in range(100, 100 + 2 * QUICK.max_peers):
        seal = Trainee(world, number).peer._seal
        contribution = seal.contribution(round_=now.state.round, base=now.state.digest, blob=bytes([number]), samples=1)
        now.add(seal.peer_id, contribution)
    assert len(now.contributions) == QUICK.max_peers
    await first.kill()
    await world.transport.close()
