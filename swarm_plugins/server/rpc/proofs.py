"""What a server gives to be checked by: receipts for its answers."""

from __future__ import annotations

import asyncio
import functools

from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import BackwardRequest, CommitRequest
from swarm_plugins.transport.receipts import Asked, Signable, sign_answer

_INLINE_BYTES = 256 << 10
"""Larger messages are hashed outside of the event loop."""


async def signed(service: Service, request: Asked, answer: Signable) -> Signable:
    """Returns an answer with a receipt, if the request asks for one."""
    if not request.nonce or service.identity is None:
        return answer
    info = service.info()
    sign = functools.partial(
        sign_answer,
        service.identity,
        request,
        answer,
        version=service.version,
        dtype=info.dtype,
        quantization=info.quantization,
    )
    if isinstance(request, CommitRequest):
        main = request.forward.hidden
    else:
        main = request.grad_hidden if isinstance(request, BackwardRequest) else request.hidden
    return await asyncio.to_thread(sign) if main.nbytes > _INLINE_BYTES else sign()
