"""The loop that all rpcs share: any number of requests on one stream, one after another; and the smallest rpc."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import torch

from swarm_plugins.errors import CapacityError, ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, failure_of
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import Codec, Message
from swarm_plugins.transport.server_info import MAX_ECHO_BYTES, EchoRequest, EchoResponse, InfoRequest, ServerInfo
from swarm_plugins.transport.wire import tensor_bytes

log = logging.getLogger(__name__)

Answer = tuple[Message, Codec]
"""A message and how to pack its tensors."""


async def answer_requests(
    service: Service | ExpertsService,
    rpc: str,
    kinds: tuple[type[Message], ...],
    answer: Callable[[Any, Charge], Awaitable[Answer]],
    channel: Channel,
    *,
    idle_s: float | None = None,
) -> None:
    """Answers the requests of one stream until its sender closes it, leaves or goes silent.

    ``answer`` charges what it allocates, its answer included, to the peer: all of it counts until the answer has been
    read. A request that cannot be served is answered with a ``Failure``, and the stream lives on. A message that cannot
    be read ends it: what follows cannot be trusted to begin where a message begins. ``idle_s`` is the longest silence;
    None: `IDLE_STREAM_S`.
    """
    patience_s = limits.IDLE_STREAM_S if idle_s is None else idle_s

    async def answer_next() -> bool:
        # A function of its own: a stream that waits for its next request must not keep the tensors of the last one.
        try:
            request = await channel.receive(timeout_s=patience_s)
        except RequestTimeoutError:
            log.debug("%s from %s was silent for %.0f s: closed", rpc, channel.remote_peer, patience_s)
            return False
        except ProtocolError as error:
            await send_failure(service, channel, rpc, error)
            return False
        except TransportError:
            return False
        except CapacityError as error:
            # There was no room for this message; the next one can be read.
            return await send_failure(service, channel, rpc, error)
        if request is None:
            return False
        try:
            if not isinstance(request, kinds):
                due = " or ".join(kind.__name__ for kind in kinds)
                raise BadRequestError(f"{rpc} got a {type(request).__name__}, expected {due}")
            with service.ledger.charge(channel.remote_peer) as charge:
                message, codec = await answer(request, charge)
                charge.cover(answer_bytes([tensor_bytes(message)], codec))
                return await _send(channel, rpc, message, codec)
        except Exception as error:  # noqa: BLE001 - every fault becomes a typed answer
            return await send_failure(service, channel, rpc, error)

    while await answer_next():
        pass


async def _send(channel: Channel, rpc: str, message: Message, codec: Codec) -> bool:
    try:
        await channel.send(message, codec=codec)
    except TransportError as error:
        log.debug("%s to %s: the answer could not be sent: %s", rpc, channel.remote_peer, error)
        return False
    return True


def answer_bytes(tensors: Iterable[int], codec: Codec) -> int:
    """Returns the memory of an answer with tensors of so many bytes, until it has been read."""
    return sum(tensors) * (1 if codec == "none" else 2)


async def send_failure(service: Service | ExpertsService, channel: Channel, rpc: str, error: Exception) -> bool:
    """Sends the failure of an error, and counts it; returns False if the stream is broken."""
    failure = failure_of(error, peer=channel.remote_peer, rpc=rpc)
    service.counts.refusals[failure.kind] += 1
    try:
        await channel.send(failure)
    except TransportError:
        return False
    return True


async def answer_info(service: Service | ExpertsService, request: InfoRequest | EchoRequest, _: Charge) -> Answer:
    """Answers what is served here, and echoes."""
    if isinstance(request, InfoRequest):
        return _present_info(service), "none"
    payload = request.payload
    if payload.dtype != torch.uint8 or payload.ndim != 1 or payload.nbytes > MAX_ECHO_BYTES:
        raise BadRequestError(
            f"the echo has shape {list(payload.shape)} and {payload.dtype}, expected at most [{MAX_ECHO_BYTES}] "
            "of uint8"
        )
    return EchoResponse(payload=payload), "none"


def _present_info(service: Service | ExpertsService) -> ServerInfo:
    info = service.info()
    if isinstance(service, Service):
        info = msgspec.structs.replace(info, adapter_digests=service.adapters.published)
    # One that waits for other peers' experts answers in the end, and names those that are missing. Where nothing was
    # measured (blocks that run in a client's process, on whatever machine), nothing tells long work from a hang.
    if info.state != "online" or info.needs or not info.decode_s:
        return info
    step_s = info.decode_s * (info.end - info.start)
    token_s = 1 / info.throughput if info.throughput > 0 else 0.0
    return msgspec.structs.replace(info, state="stuck") if service.scheduler.is_stuck(step_s, token_s) else info
