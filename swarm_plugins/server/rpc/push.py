"""``rpc_push``: hidden states from server to server; Petals' `S2S` route, made safe.

A client tells every server of a chain what a step is, and each server hands its output to the next one, so that a
token crosses the network once per server instead of twice. The client still gets every output: it checks them, and
replays them when a server is lost.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.errors import CapacityError, ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.checks import check_hidden
from swarm_plugins.server.rpc.handlers import send_failure
from swarm_plugins.server.rpc.proofs import hashing, signed
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.inbox import Inbox
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    PushedHidden,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.pushed import input_name, plain

Pushable = ForwardRequest | BackwardRequest | SessionStep
P = TypeVar("P", ForwardRequest, BackwardRequest)
A = TypeVar("A", ForwardResponse, BackwardResponse, SessionStepResponse)

_EARLY_S = 0.004
_LONGEST_PAUSE_S = 0.5
"""Pauses before nobody is believed to wait for hidden states: about a second in all."""


async def push_handler(service: Service, channel: Channel) -> None:
    """Takes hidden states for sessions, until the stream ends or something is refused."""
    while True:
        try:
            pushed = await channel.receive(timeout_s=limits.IDLE_SESSION_S)
            if pushed is None:
                return
            if not isinstance(pushed, PushedHidden):
                raise BadRequestError(f"rpc_push got a {type(pushed).__name__}, expected PushedHidden")
            await _deliver(service, channel.remote_peer, pushed)
            service.pushes.num_taken += 1
        except RequestTimeoutError:
            return
        except (RequestError, ProtocolError, CapacityError) as error:
            service.pushes.num_refused += 1
            await send_failure(service, channel, "rpc_push", error)
            return
        except TransportError:
            return


async def plain_step(request: SessionStep, inbox: Inbox, charge: Charge) -> SessionStep:
    """Returns a step as if its client had sent the input itself; see `plain_request`."""
    if request.pushed_bytes <= 0:
        inbox.skip()
        return plain(request)
    return plain(request, await _taken(inbox, request.hidden, request.pushed_bytes, charge))


async def plain_request(service: Service, request: P, charge: Charge) -> P:
    """Returns a request as if its client had sent the input itself, and charges an input that is pushed.

    Raises:
        RequestError: If the input does not come in time, or something else does.
    """
    slot = request.pushed
    if slot is None:
        return plain(request)
    with service.inboxes.listed(Inbox(charge.peer, (slot.name, slot.step), slot.key, slot.step)) as inbox:
        return plain(request, await _taken(inbox, getattr(request, input_name(request)), slot.num_bytes, charge))


async def _taken(inbox: Inbox, sent: Tensor, num_bytes: int, charge: Charge) -> Tensor:
    """Returns what is pushed for a request, of the shape and size that the request tells."""

    def check(hidden: Tensor) -> None:
        if hidden.shape[:-1] != sent.shape[:-1] or hidden.nbytes != num_bytes:
            raise BadRequestError(
                f"a tensor of shape {list(hidden.shape)} and {hidden.nbytes} bytes was pushed for a request of "
                f"{list(sent.shape)} and {num_bytes} bytes"
            )

    hidden = await inbox.take(check, timeout_s=limits.SESSION_LEASE_S)
    charge.claim(hidden.nbytes)
    return hidden


async def finished(
    service: Service, version: str, asked: Pushable, request: Pushable, answer: A, charge: Charge, history: bytes = b""
) -> tuple[A, bytes]:
    """Sends an output on, as ``asked``; returns its answer as the client gets it, and the session's history after it.

    That says what became of the output on its way to another server, and has the hash of a pushed input and a receipt
    for the plain ``request`` to blocks of a ``version``.
    """
    to, not_pushed, input_hash = asked.push_to, "", b""
    output = answer.grad_hidden if isinstance(answer, BackwardResponse) else answer.hidden
    if to is not None and output is not None:
        sent = service.ledger.charge(charge.peer)
        not_pushed = await service.pushes.send(charge.peer, to, output, asked.reply_codec, sent)
    is_pushed = asked.pushed_bytes > 0 if isinstance(asked, SessionStep) else asked.pushed is not None
    if is_pushed:
        given: Tensor = getattr(request, input_name(request))
        input_hash = await hashing(given.nbytes, functools.partial(tensor_hash, given))
    answer = msgspec.structs.replace(answer, not_pushed=not_pushed, input_hash=input_hash)
    return await signed(service, version, request, answer, history)


async def _inbox_of(service: Service, pushed: PushedHidden, sender: str) -> Inbox | None:
    """Returns what takes hidden states; they may overtake the client's own message by a moment."""
    pause_s = _EARLY_S
    while (to := service.inboxes.find(pushed, sender)) is None and pause_s <= _LONGEST_PAUSE_S:
        await asyncio.sleep(pause_s)
        pause_s *= 2
    return to


async def _deliver(service: Service, sender: str, pushed: PushedHidden) -> None:
    to = await _inbox_of(service, pushed, sender)
    # The same words, as late, whether there is such a session or not: a stranger learns nothing.
    if to is None:
        raise RequestError("refused", f"this peer may not push step {pushed.step} of session {pushed.session!r}")
    check_hidden(service, pushed.hidden)
    await to.deliver(pushed.step, pushed.hidden, timeout_s=limits.SESSION_LEASE_S)
