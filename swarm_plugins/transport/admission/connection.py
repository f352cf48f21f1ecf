"""The DHT's own connection to the libp2p daemon, which bounds what strangers send before it is decoded.

hivemind reads as fast as the daemon delivers, and decodes up to 4 MiB before it asks who has sent them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from hivemind.p2p import P2P, P2PContext, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE, ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.utils.multiaddr import Multiaddr

from swarm_plugins.errors import ProtocolError
from swarm_plugins.recent import Recent
from swarm_plugins.transport.admission.budgets import Bucket, CallBudget, CallBudgets
from swarm_plugins.transport.admission.gate import REFUSED, Gate
from swarm_plugins.transport.admission.origins import Origins, list_connections
from swarm_plugins.transport.daemon.process import ignore_error

MAX_CALL_BYTES = 128 << 10
"""Largest call of the DHT; 16 records of 4 KiB take half of it."""

_ENTER_TIMEOUT_S = 3.0
_BURST_BYTES = 64 << 20
_BYTES_PER_S = 64 << 20
# Messages count as their bytes, and as some more for their work: 50 us if nobody answers, 200 us otherwise.
_MESSAGE_BYTES = _BYTES_PER_S // 4000
_CALL_BYTES = _BYTES_PER_S // 500
_IGNORE_S = 10.0


class PacedReader:
    """Reads no faster than the DHT may take from the CPU, whoever sends: the rest waits in the daemon."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._bytes = Bucket(_BURST_BYTES, _BYTES_PER_S)

    async def readexactly(self, num_bytes: int) -> bytes:
        """Returns the next bytes, when their time has come."""
        data = await self._reader.readexactly(num_bytes)
        if num_bytes > 1:  # a single byte is part of a length
            self.charge(num_bytes + _MESSAGE_BYTES)
            if (debt_s := self._bytes.debt_s) > 0:
                await asyncio.sleep(debt_s)
        return data

    def charge(self, num_bytes: int) -> None:
        self._bytes.charge(num_bytes)


class _PacedConnector(DaemonConnector):  # type: ignore[misc]  # hivemind has no types
    reader: PacedReader

    async def open_persistent_connection(self) -> tuple[Any, Any]:
        reader, writer = await super().open_persistent_connection()
        self.reader = PacedReader(reader)
        return self.reader, writer


class _Control(ControlClient):  # type: ignore[misc]  # hivemind has no types
    """Ignores callers that go on although they are refused: their calls do not hold up those of others.

    The daemon delivers all calls one after another. If each was answered, some thousand from one peer, all sent at
    once, would take longer than others wait for an answer.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ignored: Recent[bytes, float] = Recent()
        """Peer ids, as bytes, and until when."""

    def ignore(self, peer: bytes) -> None:
        """Ignores the calls of a peer for a while."""
        self._ignored[peer] = time.monotonic() + _IGNORE_S

    async def _handle_persistent_request(self, call_id: Any, request: Any) -> None:
        if self._ignored.get(request.peer, 0.0) > time.monotonic():
            self._handler_tasks.pop(call_id)
            return
        self.daemon_connector.reader.charge(_CALL_BYTES)
        await super()._handle_persistent_request(call_id, request)


class DHTConnection(P2P):  # type: ignore[misc]  # hivemind has no types
    """A second connection to a running daemon, for calls of the DHT only."""

    gate: Gate
    origins: Origins
    budgets: CallBudgets
    _refusals: CallBudget
    """Of each caller, those that are said."""

    @classmethod
    async def open(cls, socket_path: str, gate: Gate) -> DHTConnection:
        """Connects to the daemon that listens on ``socket_path``; ``gate`` admits callers and called ones."""
        self = cls()
        self.gate = gate
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{socket_path}")
        # Never listened on: calls of the DHT use no streams.
        self._client_listen_maddr = Multiaddr(f"/unix{socket_path}-dht-{secrets.token_hex(4)}")
        self._client = Client(_initialized_with_create=True)
        self._client.control = await _Control.create(
            _PacedConnector(control_maddr=self._daemon_listen_maddr),
            self._client_listen_maddr,
            persistent_conn_max_msg_size=DEFAULT_MAX_MSG_SIZE,
        )
        for task in (self._client.control._read_task, self._client.control._write_task):
            task.add_done_callback(ignore_error)  # when the daemon dies; its owner notices
        await self._ping_daemon()
        self.origins = Origins(lambda: list_connections(self))
        self.budgets = CallBudgets()
        self._refusals = CallBudget(50, 5.0)
        return self

    def close(self) -> None:
        self._client.close()

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Callable[..., Any], input_protobuf_type: Any, balanced: bool = False
    ) -> None:
        async def answer(request: bytes, remote_id: PeerID) -> bytes:
            peer = remote_id.to_base58()
            await self._check(len(request), remote_id)
            context = P2PContext(handle_name=handle_name, local_id=self.peer_id, remote_id=remote_id)
            response = await handler(input_protobuf_type.FromString(request), context)
            content = bytes(response.SerializeToString())
            self.budgets.charge(peer, await self.origins.of(peer), len(content))
            return content

        await self._client.add_unary_handler(handle_name, answer, balanced=balanced)

    async def _call_unary_protobuf_handler(
        self, peer_id: PeerID, handle_name: str, input: Any, output_protobuf_type: Any
    ) -> Any:
        peer = peer_id.to_base58()
        call = super()._call_unary_protobuf_handler
        for is_last in (False, True):
            await self.gate.enter(peer, _ENTER_TIMEOUT_S)
            try:
                return await call(peer_id, handle_name, input, output_protobuf_type)
            except P2PHandlerError as exc:
                if is_last or not self.gate.is_secret or REFUSED not in str(exc):
                    raise
                self.gate.forget(peer)  # it has been restarted
        return None

    async def _check(self, num_bytes: int, caller: PeerID) -> None:
        peer = caller.to_base58()
        refusal = self.gate.refusal(peer) or self.budgets.refusal(peer, await self.origins.of(peer))
        if refusal is not None:
            if not self._refusals.take(peer):
                self._client.control.ignore(caller.to_bytes())
            raise ProtocolError(refusal)
        if num_bytes > MAX_CALL_BYTES:
            raise ProtocolError(f"call of the DHT with {num_bytes} bytes, the limit is {MAX_CALL_BYTES}")
