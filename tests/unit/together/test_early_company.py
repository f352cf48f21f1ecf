"""What a hostile peer brings about while a peer is alone with it holds up no run in which others join later."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import virtual_time
from run_kit import Trainee, World, agreed

from swarm_plugins.transport.run_messages import Mark, RunStatus, Votes


@pytest.mark.parametrize("attack", ["lock", "lasting lock"])
def test_votes_that_a_founder_was_misled_to_hold_up_no_later_peers(attack: str) -> None:
    async def scene() -> None:
        world = World()
        honest, hostile = [Trainee(world, number) for number in range(3)], Trainee(world, 50)
        founder, *later = honest
        await founder.join()
        await hostile.join()
        liar = hostile.peer
        plain, seal, state = liar._status_for, liar._seal, liar.round.state
        blob = liar._blobs.keep(hostile.update())
        mine = seal.contribution(round_=0, base=state.digest, blob=blob, samples=8)

        def shown_to(peer: str) -> RunStatus:
            theirs = liar.living.get(founder.peer_id)
            status = msgspec.structs.replace(plain(peer), round=0, state=state.digest, record=None)
            if theirs is None or peer != founder.peer_id or (attack != "lasting lock" and later[0].peer._task):
                return msgspec.structs.replace(status, votes=Votes())
            mark: Mark | None = theirs.votes.prevote
            votes = Votes(view=theirs.votes.view, prevote=mark, keys=(mark,) if mark else ())
            return msgspec.structs.replace(status, contribution=mine, votes=votes)

        liar._status_for = shown_to  # type: ignore[method-assign]
        founder.train(4)
        await asyncio.sleep(15.0)
        assert founder.peer._closing.agreement.votes.lock is not None
        assert founder.peer.round.state.round == 0
        for one in later:
            await one.join()
        for one in later:
            one.train(4)
        for one in honest:
            await one.done()
        await hostile.kill()
        await world.transport.close()
        assert agreed(*honest) == 5

    virtual_time.run(scene(), timeout_s=600)
