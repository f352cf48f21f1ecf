"""Peers that are admitted, train for a while, and then try to put weights of their own into the run."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from run_kit import SHAPES, Trainee, World, agreed

from swarm_plugins.errors import ProtocolError
from swarm_plugins.together.outer import SharedState, write_update
from swarm_plugins.transport.run_messages import Contribution, Evidence, RunStatus

HONEST_ROUNDS, ROUNDS = 3, 9


def poisoned(round_: int) -> SharedState:
    weights = tuple(np.full(shape, 666.0, np.float32) for shape in SHAPES)
    return SharedState(round_, 0, weights, weights)


class Traitor(Trainee):
    """Trains, then shows each peer another signed contribution, then claims a state one round further than any."""

    async def betray(self) -> None:
        peer, plain = self.peer, self.peer._status_for
        while peer.round.state.round < HONEST_ROUNDS:
            await self.one_round()
        split = peer.round.state

        def two_faced(to: str) -> RunStatus:
            change = [np.full(shape, float(sum(to.encode()) % 89) + 1.0, np.float32) for shape in SHAPES]
            blob = peer._blobs.keep(write_update(change))
            shown = peer._seal.contribution(round_=split.round, base=split.digest, blob=blob, samples=8)
            return msgspec.structs.replace(plain(to), round=split.round, state=split.digest, contribution=shown)

        peer._status_for = two_faced  # type: ignore[method-assign]
        while not any(status.round > split.round for status in peer.living.values()):
            await asyncio.sleep(0.1)
        peer._status_for = plain  # type: ignore[method-assign]
        while True:
            furthest = max((status.round for status in peer.living.values()), default=0)
            if peer.round.state.round <= furthest or peer.round.state.digest != poisoned(peer.round.state.round).digest:
                peer._enter(poisoned(furthest + 1))
            await asyncio.sleep(0.2)


def _numbers() -> list[object]:
    quick = {(2, 1), (3, 1), (4, 1), (6, 2)}
    all_ = [(honest, hostile) for honest in range(2, 13) for hostile in range(1, max(2, honest // 2))]
    return [pytest.param(*one, marks=() if one in quick else pytest.mark.slow) for one in all_]


@pytest.mark.parametrize(("num_honest", "num_hostile"), _numbers())
async def test_work_of_honest_peers_is_not_replaced(num_honest: int, num_hostile: int) -> None:
    world = World()
    honest = [Trainee(world, number) for number in range(num_honest)]
    hostile = [Traitor(world, 50 + number) for number in range(num_hostile)]
    for one in (*honest, *hostile):
        await one.join()
    attacks = [asyncio.create_task(one.betray()) for one in hostile]
    for one in honest:
        one.train(ROUNDS)
    for one in honest:
        await one.done()
    for attack in attacks:
        attack.cancel()
    for one in hostile:
        await one.kill()
    await world.transport.close()
    for one in honest:
        poison = {poisoned(round_).digest.hex() for round_ in range(ROUNDS + 3)}
        assert not poison & set(one.digests.values()), "weights of its own were replaced"
        assert max(np.abs(part).max() for part in one.peer.round.state.weights) < 300
        assert {traitor.peer_id for traitor in hostile} <= one.peer._expelled.keys()
    assert len({one.peer.round.state.digest for one in honest}) == 1
    assert agreed(*honest) > HONEST_ROUNDS


async def test_a_state_that_more_have_signed_for_is_computed_and_not_believed() -> None:
    world = World()
    honest = [Trainee(world, number) for number in range(2)]
    hostile = Traitor(world, 50)
    for one in (*honest, hostile):
        await one.join()
    for one in (*honest, hostile):
        one.train(HONEST_ROUNDS)
    await hostile.done()
    # A record of real contributions, and another state than it gives.
    peer = hostile.peer
    record = peer._last_record
    assert record is not None
    assert len(record.contributions) >= 2
    victim = honest[0].peer
    before = victim.round.state
    lie = poisoned(record.round + 1)
    status = msgspec.structs.replace(peer._status_for(victim.me), round=lie.round, state=lie.digest, record=record)
    peer._blobs.keep(lie.blob)
    victim._before = None
    victim._heard(hostile.peer_id, status)
    for _ in range(20):
        victim._follow_records()
        await asyncio.sleep(0.1)
    assert victim.round.state.digest != lie.digest
    assert victim.round.state.round >= before.round
    for one in honest:
        await one.done()
    await world.transport.close()


async def test_one_that_starts_again_in_the_middle_of_a_round_does_not_contradict_itself() -> None:
    world = World()
    first, second = (Trainee(world, number) for number in range(2))
    for one in (first, second):
        await one.join()
    second.train(4)  # the round lasts: the first does not train yet
    while second.peer_id not in first.peer.round.contributions:
        await asyncio.sleep(0.1)
    await second.kill()
    world.transport.revive(second.peer_id)
    again = Trainee(world, 1)
    again._random = np.random.default_rng(77)  # trains other numbers than before
    await again.join()
    assert again.peer.round.contributions.get(again.peer_id) is not None
    for one in (first, again):
        one.train(4)
    for one in (first, again):
        await one.done()
    await world.transport.close()
    assert not first.peer._expelled
    assert agreed(first, again) >= 2


@pytest.mark.parametrize("change", ["same", "round", "signer", "forged"])
async def test_evidence_that_shows_nothing_expels_nobody(change: str) -> None:
    world = World()
    one, other, third = (Trainee(world, number) for number in range(3))
    for trainee in (one, other):
        await trainee.join()
    state = one.peer.round.state

    def signed(by: Trainee, blob: bytes, round_: int = state.round) -> Contribution:
        return by.peer._seal.contribution(round_=round_, base=state.digest, blob=blob, samples=1)

    first, second = signed(third, b"a"), signed(third, b"b")
    if change == "same":
        second = first
    elif change == "round":
        second = signed(third, b"b", state.round + 1)
    elif change == "signer":
        second = signed(other, b"b")
    else:
        second = msgspec.structs.replace(second, samples=2)
    status = msgspec.structs.replace(other.peer._status_for(one.peer_id), evidence=(Evidence(one=first, other=second),))
    with pytest.raises(ProtocolError, match=r"that shows nothing|a wrong signature"):
        one.peer._heard(other.peer_id, status)
    assert not one.peer._expelled
    for trainee in (one, other):
        await trainee.kill()
    await world.transport.close()
