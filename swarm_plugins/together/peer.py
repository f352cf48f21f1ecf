"""One peer of a run: tells others where it is, closes rounds together with them, and keeps the shared state.

A round goes like this at every peer:

1. It trains. Its statuses show the round, the digest of the shared state, and its steps.
2. It contributes: keeps its update for others to fetch, and shows a signed contribution. Others that still train see
   that the round is closing, and contribute as well.
3. Everybody fetches the updates of all. One peer proposes a record, the list of those that are here, once all have
   contributed or ``straggler_s`` is over; the peers vote for it (`agreement`).
4. Each peer that knows of enough votes computes the next state with the record's updates.

Only *members* have a vote: living peers that have had a state of this peer's, so that they train with it. A peer with
work of its own takes over another state only if more than half of them have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from swarm_plugins.errors import ProtocolError, RequestTimeoutError, SwarmError
from swarm_plugins.together.blobs import Blobs
from swarm_plugins.together.closing import Closing
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.contributed import Contributed
from swarm_plugins.together.expelled import Expelled
from swarm_plugins.together.greetings import Greetings, RunNetwork, answer_all
from swarm_plugins.together.outer import SharedState, read_state, state_bytes, update_bytes
from swarm_plugins.together.refusals import NotAdmittedError, check_admitted, refused
from swarm_plugins.together.roster import Place, Roster
from swarm_plugins.together.rounds import Round
from swarm_plugins.together.signing import Seal
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import Message
from swarm_plugins.transport.run_messages import (
    NO_VOTES,
    BlobRequest,
    Contribution,
    RoundRecord,
    RunSpec,
    RunStatus,
)

log = logging.getLogger(__name__)

_HURRY = 5
"""While a round closes, peers are asked so many times as often."""
_MOST_TRIES = 5
"""An update or a state that no peer has had so many times is given up."""
_LONG_BYTES = 4 << 20
"""Larger states are computed outside of the event loop."""


class RunPeer:
    """Takes part in a run; all methods are called on one event loop.

    Args:
        run_id: Name of the run, for messages.
        seal: Signs as this peer.
        network: Reaches the others, and lists them.
        own: The state that it begins with, so that other peers can be answered.
        spec: What they must have in common with this one.
        config: Settings.
    """

    def __init__(
        self, run_id: str, seal: Seal, network: RunNetwork, own: SharedState, *, spec: RunSpec, config: RunConfig
    ) -> None:
        self.run_id = run_id
        self.me = seal.peer_id
        self._seal = seal
        self._spec = spec
        self._config = config
        self.progress: tuple[int, int, int] = (0, 0, 0)
        """Round, local steps in it, and samples; written by the trainer."""
        place = Place(own.round, own.digest)
        self._roster = Roster(seal.run, self.me, place, dead_s=config.dead_s, max_peers=config.max_peers)
        self._blobs = Blobs(seal.run, network, transfer_s=config.transfer_s)
        self._greetings = Greetings(
            seal.run,
            self.me,
            network,
            allows=seal.allows,
            status_for=self._status_for,
            heard=self._heard,
            again_s=min(5.0, config.dead_s / 3),
        )
        self.round = Round(own, self.me, config)
        """The round that this peer is in."""
        self._closing = Closing(self.round, seal, config)
        self._expelled = Expelled(run_id, seal)
        self._contributed = Contributed(run_id, seal, config.identity)
        self._signed: dict[str, Contribution] = {}
        """What each peer was first seen to have signed for this round, itself or in a record."""
        self._blobs.keep(own.blob)
        self._is_joining = True
        self._has_warned = False
        self._last_record: RoundRecord | None = None
        """Of the round before; None if it is not known."""
        self._moved = asyncio.Event()
        self._wake = asyncio.Event()
        self._is_ending = self._is_leaving = False
        self._task: asyncio.Task[None] | None = None

    @property
    def living(self) -> dict[str, RunStatus]:
        """The other peers, as they were heard last."""
        return self._roster.living(time.monotonic())

    @property
    def is_publisher(self) -> bool:
        """Whether this peer publishes for all."""
        return self._roster.publisher(time.monotonic()) == self.me

    async def join(self) -> None:
        """Takes over the state of the run's peers; founds the run with its own state if there are none.

        Raises:
            ConfigError: If the peers train something else, or do not admit this one.
            TransportError: If the directory cannot be asked, or the state does not come.
        """
        self._contributed.load()
        self._show_again()
        # Meet all first: a single peer must not decide.
        await self._greetings.meet()
        # With `allowed_peers`, strangers cannot keep anybody from founding a run.
        refusals = self._greetings.refusals
        if refusals and not self.living:
            raise refused(self.run_id, refusals)
        for peer, why in refusals.items():
            log.warning("run %s: cannot train with peer %s: %s", self.run_id, peer, why)
        # A fresh start gives way to any peer, a resumed one only to those that have come further.
        is_resumed = self.round.state.round > 0
        try:
            async with asyncio.timeout(self._config.transfer_s):
                while not await self._catch_up(is_counted=is_resumed):
                    await asyncio.sleep(self._config.poll_s / _HURRY)
                    await self._greetings.greet()
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"the state of run {self.run_id!r} did not come within {self._config.transfer_s:g} s from "
                f"{len(self.living)} peer(s): check this machine's network, or raise transfer_s"
            ) from error
        self._is_joining = False
        self._task = asyncio.create_task(self._run(), name=f"run {self.run_id}")

    def is_counted(self, state: SharedState) -> bool | None:
        """Returns whether a state's round counts what this peer has contributed, perhaps before it was started again.

        While that round is open, the contribution is shown; None if the round was closed, and how is not known.
        """
        if self.round.state.digest == state.digest:
            return self._contributed.to(state.round, state.digest) is not None
        return self._contributed.is_listed(state, self._last_record)

    async def contribute(self, blob: bytes, *, base: bytes, samples: int) -> bool | None:
        """Adds an update to this round, and waits until the next one has begun.

        Returns:
            Whether the round has it in; None if that is not known.

        Raises:
            RequestTimeoutError: If no round could be closed in time.
        """
        state, moved = self.round.state, self._moved
        if state.digest != base:
            return False
        is_shown, config = False, self._config
        limit_s = config.straggler_s + config.max_peers * config.dead_s + 3 * config.transfer_s
        try:
            async with asyncio.timeout(limit_s):
                # Never two to one round: they look like an attack.
                if self.me not in self.round.contributions:
                    digest = self._blobs.keep(blob)
                    signed = self._seal.contribution(round_=state.round, base=base, blob=digest, samples=samples)
                    await self._contributed.keep(signed, blob)
                    is_shown = self.round.add(self.me, signed)
                    self._wake.set()
                await moved.wait()
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"round {state.round} of run {self.run_id!r} was not closed within {limit_s:g} s: check this machine's "
                "network; training can be resumed from a checkpoint"
            ) from error
        if not is_shown or self.round.state.round == state.round:
            return False
        return self._contributed.is_listed(state, self._last_record)

    async def linger(self) -> None:
        """Waits, for ``dead_s`` at most, until the others have what they need of this peer to end its last round.

        Its own state is final from now on: whoever is left, when others have gone, does not change it.
        """
        self._is_ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.dead_s):
                while any(status.round < self.round.state.round for status in self.living.values()):
                    await asyncio.sleep(self._config.poll_s / _HURRY)

    async def leave(self) -> None:
        """Tells the others, and ends. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._is_leaving = True
        await self._greetings.leave()
        await self._blobs.close()

    async def answer(self, channel: Channel) -> None:
        """Answers the requests of one stream."""
        await answer_all(channel, self._answer)

    def _answer(self, peer: str, request: Message) -> Message:
        if isinstance(request, RunStatus):
            self._heard(peer, request)
            return self._status_for(peer)
        if isinstance(request, BlobRequest) and peer in self.living:
            return self._blobs.part(request)
        raise ProtocolError(f"expected a status of run {self.run_id!r} first, got a {type(request).__name__}")

    def _status_for(self, peer: str) -> RunStatus:
        state, living = self.round.state, self.living
        round_, steps, samples = self.progress
        is_current = round_ == state.round
        # Until it is admitted, a peer is told only what peers of all versions can read.
        theirs = living.get(peer)
        is_here = theirs is not None and theirs.state == state.digest
        return RunStatus(
            run=self._seal.run,
            proof=self._seal.proof_for(peer),
            spec=self._spec,
            round=state.round,
            # A state that was only begun with has no say.
            state=b"" if self._is_joining else state.digest,
            steps=steps if is_current else 0,
            samples=samples if is_current else 0,
            contribution=self.round.contributions.get(self.me),
            record=self._closing.shown if is_here else self._last_record if theirs else None,
            votes=self._closing.agreement.votes if theirs and not self._is_joining else NO_VOTES,
            evidence=self._expelled.against(theirs.peers) if theirs else (),
            peers=tuple(living),
            is_leaving=self._is_leaving,
        )

    def _heard(self, peer: str, status: RunStatus) -> None:
        """Takes a peer's status; raises ProtocolError if it cannot take part."""
        check_admitted(self.run_id, self._seal, self._spec, peer, status)
        if peer in self._expelled:
            shown = "has shown different updates to one round: start again with another identity"
            raise NotAdmittedError("refused", f"peer {peer} {shown}")
        if not self._roster.heard(peer, status, time.monotonic()):
            raise NotAdmittedError("refused", f"run {self.run_id!r} is full: {self._config.max_peers} peers take part")
        self._greetings.learn((peer,))
        for evidence in status.evidence:
            if accused := self._expelled.take(evidence, self._roster.known):
                self._roster.forget(accused)
        if status.contribution is not None and not status.is_leaving:
            self._take_contribution(peer, status.contribution)
        if status.record is not None:
            checked = self._closing.take(peer, status.record, self._roster.known)
            for contributor, one in checked.by_contributor if checked else ():
                self._compare(contributor, one)
                # What one peer is shown, all learn of: nobody may find the others silent who know of no closing.
                if contributor in self._roster.known and self.round.add(contributor, one):
                    self._wake.set()

    def _take_contribution(self, peer: str, contribution: Contribution) -> None:
        if contribution == self.round.contributions.get(peer):
            return
        if self._seal.contributor(contribution) != peer:
            raise ProtocolError("a contribution signed by another peer")
        self._compare(peer, contribution)
        if self.round.add(peer, contribution):
            self._wake.set()

    def _compare(self, peer: str, contribution: Contribution) -> None:
        """Expels a peer that has signed something else before."""
        if Place(contribution.round, contribution.base) != self._roster.place or peer not in self._roster.known:
            return
        if self._expelled.compare(peer, self._signed.setdefault(peer, contribution), contribution):
            self._roster.forget(peer)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._turn()
            except SwarmError as error:
                log.warning("run %s: %s", self.run_id, error)
            except Exception:  # a fault here must not leave the trainer waiting
                log.exception("run %s: this turn has failed; the next one follows", self.run_id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_s / (_HURRY if self.round.closing_s else 1)):
                    await self._wake.wait()

    def _warn_of_others(self) -> None:
        now, lasting_s = time.monotonic(), self._config.straggler_s + self._config.dead_s
        lasting = [peer for peer, since in self._roster.apart(now).items() if now - since > lasting_s]
        is_on_its_way = self._roster.majority(now) not in (None, self._roster.place)
        if lasting and not self._has_warned and not is_on_its_way:
            self._has_warned = True
            what = "trains another adapter, begun apart from this peer's or parted from it by a divided network"
            cure = "the two do not merge: stop one side, and start it again"
            log.warning("run %s: %s %s; %s", self.run_id, ", ".join(lasting), what, cure)

    async def _turn(self) -> None:
        await self._greetings.greet()
        if self._is_ending:
            return
        self._warn_of_others()
        now, known = self.round, {*self._roster.known, *self.round.contributions}
        for digest in dict.fromkeys((*now.offered, *self._closing.wanted(known))):
            self._fetch(digest)
        living = {**self.living, self.me: self._status_for(self.me)}
        members = self._roster.members(time.monotonic())
        record = self._closing.advance(members, living, known, time.monotonic())
        if record is not None and now.has_all(record):
            is_long = len(now.state.blob) > _LONG_BYTES
            state = await asyncio.to_thread(now.after, record) if is_long else now.after(record)
            self._last_record = record
            counted = {peer for peer, one in now.contributions.items() if one in record.contributions}
            late = frozenset(self.living) - counted
            self._enter(state, absent=late)
            log.info(
                "run %s: round %d had %d peers%s",
                self.run_id,
                record.round,
                len(record.contributions),
                f", without {', '.join(sorted(late))}" if late else "",
            )
        elif record is None or time.monotonic() - (self._closing.decided_at or 0.0) > self._config.dead_s:
            await self._catch_up(is_counted=True)

    def _fetch(self, digest: bytes) -> None:
        now = self.round
        owners = [peer for peer, one in now.contributions.items() if one.blob == digest]
        # Whoever votes for the update has it; its owner may be gone, or hold this peer up.
        peers = dict.fromkeys((*self._closing.holders(digest), *owners, *self.living))
        if self._blobs.want(digest, update_bytes(now.shapes), list(peers)):
            now.add_update(digest, self._blobs.get(digest) or b"")
        elif self._blobs.without(digest, tries=_MOST_TRIES) and digest in now.offered:
            log.warning("run %s: an update to round %d is lost", self.run_id, now.state.round)
            now.give_up(digest)

    async def _catch_up(self, *, is_counted: bool) -> bool:
        """Takes over the state that most peers have; returns whether this peer has it.

        Args:
            is_counted: Whether this peer's own state counts.
        """
        now = time.monotonic()
        # Before it has work of its own, a peer follows all; then those it trains with.
        is_new = self._is_joining or not self.round.state.round
        best = self._roster.most_agreed(now, is_counted=is_counted) if is_new else self._roster.majority(now)
        if best is None or best == self._roster.place:
            return True
        holders = self._roster.holders(best, now)
        if not self._blobs.want(best.digest, state_bytes(self.round.shapes), holders):
            self._roster.rule_out(best, self._blobs.without(best.digest, tries=_MOST_TRIES))
            return False
        try:
            state = read_state(self._blobs.get(best.digest) or b"", self.round.shapes)
            if state.round != best.round:
                raise ProtocolError(f"a shared state of round {state.round}, announced as one of round {best.round}")
        except ProtocolError as error:
            log.warning("run %s: %s", self.run_id, error)
            self._roster.rule_out(best, holders)
            return False
        log.info("run %s: took over the state of round %d from %d peer(s)", self.run_id, state.round, len(holders))
        # It tells whether this peer's update is in.
        self._last_record = self._closing.record_of(holders) if best.round == self.round.state.round + 1 else None
        self._enter(state)
        return True

    def _enter(self, state: SharedState, *, absent: frozenset[str] = frozenset()) -> None:
        """Begins a round."""
        before, self.round = self.round, Round(state, self.me, self._config, absent)
        quiet = self._closing.quiet_after(self.living)
        self._closing = Closing(self.round, self._seal, self._config, quiet)
        self._signed = {}
        self._roster.enter(Place(state.round, state.digest))
        # Slower peers still fetch the updates of the round before.
        listed = () if self._last_record is None else self._last_record.contributions
        kept = {one.blob for one in (*before.contributions.values(), *listed)}
        self._blobs.keep_only((*kept, self._blobs.keep(state.blob)))
        self._show_again()
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _show_again(self) -> None:
        """Shows what this peer had contributed to this round before it was started again."""
        state = self.round.state
        kept = self._contributed.to(state.round, state.digest)
        if kept is not None:
            self._blobs.keep(kept.update)
            self.round.add(self.me, kept.contribution)
            log.info("run %s: this peer has contributed to round %d before it was started", self.run_id, state.round)
