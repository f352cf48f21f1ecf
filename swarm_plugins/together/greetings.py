"""Discovers the other peers of a run, and exchanges statuses with each of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from swarm_plugins.errors import ProtocolError, RefusedError, SwarmError, TransportError, printable
from swarm_plugins.together.blobs import RPC
from swarm_plugins.together.refusals import NotAdmittedError
from swarm_plugins.transport.channel import Channel, Opener
from swarm_plugins.transport.messages import Failure, Message
from swarm_plugins.transport.run_messages import MAX_RUN_PEERS, RunStatus

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_SLOW_S = 0.5
_MOST_FAILURES = 20
_LOOK_UP_S = 15.0
_FIRST_S = 10.0
"""Longest wait for the first answers of peers; avoids founding a second run."""
_MOST_PASSES = 10
_ANNOUNCED_S = 120.0
_IDLE_S = 60.0


async def answer_all(channel: Channel, answer: Callable[[str, Message], Message]) -> None:
    """Answers the requests of one stream until it ends, or says nothing for long.

    Args:
        channel: The stream.
        answer: Takes the peer's id and its request; a NotAdmittedError or ProtocolError is the answer, too.
    """
    with contextlib.suppress(TransportError):
        while (request := await channel.receive(timeout_s=_IDLE_S)) is not None:
            try:
                reply = answer(channel.remote_peer, request)
            except NotAdmittedError as error:
                reply = Failure(kind=error.kind, message=str(error))
            except ProtocolError as error:
                reply = Failure(kind="bad_request", message=str(error))
            await channel.send(reply)


class RunNetwork(Opener, Protocol):
    """Reaches the peers of a run, and lists them."""

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Announces that this peer takes part."""
        ...

    async def run_peers(self, run: bytes) -> list[str]:
        """Returns the ids of peers that have announced that they take part."""
        ...


class Greetings:
    """Exchanges statuses with all known peers of a run.

    Args:
        run: The run's hash.
        me: Id of this peer.
        network: Reaches the others, and lists them.
        allows: Returns whether a peer may take part; others are not called.
        status_for: Returns what to tell a peer.
        heard: Takes what a peer has answered; raises ProtocolError if that cannot be.
        again_s: Pause before a peer that could not be reached is called again.
    """

    def __init__(
        self,
        run: bytes,
        me: str,
        network: RunNetwork,
        *,
        allows: Callable[[str], bool],
        status_for: Callable[[str], RunStatus],
        heard: Callable[[str, RunStatus], None],
        again_s: float,
    ) -> None:
        self._run = run
        self._me = me
        self._network = network
        self._allows = allows
        self._status_for = status_for
        self._heard = heard
        self._again_s = again_s
        self._channels: dict[str, Channel] = {}
        self._known: dict[str, float] = {}
        """Peers, and when each may be called again."""
        self._failures: Counter[str] = Counter()
        """Calls in vain, one after the other."""
        self._greeting: dict[str, asyncio.Task[None]] = {}
        self._look_up_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self.refusals: dict[str, str] = {}
        """Why peers do not let this one take part."""

    def learn(self, peers: Iterable[str]) -> None:
        """Notes the ids of peers that may take part."""
        for peer in peers:
            # Base58 ignores spaces: with them, one peer could go by many names.
            if peer == self._me or peer in self._known or not peer.isalnum() or not self._allows(peer):
                continue
            if len(self._known) >= 2 * MAX_RUN_PEERS:
                worst = max(self._known, key=lambda one: self._failures[one])
                if not self._failures[worst]:
                    return
                self._forget(worst)
            self._known[peer] = float("-inf")

    async def meet(self) -> None:
        """Announces this peer and greets the peers in the directory, then those they know.

        Raises:
            TransportError: If the directory cannot be asked.
        """
        named, tried = await self.look_up(), set[str]()
        for _ in range(_MOST_PASSES):
            # Peers that do not answer make room for others.
            self.learn(one for one in named if one not in tried)
            untried = self._known.keys() - tried
            tried |= untried
            await self.greet(patience_s=_FIRST_S)
            if not untried:
                return

    async def look_up(self) -> list[str]:
        """Announces this peer, and returns the others that the directory names.

        Raises:
            TransportError: If the directory cannot be asked.
        """
        self._look_up_at = time.monotonic() + _LOOK_UP_S
        await self._network.announce_run(self._run, _ANNOUNCED_S)
        named = await self._network.run_peers(self._run)
        self.learn(named)
        return named

    async def greet(self, *, patience_s: float = _SLOW_S) -> None:
        """Exchanges statuses with all peers, and looks for new ones from time to time.

        Peers that have not answered within ``patience_s`` may still do so later.
        """
        now = time.monotonic()
        if now >= self._look_up_at and self._looking is None:
            self._looking = asyncio.create_task(self._looked_up(), name="look for peers of a run")
        for peer, at in list(self._known.items()):
            if now >= at and peer not in self._greeting:
                self._greeting[peer] = asyncio.create_task(self._greet(peer), name="greet a peer of a run")
        if self._greeting:
            # One that hangs does not hold up the others.
            await asyncio.wait(list(self._greeting.values()), timeout=patience_s)

    async def leave(self) -> None:
        """Tells all reachable peers the last status, and closes the streams."""
        tasks = [*self._greeting.values(), *([] if self._looking is None else [self._looking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._greet(peer) for peer in list(self._channels)), return_exceptions=True)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _looked_up(self) -> None:
        try:
            await self.look_up()
        except SwarmError as error:
            log.debug("could not look for peers of the run: %s", error)
        finally:
            self._looking = None

    async def _greet(self, peer: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await self._exchange(peer)
            self._heard(peer, status)
        except (RefusedError, NotAdmittedError) as error:
            self.refusals[peer] = str(error)
            await self._give_up(peer)
        except Exception as error:  # noqa: BLE001 - whatever a peer's answer does, others are asked on
            log.debug("peer %s of the run does not answer: %s", peer, error)
            await self._give_up(peer)
        else:
            self.refusals.pop(peer, None)
            self._failures.pop(peer, None)
            self.learn(status.peers)
        finally:
            self._greeting.pop(peer, None)

    async def _exchange(self, peer: str) -> RunStatus:
        if peer not in self._channels:
            self._channels[peer] = await self._network.open(peer, RPC, timeout_s=_ANSWER_S)
        channel = self._channels[peer]
        await channel.send(self._status_for(peer))
        answer = await channel.receive(timeout_s=_ANSWER_S)
        if isinstance(answer, RunStatus):
            return answer
        if isinstance(answer, Failure) and answer.kind in ("wrong_run", "refused"):
            raise RefusedError(printable(answer.message))
        if answer is None:
            raise TransportError("it has closed the stream")
        raise ProtocolError(f"it answered with {type(answer).__name__}")

    def _forget(self, peer: str) -> None:
        """Drops a peer; the directory, or another peer, may name it again."""
        self._known.pop(peer, None)
        self._failures.pop(peer, None)
        self.refusals.pop(peer, None)

    async def _give_up(self, peer: str) -> None:
        self._known[peer] = time.monotonic() + self._again_s
        self._failures[peer] += 1
        if self._failures[peer] >= _MOST_FAILURES:
            self._forget(peer)
        channel = self._channels.pop(peer, None)
        if channel is not None:
            await channel.close()
