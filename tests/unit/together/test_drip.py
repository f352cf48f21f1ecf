"""Hostile peers that send some honest ones no byte of a blob neither keep these out of the run nor split it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import virtual_time
from run_kit import QUICK, Trainee, World, agreed, identity_of
from test_closing import SEALS, STATE, status

from swarm_plugins.together.closing import Closing
from swarm_plugins.together.rounds import Round
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.run_messages import BlobRequest, Mark, Votes


def test_a_victim_that_gets_no_bytes_from_one_holder_stays_in_the_run() -> None:
    async def scene() -> None:
        world, config = World(), replace(QUICK, transfer_s=100.0)
        # The hostile one is asked first.
        first, *rest = sorted(range(1, 40), key=lambda number: identity_of(number).peer_id)
        hostile = Trainee(world, first, config=config)
        honest = [Trainee(world, number, config=config) for number in rest[:3]]
        victim = honest[-1]
        plain = hostile.peer.answer

        async def answer(channel: Channel) -> None:
            if channel.remote_peer != victim.peer_id:
                await plain(channel)
                return
            while (request := await channel.receive(timeout_s=600.0)) is not None:
                if isinstance(request, BlobRequest) and hostile.peer.round.state.round:
                    await asyncio.sleep(1000.0)
                await channel.send(hostile.peer._answer(channel.remote_peer, request))

        await hostile.join()
        world.handlers[hostile.peer_id] = {"rpc_run": answer}
        for one in honest:
            await one.join()
        for one in (hostile, *honest):
            one.train(12)
        for one in honest:
            await one.done()
        await hostile.kill()
        await world.transport.close()
        assert agreed(*honest) == 13
        assert victim.is_in.count(True) >= 11

    virtual_time.run(scene(), timeout_s=600)


@pytest.mark.parametrize("round_", [2, 4])
def test_a_peer_in_another_round_counts_until_it_has_had_time_to_fetch(round_: int) -> None:
    state = replace(STATE, round=3)
    me, other, *_ = sorted(SEALS)
    closing = Closing(Round(state, me, QUICK), SEALS[me], QUICK)
    closing.agreement.votes = Votes(prevote=Mark(0, b"value"))
    members = {other: status(b"elsewhere", round_)}
    limit_s = QUICK.straggler_s + 2 * QUICK.dead_s
    for now, is_quiet in ((0.0, False), (limit_s + 1.0, False), (limit_s + QUICK.transfer_s + 1.0, True)):
        closing.advance(members, members, set(SEALS), now)
        assert (other in closing.quiet) is is_quiet
