"""What a server gives to be checked by: receipts for its answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import CommitRequest, SessionOpen
from swarm_plugins.transport.pushed import input_name
from swarm_plugins.transport.receipts import Asked, Signable, Signer, first_history

T = TypeVar("T")
_INLINE_BYTES = 256 << 10
"""Larger messages are hashed outside of the event loop."""


async def signed(
    service: Service, version: str, request: Asked, answer: Signable, history: bytes = b""
) -> tuple[Signable, bytes]:
    """Returns an answer, with a receipt if the request asks for one, and the session's history after it.

    ``version`` is the one asked for. ``history`` is the session's history before the step. Without a receipt there is
    none after it.
    """
    if not request.nonce or service.identity is None:
        return answer, b""
    info = service.info()
    signer = Signer(service.identity, version, info.dtype, info.quantization)
    given = request.forward.hidden if isinstance(request, CommitRequest) else getattr(request, input_name(request))
    return await hashing(given.nbytes, functools.partial(signer.sign, request, answer, history))


async def opening_history(service: Service, request: SessionOpen) -> bytes:
    """Returns the history that a session begins with; empty if this server signs nothing."""
    if service.identity is None:
        return b""
    num_bytes = sum(tensor.nbytes for tensor in request.prefix)
    return await hashing(num_bytes, functools.partial(first_history, request))


async def hashing(num_bytes: int, work: Callable[[], T]) -> T:
    """Hashes so many bytes, outside of the event loop if they are many."""
    return await asyncio.to_thread(work) if num_bytes > _INLINE_BYTES else work()
