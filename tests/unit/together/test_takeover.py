"""Fewer than half as many hostile peers as honest ones neither replace, nor split, nor stop a run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import virtual_time
from run_kit import QUICK, Trainee, World, agreed
from traitors import ATTACKS, Attack, Traitor, another_update_to_each, poisoned

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.run_messages import Contribution, Evidence, RunStatus

ROUNDS = 7


async def attacked(num_honest: int, num_hostile: int, attack: Attack, *, until_s: float | None = None) -> list[Trainee]:
    world = World()
    honest = [Trainee(world, number) for number in range(num_honest)]
    hostile = [Traitor(world, 50 + number) for number in range(num_hostile)]
    for one in (*honest, *hostile):
        await one.join()
    attacks = [asyncio.create_task(one.betray(attack)) for one in hostile]
    for one in honest:
        one.train(ROUNDS)
    if until_s is not None:
        await asyncio.sleep(until_s)
    for one in honest:
        await (one.done() if until_s is None else one.kill())
    for betrayal in attacks:
        betrayal.cancel()
    for one in hostile:
        await one.kill()
    await world.transport.close()
    poison = {poisoned(round_).digest.hex() for round_ in range(ROUNDS + 3)}
    for one in honest:
        assert not poison & set(one.digests.values()), "weights of its own were replaced"
        assert not one.changed
        assert max(np.abs(part).max() for part in one.peer.round.state.weights) < 300
    return honest


SIZES = [(honest, hostile) for honest in range(3, 13) for hostile in range(1, (honest + 1) // 2)]
MARKS = {(3, 1): (), (5, 2): (), (4, 1): pytest.mark.slow, (7, 3): pytest.mark.slow, (12, 5): pytest.mark.slow}


@pytest.mark.parametrize(
    ("num_honest", "num_hostile"),
    [pytest.param(*size, marks=MARKS.get(size, pytest.mark.hours)) for size in SIZES],
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_fewer_than_half_as_many_hostile_peers_neither_replace_nor_split_nor_stop_a_run(
    num_honest: int, num_hostile: int, attack: Attack
) -> None:
    honest = virtual_time.run(attacked(num_honest, num_hostile, attack), timeout_s=3600)
    assert agreed(*honest) >= ROUNDS - 1
    assert all(one.is_in.count(True) >= ROUNDS // 2 for one in honest)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_one_hostile_peer_replaces_no_work_of_two(attack: Attack) -> None:
    """It may hold them up, or part them; the weights that they have are their own."""
    virtual_time.run(attacked(2, 1, attack, until_s=200.0), timeout_s=3600)


async def test_one_that_contradicts_itself_is_expelled_by_all() -> None:
    world = World()
    honest = [Trainee(world, number) for number in range(3)]
    hostile = Traitor(world, 50)
    for one in (*honest, hostile):
        await one.join()
    attack = asyncio.create_task(hostile.betray(another_update_to_each))
    for one in honest:
        one.train(ROUNDS)
    for one in honest:
        await one.done()
    assert all(hostile.peer_id in one.peer._expelled for one in honest)
    assert all(peer not in one.peer._expelled for one in honest for peer in (other.peer_id for other in honest))
    assert any("has shown different updates to one round" in why for why in hostile.peer._greetings.refusals.values())
    attack.cancel()
    await hostile.kill()
    await world.transport.close()


@pytest.mark.parametrize("change", ["same", "round", "signer", "forged"])
async def test_evidence_that_shows_nothing_expels_nobody(change: str) -> None:
    world = World()
    one, other, third = (Trainee(world, number) for number in range(3))
    for trainee in (one, other, third):
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
    assert third.peer_id not in one.peer._expelled
    for trainee in (one, other, third):
        await trainee.kill()
    await world.transport.close()


async def test_one_that_starts_again_with_its_key_does_not_contradict_itself(tmp_path: Path) -> None:
    """It trains other numbers than before, and adds them to the next round; the update of before is in this one."""
    lasting = replace(QUICK, identity=tmp_path / "key")
    world = World()
    first, second = Trainee(world, 0), Trainee(world, 1, config=lasting)
    for one in (first, second):
        await one.join()
    second.train(8)  # the round lasts: the first does not train yet
    async with asyncio.timeout(60.0):
        while second.peer_id not in first.peer.round.contributions:
            await asyncio.sleep(0.1)
    contributed = first.peer.round.contributions[second.peer_id]
    await second.kill()
    world.transport.revive(second.peer_id)
    again = Trainee(world, 1, config=lasting)
    again._random, again.step_s = np.random.default_rng(77), 0.1
    await again.join()
    # It is a member at once, and is not waited for.
    assert again.peer.round.contributions == {again.peer_id: contributed}
    assert again.peer._status_for(first.peer_id).state
    for one in (first, again):
        one.train(8)
    for one in (first, again):
        await one.done()
    await world.transport.close()
    assert again.peer_id not in first.peer._expelled
    assert again.is_in[0] is False
    assert all(again.is_in[1:])
    assert agreed(first, again) >= 8


def test_a_hostile_peer_neither_stops_nor_expels_peers_that_all_start_again(tmp_path: Path) -> None:
    """It is in the round to which they have contributed, shows its state, and keeps what each has signed."""

    async def scene() -> None:
        world = World()
        configs = [replace(QUICK, identity=tmp_path / f"key {number}") for number in range(3)]
        before = [Trainee(world, number, config=config) for number, config in enumerate(configs)]
        hostile = Trainee(world, 50)
        for one in (*before, hostile):
            await one.join()
        signed = contributions_shown_to(hostile)
        hostile.peer._task.cancel()  # type: ignore[union-attr]
        for one in before:
            one.train(5)
        async with asyncio.timeout(60.0):
            while len(signed) < len(before):
                await asyncio.sleep(0.1)
        for one in before:
            await one.kill()
        again = [Trainee(world, number, config=config) for number, config in enumerate(configs)]
        for number, one in enumerate(again):
            one._random = np.random.default_rng(70 + number)
            world.transport.revive(one.peer_id)
            await one.join()
            assert one.peer.round.state.digest == hostile.peer.round.state.digest
        for one in again:
            one.train(5)
        for one in again:
            await one.done()
        await hostile.kill()
        await world.transport.close()
        assert agreed(*again) == 6
        assert {len(contributions) for contributions in signed.values()} == {1}

    virtual_time.run(scene(), timeout_s=3600)


def contributions_shown_to(one: Trainee) -> dict[tuple[str, int, bytes], set[Contribution]]:
    """Returns what is noted from now on: contributions by peer, round and base."""
    signed = defaultdict[tuple[str, int, bytes], set[Contribution]](set)
    heard = one.peer._greetings._heard

    def note(peer: str, status: RunStatus) -> None:
        if (own := status.contribution) is not None:
            signed[peer, own.round, own.base].add(own)
        heard(peer, status)

    one.peer._heard = note  # type: ignore[method-assign]
    return signed


async def test_one_that_resumes_its_last_round_alone_comes_to_the_same_state(tmp_path: Path) -> None:
    """Others may have seen what it had contributed: another update would contradict that."""
    lasting = replace(QUICK, identity=tmp_path / "key")
    world = World()
    before = Trainee(world, 0, config=lasting)
    await before.join()
    for _ in range(2):
        await before.one_round()
    kept = before.peer.round.state
    await before.one_round()
    await before.kill()
    world.transport.revive(before.peer_id)
    again = Trainee(world, 0, config=lasting, state=kept)
    again._random = np.random.default_rng(77)
    await again.join()
    await again.peer.contribute(again.update(), base=kept.digest, samples=8)
    assert again.peer.round.state.digest == before.peer.round.state.digest
    # What was not contributed to may be.
    again.train(5)
    await again.done()
    await world.transport.close()
    assert again.is_in == [True, True]


async def test_what_was_contributed_after_an_old_checkpoint_may_have_counted_before_it(tmp_path: Path) -> None:
    """Only the last contribution is kept: nothing is known of the one to the round of the checkpoint."""
    lasting = replace(QUICK, identity=tmp_path / "key")
    world = World()
    other, before = Trainee(world, 0), Trainee(world, 1, config=lasting)
    for one in (other, before):
        await one.join()
    other.train(9)
    await before.one_round()
    kept = before.peer.round.state
    for _ in range(2):
        await before.one_round()
    await before.kill()
    world.transport.revive(before.peer_id)
    again = Trainee(world, 1, config=lasting, state=kept)
    await again.join()
    assert before.is_in == [True, True, True]
    assert again.peer.round.state.round > kept.round
    assert again.peer.is_counted(kept) is None
    # To the round that it joins, it has contributed nothing.
    assert again.peer.is_counted(again.peer.round.state) is False
    for one in (other, again):
        await one.kill()
    await world.transport.close()


async def test_two_that_a_divided_network_has_parted_stay_apart_and_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    one, other = trainees = [Trainee(world, number) for number in range(2)]
    for trainee in trainees:
        await trainee.join()
        trainee.train(40)
    await asyncio.sleep(10)
    lines = [world.transport.line(one.peer_id, other.peer_id), world.transport.line(other.peer_id, one.peer_id)]
    for line in lines:
        line.loses_requests = line.loses_answers = True
    await asyncio.sleep(40)
    for line in lines:
        line.loses_requests = line.loses_answers = False
    for trainee in trainees:
        await trainee.done()
    await world.transport.close()
    assert not one.changed
    assert not other.changed
    assert one.digests[40] != other.digests[40]
    said = [record.message for record in caplog.records if "parted from it by a divided network" in record.message]
    assert len(said) == 2
    assert all("stop one side, and start it again" in message for message in said)
