"""Which records a peer takes and votes for, and which states it takes over."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from run_kit import QUICK, SHAPES, SPEC, identity_of

from swarm_plugins.errors import ProtocolError, TransportError
from swarm_plugins.together import signing
from swarm_plugins.together.blobs import Blobs
from swarm_plugins.together.closing import Closing
from swarm_plugins.together.outer import blob_digest, first_state, write_update
from swarm_plugins.together.roster import Place, Roster
from swarm_plugins.together.rounds import Round
from swarm_plugins.together.signing import Seal, run_hash
from swarm_plugins.transport import identity
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.run_messages import Contribution, RoundRecord, RunStatus, Votes

RUN = run_hash("me/run")
SEALS = {
    seal.peer_id: seal
    for seal in (Seal(RUN, identity_of(number), allowed_peers=None, secret_file=None) for number in range(4))
}
STATE = first_state([np.zeros(shape, np.float32) for shape in SHAPES])


def update(number: int) -> bytes:
    return write_update([np.full(shape, 1.0 + number, np.float32) for shape in SHAPES])


def contribution(peer: str, *, round_: int = 0, blob: bytes | None = None) -> Contribution:
    blob = blob or blob_digest(update(sorted(SEALS).index(peer)))
    return SEALS[peer].contribution(round_=round_, base=STATE.digest, blob=blob, samples=1)


def record(signer: str, *contributions: Contribution, view: int = 0) -> RoundRecord:
    return SEALS[signer].record(round_=0, base=STATE.digest, view=view, contributions=contributions)


def status(state: bytes = STATE.digest, round_: int = 0, votes: Votes | None = None) -> RunStatus:
    return RunStatus(run=RUN, spec=SPEC, round=round_, state=state, steps=0, samples=0, votes=votes or Votes())


class Voter:
    """One of three, all of which have contributed; a fourth key takes no part."""

    def __init__(self) -> None:
        first, *_ = peers = sorted(SEALS)
        self.stranger = peers[-1]
        about = Closing(Round(STATE, first, QUICK), SEALS[first], QUICK)
        about.agreement.hear({peer: Votes() for peer in peers[1:3]}, {})
        self.proposer = about.agreement.proposer
        self.me, self.other = [peer for peer in peers[:3] if peer != self.proposer]
        self.round = Round(STATE, self.me, QUICK)
        self.closing = Closing(self.round, SEALS[self.me], QUICK)
        self.all = {peer: contribution(peer) for peer in peers[:3]}
        for peer, one in self.all.items():
            self.round.add(peer, one)
            self.round.add_update(one.blob, update(sorted(SEALS).index(peer)))
        self.vote()

    def vote(self, votes: Votes | None = None) -> bytes | None:
        members = {self.proposer: status(), self.other: status(votes=votes)}
        self.closing.advance(members, members | {self.me: status()}, set(self.all), 0.0)
        prevote = self.closing.agreement.votes.prevote
        return prevote and prevote.value


def test_a_peer_prevotes_what_lists_all_and_is_signed_by_the_proposer() -> None:
    voter = Voter()
    assert voter.closing.take(voter.other, record(voter.other, *voter.all.values()), voter.all) is None
    assert voter.vote() is None
    assert voter.closing.take(voter.other, record(voter.proposer, *voter.all.values()), voter.all) is not None
    assert voter.vote() is not None


@pytest.mark.parametrize("case", ["one-left-out", "stranger", "not-here", "unreadable"])
def test_a_peer_prevotes_no_list_that_is_not_fair_or_not_here(case: str) -> None:
    voter = Voter()
    lists: dict[str, Any] = {
        "one-left-out": {peer: one for peer, one in voter.all.items() if peer != voter.other},
        "stranger": voter.all | {voter.stranger: contribution(voter.stranger)},
        "not-here": voter.all | {voter.proposer: contribution(voter.proposer, blob=b"elsewhere")},
        "unreadable": voter.all | {voter.proposer: contribution(voter.proposer, blob=b"unreadable")},
    }
    voter.round.add_update(contribution(voter.stranger).blob, update(3))
    voter.round.add_update(b"unreadable", b"no update")
    assert voter.closing.take(voter.other, record(voter.proposer, *lists[case].values()), voter.all) is not None
    assert voter.vote() is None


@pytest.mark.parametrize("case", ["twice", "another-round", "forged", "disordered"])
def test_records_that_do_not_hold_are_refused_and_cost_a_few_checks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    voter = Voter()
    one = contribution(voter.proposer)
    lists: dict[str, Any] = {
        "twice": [one, one],
        "another-round": [contribution(voter.proposer, round_=1)],
        "forged": [msgspec.structs.replace(one, samples=1 << 30)],
        "disordered": list(reversed(voter.all.values())),
    }
    checks = count_of_checks(monkeypatch)
    for number in range(1, 4):
        junk = record(voter.proposer, *lists[case] * number)
        with pytest.raises(ProtocolError):
            voter.closing.take(voter.other, junk, voter.all)
        checked = len(checks)
        # From whomever it comes, what did not hold is not checked again.
        assert voter.closing.take(voter.me, junk, voter.all) is None
        assert len(checks) == checked
    assert voter.closing.take(voter.other, record(voter.proposer, *lists[case] * 4), voter.all) is None
    assert len(checks) == checked


def count_of_checks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list to which each check of a signature adds the key."""
    checks: list[bytes] = []

    def is_signed_by(public_key: bytes, data: bytes, signature: bytes) -> bool:
        checks.append(public_key)
        return identity.is_signed_by(public_key, data, signature)

    monkeypatch.setattr(signing, "is_signed_by", is_signed_by)
    return checks


def test_a_record_of_free_keys_costs_no_check_of_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anyone has contributed, whatever tells of a closing is news, each time that it is shown."""
    first, *others = sorted(SEALS)
    closing = Closing(Round(STATE, first, QUICK), SEALS[first], QUICK)
    closing.agreement.hear({peer: Votes() for peer in others[:2]}, {})
    checks = count_of_checks(monkeypatch)
    strangers = record(others[0], contribution(others[-1]))
    for _ in range(3):
        assert closing.take(others[0], strangers, {first, *others[:2]}) is None
    assert not checks
    # One that tells of a known peer's contribution as well is news.
    mixed = record(others[0], *(contribution(peer) for peer in others[1:]))
    assert closing.take(others[0], mixed, {first, *others[:2]}) is not None


async def test_only_who_was_asked_in_vain_counts_as_without_a_blob() -> None:
    class Unreachable:
        async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
            raise TransportError("gone")

    blobs = Blobs(RUN, Unreachable(), transfer_s=5.0)
    for peers in (["liar"], ["liar"], ["liar", "newcomer"]):
        assert not blobs.want(b"digest", 4, peers)
        await asyncio.sleep(30.0)
    assert blobs.without(b"digest", tries=3) == ["liar"]
    assert blobs.without(b"digest", tries=1) == ["liar", "newcomer"]
    assert not blobs.without(b"other", tries=1)
    await blobs.close()


def test_liars_who_name_a_state_and_do_not_serve_it_keep_nobody_from_it() -> None:
    roster = Roster(RUN, "me", Place(0, b"own"), dead_s=5.0, max_peers=9)
    true, lie = Place(3, b"true"), Place(9, b"true")
    for liar, place in (("liar", true), ("other liar", lie)):
        roster.heard(liar, status(place.digest, place.round), 0.0)
        assert roster.holders(place, 0.0) == [liar]
        roster.rule_out(place, [liar])
    assert roster.most_agreed(0.0, is_counted=False) is None
    roster.heard("honest", status(true.digest, true.round), 0.0)
    assert roster.most_agreed(0.0, is_counted=False) == true
    assert roster.holders(true, 0.0) == ["honest"]


def test_a_tie_displaces_no_work_and_more_than_half_do() -> None:
    roster = Roster(RUN, "me", Place(3, b"own"), dead_s=5.0, max_peers=9)
    for peer in "abc":
        roster.heard(peer, status(b"own", 3), 0.0)
    roster.heard("a", status(b"other", 4), 0.0)
    roster.heard("b", status(b"other", 4), 0.0)
    # Two of four; strangers have no say.
    roster.heard("stranger", status(b"other", 4), 0.0)
    assert roster.majority(0.0) is None
    roster.heard("c", status(b"other", 4), 0.0)
    assert roster.majority(0.0) == Place(4, b"other")
