"""A transport in this process whose ways can be long, lossy or frozen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from recipes.benchmarks.links.line import Line
from recipes.benchmarks.links.trips import Trips
from swarm_plugins.errors import RequestTimeoutError
from swarm_plugins.testing.transports import LocalChannel, LocalTransport, Pipe
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.server_info import ServerInfo

_ASIDE = "rpc_info"
"""Asked now and then, by nothing that goes on."""


class LineTransport(LocalTransport):
    """A [`LocalTransport`][swarm_plugins.testing.LocalTransport] with a `Line` from any peer to any other."""

    def __init__(self, handlers_by_peer: Mapping[str, Mapping[str, Handler]]) -> None:
        super().__init__(handlers_by_peer)
        self._lines: dict[tuple[str | None, str], Line] = {}
        self.trips = Trips()
        """Messages one after the other, except those of ``rpc_info``."""

    def line(self, peer: str, caller: str | None = None) -> Line:
        """Returns the way to a peer, from another one or (None) from the client."""
        return self._lines.setdefault((caller, peer), Line())

    async def _open(self, caller: str, peer: str, rpc: str, timeout_s: float) -> Channel:
        line = self._line(caller, peer)
        try:
            await asyncio.wait_for(line.wait_until(lambda: line.is_sound), timeout_s)
        except TimeoutError as exc:
            raise RequestTimeoutError(f"peer {peer} did not answer within {timeout_s:g} s") from exc
        return await super()._open(caller, peer, rpc, timeout_s)

    def _connect(self, caller: str, peer: str, rpc: str) -> tuple[LocalChannel, LocalChannel]:
        line, own, its = self._line(caller, peer), self.counts_of[caller], self.counts_of[peer]
        there = _Way(Pipe(own, its, lambda num_bytes: line.there.arrival(_now(), num_bytes)))
        back = _Way(Pipe(its, own, lambda num_bytes: line.back.arrival(_now(), num_bytes)))
        trips = Trips() if rpc == _ASIDE else self.trips
        return _LineChannel(caller, peer, there, back, line, trips), _LineChannel(
            peer, caller, back, there, Line(), trips
        )

    def _line(self, caller: str, peer: str) -> Line:
        return self.line(peer, None if caller == self.client else caller)

    async def _info_of(self, peer: str) -> ServerInfo | None:
        return await super()._info_of(peer) if self.line(peer).is_sound else self._announced.get(peer)


class _Way:
    """One direction of a channel, and the lengths of the chains of messages that are on it."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.trips: deque[int] = deque()


class _LineChannel(LocalChannel):
    """One end of a line; only the caller's end knows of its faults."""

    def __init__(self, peer: str, remote_peer: str, outgoing: _Way, incoming: _Way, line: Line, trips: Trips) -> None:
        super().__init__(remote_peer, outgoing.pipe, incoming.pipe)
        self._peer = peer
        self._trips_out, self._trips_in = outgoing.trips, incoming.trips
        self._line = line
        self._trips = trips
        self._held: deque[bytes | None] = deque()
        """What has arrived, but may not be read yet."""

    async def _put(self, content: bytes) -> None:
        if not self._line.loses_requests:
            self._trips_out.append(self._trips.departs(self._peer))
            await super()._put(content)

    async def _get(self) -> bytes | None:
        line = self._line
        while True:
            if not self._held:
                self._held.append(await super()._get())
            await line.wait_until(lambda: not line.is_frozen)
            content = self._held.popleft()
            trips = 0 if content is None else self._trips_in.popleft()
            # The end of a stream is lost too.
            if not line.loses_answers:
                self._trips.arrives(self._peer, trips)
                return content
            await line.wait_until(lambda: not line.loses_answers)


def _now() -> float:
    return asyncio.get_running_loop().time()
