"""Connections that wait for a request, or for the rest of one: bounds on how long, and on how many there are."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm_plugins.transport.admission.addresses import host_of

_HEADERS_S = 20.0
"""Time for a client to send the head of its request."""
_STALLED_S = 60.0
"""Time for a client to read some of what waits for it."""
_MAX_OWING = 128
"""A quarter of all connections: the others are for clients whose requests have arrived."""


class Owing:
    """Connections on which something is awaited. If there are too many, the address with most of them loses its oldest.

    So whoever opens connections and says nothing loses its own, and keeps out no client that sends its request at once.
    """

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Connection, None]] = {}

    def add(self, connection: Connection) -> None:
        """Counts a connection, until `discard`. Idempotent."""
        self._by_address.setdefault(connection.address, {}).setdefault(connection)
        if sum(map(len, self._by_address.values())) > _MAX_OWING:
            most = max(self._by_address.values(), key=len)
            oldest = next(iter(most))
            self.discard(oldest)
            oldest.transport.abort()

    def discard(self, connection: Connection) -> None:
        """Forgets a connection. Idempotent."""
        of_address = self._by_address.get(connection.address, {})
        of_address.pop(connection, None)
        if not of_address:
            self._by_address.pop(connection.address, None)


class Connection(H11Protocol):
    """Closes if the head of a request does not arrive in time; uvicorn itself would wait forever.

    Args:
        owing: The connections on which something is awaited.
        args: As for uvicorn's own.
        options: As for uvicorn's own.
    """

    def __init__(self, *args: Any, owing: Owing, **options: Any) -> None:
        super().__init__(*args, **options)
        self._owing = owing
        self._ending: asyncio.TimerHandle | None = None
        self._stalling: asyncio.TimerHandle | None = None
        self.address = ""
        """The client's, of IPv6 its network of 64 bits: whoever has one has them all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = host_of(self.client[0]) if self.client else ""
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalling = self.loop.call_later(_STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalling is not None:
            self._stalling.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._owing.discard(self)
        self._stop_time()
        if self._stalling is not None:
            self._stalling.cancel()

    def _note(self) -> None:
        cycle = self.cycle
        is_head_due = cycle is None or cycle.response_complete
        if self.transport.is_closing():
            return
        if is_head_due or cycle.more_body:
            self._owing.add(self)
        else:
            self._owing.discard(self)
        if not is_head_due:
            self._stop_time()
        elif self._ending is None:
            self._ending = self.loop.call_later(_HEADERS_S, self.transport.abort)

    def _stop_time(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
