"""``rpc_push``: hidden states from server to server; Petals' `S2S` route, made safe.

A client tells every server of a chain what a step is, and each server hands its output to the next one, so that a
token crosses the network once per server instead of twice. The client still gets every output: it checks them, and
replays them when a server is lost.
"""

from __future__ import annotations

import asyncio

from torch import Tensor

from swarm_plugins.errors import CapacityError, ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.checks import check_hidden
from swarm_plugins.server.rpc.handlers import send_failure
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.inbox import Inbox
from swarm_plugins.server.state.sessions import Session
from swarm_plugins.server.state.slots import Slot
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import PushedHidden

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


async def pushed_input(inbox: Inbox, placeholder: Tensor, num_bytes: int, charge: Charge) -> Tensor:
    """Returns what another server pushes for a request, of the shape and size that the request tells; charges it.

    Raises:
        RequestError: If it does not come in time, or something else does.
    """

    def check(hidden: Tensor) -> None:
        if hidden.shape[:-1] != placeholder.shape[:-1] or hidden.nbytes != num_bytes:
            raise BadRequestError(
                f"a tensor of shape {list(hidden.shape)} and {hidden.nbytes} bytes was pushed for a request of "
                f"{list(placeholder.shape)} and {num_bytes} bytes"
            )

    hidden = await inbox.take(check, timeout_s=limits.SESSION_LEASE_S)
    charge.claim(hidden.nbytes)
    return hidden


async def _receiver(service: Service, pushed: PushedHidden, sender: str) -> Session | Slot | None:
    """Returns what hidden states are for; they may overtake the client's own message by a moment."""
    pause_s = _EARLY_S
    while True:
        to = service.sessions.pushed_to(pushed, sender) or service.slots.find(pushed, sender)
        if to is not None or pause_s > _LONGEST_PAUSE_S:
            return to
        await asyncio.sleep(pause_s)
        pause_s *= 2


async def _deliver(service: Service, sender: str, pushed: PushedHidden) -> None:
    to = await _receiver(service, pushed, sender)
    # The same words, as late, whether there is such a session or not: a stranger learns nothing.
    if to is None:
        raise RequestError("refused", f"this peer may not push step {pushed.step} of session {pushed.session!r}")
    check_hidden(service, pushed.hidden)
    await to.inbox.deliver(pushed.step, pushed.hidden, timeout_s=limits.SESSION_LEASE_S)
