"""Peers that are admitted, train for a while, and then try to replace, split or stop the run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from run_kit import SHAPES, Trainee

from swarm_plugins.together.outer import SharedState, write_update
from swarm_plugins.together.signing import Seal, list_digest
from swarm_plugins.transport.run_messages import Contribution, Evidence, Mark, RoundRecord, RunStatus, Votes

HONEST_ROUNDS = 2


def poisoned(round_: int) -> SharedState:
    weights = tuple(np.full(shape, 666.0, np.float32) for shape in SHAPES)
    return SharedState(round_, 0, weights, weights)


class Traitor(Trainee):
    """Trains, then tells each peer what an attack says."""

    strangers: tuple[Seal, ...] = ()

    async def betray(self, attack: Attack) -> None:
        while self.peer.round.state.round < HONEST_ROUNDS:
            await self.one_round()
        plain = self.peer._status_for
        self.peer._status_for = lambda to: attack(self, to, plain(to))  # type: ignore[method-assign]
        await self.peer._greetings.greet()

    def half(self, to: str) -> int:
        return sorted({*self.peer.living, to}).index(to) % 2

    def contribution(self, which: int) -> Contribution:
        """Returns one of several contributions to this round."""
        state = self.peer.round.state
        change = [np.full(shape, 1.0 + which % 89, np.float32) for shape in SHAPES]
        blob = self.peer._blobs.keep(write_update(change))
        return self.peer._seal.contribution(round_=state.round, base=state.digest, blob=blob, samples=8)

    def record(self, *contributions: Contribution) -> RoundRecord:
        state, view = self.peer.round.state, self.peer._closing.agreement.votes.view
        return self.peer._seal.record(
            round_=state.round, base=state.digest, view=view, contributions=tuple(contributions)
        )


Attack = Callable[[Traitor, str, RunStatus], RunStatus]


def another_update_to_each(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    return msgspec.structs.replace(plain, contribution=one.contribution(sum(to.encode())))


def a_state_one_round_further(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    furthest = max((status.round for status in one.peer.living.values()), default=0)
    state = poisoned(furthest + 1)
    one.peer._blobs.keep(state.blob)
    return msgspec.structs.replace(plain, round=state.round, state=state.digest)


def first_updates_then_a_state(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    attack = another_update_to_each if plain.round <= HONEST_ROUNDS else a_state_one_round_further
    return attack(one, to, plain)


def a_round_closed_alone(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    """Claims that a record of its own has closed the round."""
    record = one.record(one.contribution(0))
    state = poisoned(plain.round + 1)
    one.peer._blobs.keep(state.blob)
    return msgspec.structs.replace(plain, round=state.round, state=state.digest, record=record)


def two_records(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    """Shows each half of the others a record of its own, and votes for it; the honest updates are in both."""
    honest = {peer: c for peer, c in one.peer.round.contributions.items() if peer != one.peer_id}
    own = one.contribution(one.half(to))
    both = honest | {one.peer_id: own}
    record = one.record(*(both[peer] for peer in sorted(both)))
    mark = Mark(record.view, list_digest(record))
    votes = Votes(view=record.view, prevote=mark, keys=(mark,), lock=mark)
    return msgspec.structs.replace(plain, contribution=own, record=record, votes=votes)


def two_records_and_on(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    """After two records, claims to one half that it has gone on."""
    status = two_records(one, to, plain)
    return a_round_closed_alone(one, to, status) if one.half(to) else status


def unsigned_records(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    """Lists contributions that their peers have not made, of a wrong round or twice."""
    own = one.contribution(0)
    forged = msgspec.structs.replace(own, samples=1 << 30)
    old = msgspec.structs.replace(own, round=own.round + 1)
    lists = [(forged,), (old,), (own, own)]
    return msgspec.structs.replace(plain, record=one.record(*lists[one.half(to) + plain.round % 2]))


def silence(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    return msgspec.structs.replace(plain, contribution=None, record=None, votes=Votes())


def free_keys(one: Traitor, to: str, plain: RunStatus) -> RunStatus:
    """Lists updates of many keys that take no part, and accuses as many."""
    state = one.peer.round.state
    one.strangers = one.strangers or tuple(Trainee(one.world, 1000 + number).peer._seal for number in range(3))
    signed = {
        seal.peer_id: [
            seal.contribution(round_=state.round, base=state.digest, blob=one.peer._blobs.keep(blob), samples=1 << 30)
            for blob in (write_update([np.full(shape, 99.0, np.float32) for shape in SHAPES]), b"junk")
        ]
        for seal in one.strangers
    }
    record = one.record(*(signed[peer][0] for peer in sorted(signed)))
    mark = Mark(record.view, list_digest(record))
    evidence = tuple(Evidence(one=first, other=second) for first, second in signed.values())[:2]
    return msgspec.structs.replace(
        plain, record=record, evidence=evidence, votes=Votes(view=record.view, prevote=mark, keys=(mark,), lock=mark)
    )


ATTACKS = (
    another_update_to_each,
    a_state_one_round_further,
    first_updates_then_a_state,
    a_round_closed_alone,
    two_records,
    two_records_and_on,
    unsigned_records,
    silence,
    free_keys,
)
