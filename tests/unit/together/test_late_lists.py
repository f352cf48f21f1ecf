"""What a hostile peer can do with a deadline: hold its update back until then, or show a closing to one peer only."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import virtual_time
from run_kit import QUICK, SHAPES, SPEC, Trainee, World, identity_of

from swarm_plugins.together import rounds
from swarm_plugins.together.outer import blob_digest, first_state, write_update
from swarm_plugins.together.rounds import Round
from swarm_plugins.together.signing import Seal, list_digest, run_hash
from swarm_plugins.transport.run_messages import Mark, RunStatus, Votes

RUN = run_hash("me/run")


def test_after_the_deadline_no_update_that_came_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now))
    seals = [Seal(RUN, identity_of(number), allowed_peers=None, secret_file=None) for number in range(4)]
    state = first_state([np.zeros(shape, np.float32) for shape in SHAPES])
    round_ = Round(state, seals[0].peer_id, QUICK)
    given = {}
    for number, seal in enumerate(seals):
        update = write_update([np.full(shape, 1.0 + number, np.float32) for shape in SHAPES])
        digest = blob_digest(update)
        given[seal.peer_id] = seal.contribution(round_=0, base=state.digest, blob=digest, samples=1)
        if seal is seals[3]:
            now += QUICK.straggler_s  # the last one comes with the deadline
        round_.add(seal.peer_id, given[seal.peer_id])
        round_.add_update(digest, update)
    now += 0.1
    status = RunStatus(run=RUN, spec=SPEC, round=0, state=state.digest, steps=0, samples=0)
    living = dict.fromkeys(given, status)

    def is_fair(*numbers: int) -> bool:
        kept = tuple(given[peer] for peer in sorted(seals[number].peer_id for number in numbers))
        return round_.is_fair(seals[3].record(round_=0, base=state.digest, view=0, contributions=kept), living)

    assert is_fair(0, 1, 2)
    assert is_fair(0, 1, 2, 3)
    assert not is_fair(0, 1, 3)
    assert not is_fair(0, 3)


def test_a_closing_that_one_peer_is_shown_parts_no_run() -> None:
    """The others make long steps, know of no closing, and so do not vote: they are not taken for silent."""

    async def scene() -> set[bytes]:
        world = World()
        honest = [Trainee(world, number, step_s=step_s) for number, step_s in enumerate((100.0, 120.0, 120.0))]
        hostile = Trainee(world, 50)
        for one in (*honest, hostile):
            await one.join()
        victim, liar = honest[0].peer_id, hostile.peer
        state, seal, plain = liar.round.state, liar._seal, liar._status_for
        blob = liar._blobs.keep(hostile.update())
        mine = seal.contribution(round_=state.round, base=state.digest, blob=blob, samples=8)

        def shown_to(peer: str) -> RunStatus:
            is_silent = msgspec.structs.replace(
                plain(peer), round=state.round, state=state.digest, contribution=None, record=None, votes=Votes()
            )
            if peer != victim or victim not in liar.living:
                return is_silent
            view = liar.living[victim].votes.view
            record = seal.record(round_=state.round, base=state.digest, view=view, contributions=(mine,))
            mark = Mark(view, list_digest(record))
            votes = Votes(view=view, prevote=mark, keys=(mark,), lock=mark)
            return msgspec.structs.replace(is_silent, contribution=mine, record=record, votes=votes)

        liar._status_for = shown_to  # type: ignore[method-assign]
        for one in honest:
            one.train(6)
        await asyncio.sleep(300.0)
        found = {one.peer.round.state.digest for one in honest}
        for one in (*honest, hostile):
            await one.kill()
        await world.transport.close()
        return found

    assert len(virtual_time.run(scene(), timeout_s=3600)) == 1
