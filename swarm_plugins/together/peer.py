"""One peer of a run: tells others where it is, coordinates a round when its turn comes, and keeps the shared state.

A round goes like this at every peer:

1. It trains. Its statuses show the round, the digest of the shared state, and its steps.
2. It contributes: keeps its update for others to fetch, and shows a signed contribution. Others that still train see
   that the round is closing, and contribute as well.
3. Everybody fetches the updates of all. The coordinator, the first of all living peers by a hash of the round, lists
   those that are here, once all have contributed or ``straggler_s`` is over, and signs the list: the round's record.
4. Each peer with the record and its updates computes the next state, and passes the record on.

If the coordinator is lost or stuck, the next one by the hash lists anew; by then a record that any living peer has is
known to all. Peers that find themselves with different states take the one that most have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from swarm_plugins.errors import ProtocolError, RequestTimeoutError, SwarmError, TransportError
from swarm_plugins.together.blobs import Blobs
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.greetings import Greetings, RunNetwork
from swarm_plugins.together.outer import SharedState, read_state, state_bytes, update_bytes
from swarm_plugins.together.refusals import NotAdmittedError, difference, refused
from swarm_plugins.together.roster import Place, Roster
from swarm_plugins.together.rounds import Round
from swarm_plugins.together.signing import Seal
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import Failure, Message
from swarm_plugins.transport.run_messages import BlobRequest, RoundRecord, RunSpec, RunStatus

log = logging.getLogger(__name__)

_IDLE_S = 60.0
_HURRY = 5
"""While a round closes, peers are asked so many times as often."""
_MOST_TRIES = 5
"""An update or a state that no peer has had so many times is given up."""
_FIRST_S = 10.0
"""Longest wait for the first answers of peers; avoids founding a second run."""
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
        self,
        run_id: str,
        seal: Seal,
        network: RunNetwork,
        own: SharedState,
        *,
        spec: RunSpec,
        config: RunConfig,
    ) -> None:
        self.run_id = run_id
        self.me = seal.peer_id
        self._seal = seal
        self._spec = spec
        self._config = config
        self.progress: tuple[int, int, int] = (0, 0, 0)
        """Round, local steps in it, and samples; written by the trainer."""
        self._roster = Roster(seal.run, self.me, dead_s=config.dead_s, max_peers=config.max_peers)
        self._blobs = Blobs(seal.run, network, transfer_s=config.transfer_s)
        self._greetings = Greetings(
            seal.run,
            self.me,
            network,
            status_for=self._status_for,
            heard=self._heard,
            again_s=min(5.0, config.dead_s / 3),
        )
        self.round = Round(own, self.me, config)
        """The round that this peer is in."""
        self._blobs.keep(own.blob)
        self._past: set[bytes] = set()
        self._partners: set[str] = set()
        """Peers with whom this one has trained, or whose state it has taken over when it joined."""
        self._is_joining = True
        self._has_warned = False
        self._record_since = 0.0
        self._last_record: RoundRecord | None = None
        """Of the round before; None if it is not known."""
        self._offered: RoundRecord | None = None
        """The last record of this round that another peer has passed on, taken or not."""
        self._moved = asyncio.Event()
        self._wake = asyncio.Event()
        self._is_leaving = False
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
        await self._greetings.look_up()
        await self._greetings.greet(patience_s=_FIRST_S)
        refusals = self._greetings.refusals
        if refusals and not self.living:
            raise refused(self.run_id, refusals)
        for peer, why in refusals.items():
            log.warning("run %s: cannot train with peer %s: %s", self.run_id, peer, why)
        # A fresh start gives way to any peer, a resumed one only to those that have come further.
        place = self._place() if self.round.state.round else None
        self._partners |= set(self.living)
        try:
            async with asyncio.timeout(self._config.transfer_s):
                while not await self._catch_up(place):
                    await asyncio.sleep(self._config.poll_s / _HURRY)
                    await self._greetings.greet()
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"the state of run {self.run_id!r} did not come within {self._config.transfer_s:g} s from "
                f"{len(self.living)} peer(s): check this machine's network, or raise transfer_s"
            ) from error
        self._is_joining = False
        self._task = asyncio.create_task(self._run(), name=f"run {self.run_id}")

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
        digest = self._blobs.keep(blob)
        self.round.add(self.me, self._seal.contribution(round_=state.round, base=base, blob=digest, samples=samples))
        self._wake.set()
        config = self._config
        limit_s = config.straggler_s + config.max_peers * config.dead_s + 3 * config.transfer_s
        try:
            async with asyncio.timeout(limit_s):
                await moved.wait()
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"round {state.round} of run {self.run_id!r} was not closed within {limit_s:g} s: check this machine's "
                "network; training can be resumed from a checkpoint"
            ) from error
        if self.round.state.round == state.round:
            return False
        record = self._last_record
        if record is None or (record.round, record.base) != (state.round, base):
            return None
        return any(one.blob == digest for one in record.contributions)

    async def linger(self) -> None:
        """Waits, for ``dead_s`` at most, until the others have what they need of this peer to end its last round."""
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
        with contextlib.suppress(TransportError):
            while (request := await channel.receive(timeout_s=_IDLE_S)) is not None:
                try:
                    answer = self._answer(channel.remote_peer, request)
                except NotAdmittedError as error:
                    answer = Failure(kind=error.kind, message=str(error))
                except ProtocolError as error:
                    answer = Failure(kind="bad_request", message=str(error))
                await channel.send(answer)

    def _answer(self, peer: str, request: Message) -> Message:
        if isinstance(request, RunStatus):
            self._heard(peer, request)
            return self._status_for(peer)
        if isinstance(request, BlobRequest) and peer in self.living:
            return self._blobs.part(request)
        raise ProtocolError(f"expected a status of run {self.run_id!r} first, got a {type(request).__name__}")

    def _status_for(self, peer: str) -> RunStatus:
        now, state, living = self.round, self.round.state, self.living
        round_, steps, samples = self.progress
        is_current = round_ == state.round
        # Most peers know the last round; its record is long.
        is_news = peer not in living or living[peer].state != state.digest or now.record is not None
        return RunStatus(
            run=self._seal.run,
            proof=self._seal.proof_for(peer),
            spec=self._spec,
            round=state.round,
            # A state that was only begun with has no say.
            state=b"" if self._is_joining else state.digest,
            steps=steps if is_current else 0,
            samples=samples if is_current else 0,
            contribution=now.contributions.get(self.me),
            record=(now.record or self._last_record) if is_news else None,
            peers=tuple(living),
            is_leaving=self._is_leaving,
        )

    def _heard(self, peer: str, status: RunStatus) -> None:
        """Takes a peer's status; raises ProtocolError if it cannot take part."""
        self._check(peer, status)
        if not self._roster.heard(peer, status, time.monotonic()):
            raise NotAdmittedError("refused", f"run {self.run_id!r} is full: {self._config.max_peers} peers take part")
        self._greetings.learn((peer,))
        if status.contribution is not None and not status.is_leaving:
            if self._seal.contributor(status.contribution) != peer:
                raise ProtocolError("a contribution signed by another peer")
            if self.round.add(peer, status.contribution):
                self._wake.set()
        if status.record is not None and status.record != self.round.record:
            self._consider(status.record)

    def _consider(self, record: RoundRecord) -> None:
        """Takes a record of this round, if its coordinator and all that it lists are peers of the run."""
        if Place(record.round, record.base) != self._place():
            return
        coordinator, contributors = self._seal.check_record(record)
        self._offered = record
        is_known = {coordinator, *contributors} <= self._roster.known
        if is_known and self.round.consider(record, {**self.living, self.me: self._status_for(self.me)}):
            self._record_since = time.monotonic()
            self._wake.set()

    def _check(self, peer: str, status: RunStatus) -> None:
        if status.run != self._seal.run:
            raise NotAdmittedError("wrong_run", f"this peer takes part in another run, named {self.run_id!r}")
        if not self._seal.allows(peer):
            raise NotAdmittedError("refused", f"peer {peer} is not among the allowed peers of run {self.run_id!r}")
        if not self._seal.is_proved(peer, status.proof):
            raise NotAdmittedError("refused", f"the secret of run {self.run_id!r} is another one, or is missing")
        why = difference(self._spec, status.spec)
        if why is not None:
            raise NotAdmittedError("wrong_run", why)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._turn()
            except SwarmError as error:
                log.warning("run %s: %s", self.run_id, error)
            except Exception:  # a fault here must not leave the trainer waiting
                log.exception("run %s: this turn has failed; the next one follows", self.run_id)
            pause_s = self._config.poll_s / (_HURRY if self.round.closing_s else 1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _warn_of_others(self) -> None:
        now, lasting_s = time.monotonic(), self._config.straggler_s + self._config.dead_s
        apart = self._roster.apart(self._place(), self._past, self._partners, now)
        if not self._has_warned and (lasting := [peer for peer, since in apart.items() if now - since > lasting_s]):
            self._has_warned = True
            what = "began this run apart from this peer and trains another adapter; the two do not merge: stop one side"
            log.warning("run %s: %s %s, and start it again", self.run_id, ", ".join(lasting), what)

    async def _turn(self) -> None:
        await self._greetings.greet()
        self._warn_of_others()
        now, living = self.round, self.living
        for digest in now.missing:
            self._fetch(digest)
        if now.record is None and now.contributions:
            turn = self._roster.turn(now.state.round, living)
            due = tuple(now.due({**living, self.me: self._status_for(self.me)}, turn).values())
            if due:
                now.record = self._seal.record(round_=now.state.round, base=now.state.digest, contributions=due)
        if (record := now.ready()) is not None:
            is_long = len(now.state.blob) > _LONG_BYTES
            state = await asyncio.to_thread(now.after, record) if is_long else now.after(record)
            self._last_record = record
            listed = {peer for peer, one in now.contributions.items() if one in record.contributions}
            self._partners |= listed
            self._enter(state, absent=frozenset(living) - listed)
            late = sorted(set(living) - listed)
            log.info(
                "run %s: round %d had %d peers%s",
                self.run_id,
                record.round,
                len(record.contributions),
                f", without {', '.join(late)}" if late else "",
            )
        elif now.record is None or time.monotonic() - self._record_since > self._config.dead_s:
            await self._catch_up(self._place())
            self._drop_stuck(now)

    def _drop_stuck(self, now: Round) -> None:
        """Gives up a record whose updates have not come in time."""
        if now.record is not None and time.monotonic() - self._record_since > self._config.transfer_s:
            for digest in now.missing:
                now.give_up(digest)

    def _fetch(self, digest: bytes) -> None:
        now = self.round
        owners = [peer for peer, one in now.contributions.items() if one.blob == digest]
        # Whoever has closed the round has all its updates; an owner may be gone.
        ahead = [peer for peer, status in self.living.items() if status.round > now.state.round]
        if self._blobs.want(digest, update_bytes(now.shapes), list(dict.fromkeys((*ahead, *owners, *self.living)))):
            now.add_update(digest, self._blobs.get(digest) or b"")
        elif self._blobs.tries(digest) >= _MOST_TRIES:
            log.warning("run %s: an update to round %d is lost", self.run_id, now.state.round)
            now.give_up(digest)

    async def _catch_up(self, own: Place | None) -> bool:
        """Takes over the state that most peers have; returns whether this peer has it."""
        # Before it has work of its own, a peer follows all; later those whom it knows.
        partners = self._partners if own is not None and own.round else None
        best = self._roster.most_agreed(own, self._past, partners, time.monotonic())
        if best is None or best == self._place():
            return True
        holders = [peer for peer, status in self.living.items() if status.state == best.digest]
        if not self._blobs.want(best.digest, state_bytes(self.round.shapes), holders):
            if self._blobs.tries(best.digest) >= _MOST_TRIES:
                self._past.add(best.digest)  # no peer serves it: try another state
            return False
        state = read_state(self._blobs.get(best.digest) or b"", self.round.shapes)
        if state.round != best.round:
            raise ProtocolError(f"a shared state of round {state.round}, announced as one of round {best.round}")
        log.info("run %s: took over the state of round %d from %d peer(s)", self.run_id, state.round, len(holders))
        # It tells whether this peer's update is in.
        self._last_record = self._offered if best.round == self.round.state.round + 1 else None
        self._enter(state)
        return True

    def _place(self) -> Place:
        return Place(self.round.state.round, self.round.state.digest)

    def _enter(self, state: SharedState, *, absent: frozenset[str] = frozenset()) -> None:
        """Begins a round."""
        before, self.round = self.round, Round(state, self.me, self._config, absent)
        self._offered = None
        self._past.add(before.state.digest)
        # Slower peers still fetch the updates of the round before.
        kept = [one.blob for one in before.contributions.values()]
        self._blobs.keep_only((*kept, self._blobs.keep(state.blob)))
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
