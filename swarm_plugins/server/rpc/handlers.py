"""The loop that all rpcs share: any number of requests on one stream, one after another; and the two smallest rpcs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from torch import Tensor

from swarm_plugins.errors import ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.server.failures import BadRequestError, failure_of
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.server.state.unsent import UnsentAnswers
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import Codec, InfoRequest, Message

log = logging.getLogger(__name__)

Answer = tuple[Message, Codec]
"""A message and how to pack its tensors."""


async def answer_requests(
    channel: Channel,
    rpc: str,
    kinds: tuple[type[Message], ...],
    answer: Callable[[Any], Awaitable[Answer]],
    *,
    idle_s: float,
    unsent: UnsentAnswers,
) -> None:
    """Answers the requests of one stream until its sender closes it, leaves or goes silent.

    A request that cannot be served is answered with a ``Failure``, and the stream lives on. A message that cannot be
    read ends it: what follows cannot be trusted to begin where a message begins.
    """
    while True:
        try:
            request = await channel.receive(timeout_s=idle_s)
        except RequestTimeoutError:
            log.debug("%s from %s was silent for %.0f s: closed", rpc, channel.remote_peer, idle_s)
            return
        except ProtocolError as error:
            await send_failure(channel, rpc, error)
            return
        except TransportError:
            return
        if request is None:
            return
        try:
            if not isinstance(request, kinds):
                due = " or ".join(kind.__name__ for kind in kinds)
                raise BadRequestError(f"{rpc} got a {type(request).__name__}, expected {due}")
            message, codec = await answer(request)
            with unsent.holding(channel.remote_peer, _num_bytes(message)):
                if not await _send(channel, rpc, message, codec):
                    return
        except Exception as error:  # noqa: BLE001 - every fault becomes a typed answer
            if not await send_failure(channel, rpc, error):
                return


async def _send(channel: Channel, rpc: str, message: Message, codec: Codec) -> bool:
    try:
        await channel.send(message, codec=codec)
    except TransportError as error:
        log.debug("%s to %s: the answer could not be sent: %s", rpc, channel.remote_peer, error)
        return False
    return True


def _num_bytes(message: Message) -> int:
    """Returns the bytes of a message's tensors."""
    fields = [getattr(message, name) for name in message.__struct_fields__]
    tensors = [one for field in fields for one in (field if isinstance(field, tuple) else (field,))]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


async def send_failure(channel: Channel, rpc: str, error: Exception) -> bool:
    """Sends the failure of an error; returns False if the stream is broken."""
    try:
        await channel.send(failure_of(error, peer=channel.remote_peer, rpc=rpc))
    except TransportError:
        return False
    return True


async def info_handler(service: Service | ExpertsService, channel: Channel) -> None:
    """Answers what is served here."""

    async def answer(_: InfoRequest) -> Answer:
        return service.info(), "none"

    await answer_requests(
        channel, "rpc_info", (InfoRequest,), answer, idle_s=service.limits.idle_stream_s, unsent=service.unsent
    )


async def push_handler(service: Service, channel: Channel) -> None:
    """Refuses: this version of the server does not hand outputs on to other servers."""
    error = BadRequestError("rpc_push is not served here: send the output to the next server yourself")
    await send_failure(channel, "rpc_push", error)
