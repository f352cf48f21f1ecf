"""How one peer's round ends: what is proposed, who has a vote, and what is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from swarm_plugins.errors import ProtocolError
from swarm_plugins.recent import Recent
from swarm_plugins.together.agreement import Agreement
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.outer import blob_digest
from swarm_plugins.together.rounds import Round
from swarm_plugins.together.signing import Seal, list_digest
from swarm_plugins.transport.identity import peer_id_of
from swarm_plugins.transport.run_messages import Contribution, RoundRecord, RunStatus, Votes

_MOST_JUNK = 3
"""After so many records that do not hold, no more are taken from a peer in this round."""

_MOST_RECORDS = 64
"""Kept of one round; honest peers vote for a few."""

_MOST_REFUSED = 1024
"""Records of one round that are remembered, so that their signatures are checked once."""


class CheckedRecord(NamedTuple):
    """A record whose signatures, round, and contributors have been checked."""

    record: RoundRecord
    contributors: list[str]

    @property
    def by_contributor(self) -> list[tuple[str, Contribution]]:
        """Each contributor with its contribution."""
        return list(zip(self.contributors, self.record.contributions, strict=True))


class Closing:
    """Brings a round to its end together with the other members.

    Args:
        round_: The round.
        seal: Signs as this peer.
        config: Settings.
        quiet: Members that have not voted in earlier rounds; they do not count until they do.
    """

    def __init__(self, round_: Round, seal: Seal, config: RunConfig, quiet: Collection[str] = ()) -> None:
        self._round = round_
        self._seal = seal
        self._config = config
        self._place = (round_.state.round, round_.state.digest)
        about = seal.run + round_.state.round.to_bytes(8, "big") + round_.state.digest
        self.agreement = Agreement(about, seal.peer_id, view_s=config.dead_s, most_view_s=config.transfer_s)
        self.quiet = set(quiet)
        self._records = Recent[bytes, CheckedRecord](_MOST_RECORDS)
        """By what they list: one of each view's proposer, and those with votes of an honest peer."""
        self._proposed: tuple[int, bytes] | None = None
        """The last view whose proposal has come, and what it lists."""
        self._junk: Counter[str] = Counter()
        self._refused = Recent[bytes, None](_MOST_REFUSED)
        """Digests of records that did not hold, their signatures included."""
        self._voted_at: float | None = None
        self._decided: Mapping[str, bytes] = {}
        self.decided_at: float | None = None
        """When this peer has learned what closes the round."""

    def take(self, sender: str, record: RoundRecord, known: Collection[str]) -> CheckedRecord | None:
        """Checks a record, and keeps it if this view's proposer has signed it or an honest peer votes for it.

        Any other one is news only until this peer knows of a contribution. Returns None for what does not matter.
        Signatures take time, and keys are free: they are checked only if an honest peer votes for the record, or this
        one knows a contributor.

        Args:
            sender: The peer that shows it.
            record: The record.
            known: Peers that this one has heard itself.

        Raises:
            ProtocolError: If it is not signed as it should be.
        """
        value = list_digest(record)
        is_next = record.view == self.agreement.votes.view and self._proposal_now is None
        is_proposal = is_next and peer_id_of(record.public_key) == self.agreement.proposer
        is_needed = value not in self._records and self.agreement.is_vouched(value)
        is_news = not self._round.closing_s
        if (record.round, record.base) != self._place or not (is_proposal or is_needed or is_news):
            return None
        if not is_needed and not any(peer_id_of(one.public_key) in known for one in record.contributions):
            return None
        digest = blob_digest(msgspec.msgpack.encode(record))
        if self._junk[sender] >= _MOST_JUNK or digest in self._refused:
            return None
        try:
            contributors = self._seal.check_record(record)
        except ProtocolError:
            self._junk[sender] += 1
            self._refused[digest] = None
            raise
        checked = CheckedRecord(record, contributors)
        if is_proposal or is_needed:
            self._keep(checked, is_proposal=is_proposal)
        return checked

    @property
    def shown(self) -> RoundRecord | None:
        """What other members are shown: this view's proposal, or else what most speaks for."""
        value = self._proposal_now or self.agreement.preferred()
        known = None if value is None else self._records.get(value)
        return known and known.record

    def wanted(self, known: Collection[str]) -> list[bytes]:
        """Returns updates that are not here, of records that this peer may have to vote for.

        Args:
            known: Peers that this one has heard itself.
        """
        if self._round.is_full:
            return []
        return [
            blob
            for value, checked in self._records.items()
            if self.agreement.is_vouched(value) or set(checked.contributors) <= set(known)
            for blob in self._round.missing(checked.record.contributions)
        ]

    def holders(self, blob: bytes) -> list[str]:
        """Returns the members that say they have an update: they vote for records that list it."""
        values = {
            value
            for value, checked in self._records.items()
            if any(one.blob == blob for one in checked.record.contributions)
        }
        return [peer for value in values for peer in self.agreement.supporters(value)]

    def advance(
        self, members: Mapping[str, RunStatus], living: Mapping[str, RunStatus], known: Collection[str], now: float
    ) -> RoundRecord | None:
        """Votes; returns the record that closes the round, once that is decided and known.

        Args:
            members: Peers that have a vote, as they were heard last.
            living: All peers of the run, this one included.
            known: Peers that this one has heard itself.
            now: In seconds of a steady clock.
        """
        votes = {peer: status.votes for peer, status in members.items() if self._is_here(status)}
        self._decided = {
            peer: list_digest(status.record)
            for peer, status in members.items()
            if peer not in votes and status.record and (status.record.round, status.record.base) == self._place
        }
        self._note_quiet(members, votes, now)
        counted = [peer for peer in members if peer not in self.quiet]
        self.agreement.hear(
            {peer: votes.get(peer, Votes()) for peer in counted},
            {peer: value for peer, value in self._decided.items() if peer in counted},
        )
        done = self.agreement.advance(
            now,
            proposal=self._proposal(living),
            approves=lambda value: self._approves(value, living, known),
            is_due=self._round.is_due(living),
        )
        if done is None or done not in self._records:
            return None
        self.decided_at = self.decided_at or now
        return self._records[done].record

    def record_of(self, peers: Collection[str]) -> RoundRecord | None:
        """Returns the record with which most of some peers, which have gone on, have closed the round."""
        counts = Counter(value for peer, value in self._decided.items() if peer in peers)
        value = next((value for value, count in counts.items() if 2 * count > len(peers)), None)
        known = None if value is None else self._records.get(value)
        return known and known.record

    def quiet_after(self, living: Mapping[str, RunStatus]) -> set[str]:
        """Returns who is not counted in the next round either: quiet ones that are not even in this round."""
        return {peer for peer in self.quiet if peer in living and not self._is_here(living[peer])}

    def _is_here(self, status: RunStatus) -> bool:
        return (status.round, status.state) == self._place

    def _note_quiet(self, members: Mapping[str, RunStatus], votes: Mapping[str, Votes], now: float) -> None:
        """Finds members that do not vote although all honest ones must have by now."""
        if self._voted_at is None and self.agreement.votes != Votes():
            self._voted_at = now
        passed_s = 0.0 if self._voted_at is None else now - self._voted_at
        for peer, status in members.items():
            if peer in self._decided or votes.get(peer, Votes()) != Votes():
                self.quiet.discard(peer)
                continue
            # One in another round is given the time in which it fetches what it lacks, or this peer does.
            more_s = self._config.transfer_s if status.round != self._place[0] else 0.0
            if passed_s > self._config.straggler_s + 2 * self._config.dead_s + more_s:
                self.quiet.add(peer)

    def _proposal(self, living: Mapping[str, RunStatus]) -> bytes | None:
        proposer = self.agreement.proposer
        if proposer in self._decided:
            return self._decided[proposer]
        if proposer == self._seal.peer_id and self._proposal_now is None:
            self._propose(living)
        return self._proposal_now

    @property
    def _proposal_now(self) -> bytes | None:
        """What has been proposed in this view."""
        is_of_view = self._proposed is not None and self._proposed[0] == self.agreement.votes.view
        return self._proposed[1] if self._proposed and is_of_view else None

    def _propose(self, living: Mapping[str, RunStatus]) -> None:
        value = self.agreement.preferred()
        if value is None:
            due = self._round.due(living)
            contributors, contributions = list(due), tuple(due.values())
        elif value in self._records:
            contributors, contributions = self._records[value].contributors, self._records[value].record.contributions
        else:
            return
        if contributions:
            (round_, base), view = self._place, self.agreement.votes.view
            record = self._seal.record(round_=round_, base=base, view=view, contributions=contributions)
            self._keep(CheckedRecord(record, contributors), is_proposal=True)

    def _keep(self, checked: CheckedRecord, *, is_proposal: bool) -> None:
        value = list_digest(checked.record)
        self._records[value] = checked
        if is_proposal:
            self._proposed = (checked.record.view, value)

    def _approves(self, value: bytes, living: Mapping[str, RunStatus], known: Collection[str]) -> bool:
        """Returns whether a record may close the round as far as this peer can tell.

        Its updates must be here, so that what is decided can be fetched. For the rest, an honest peer's word is enough.
        """
        checked = self._records.get(value)
        if checked is None or not self._round.has_all(checked.record):
            return False
        is_fair = set(checked.contributors) <= set(known) and self._round.is_fair(checked.record, living)
        return is_fair or self.agreement.is_vouched(value)
