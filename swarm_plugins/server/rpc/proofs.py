"""What a server gives to be checked by: receipts for its answers."""

from __future__ import annotations

import asyncio
import functools

from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import BackwardRequest
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
    size = request.grad_hidden.nbytes if isinstance(request, BackwardRequest) else request.hidden.nbytes
    return await asyncio.to_thread(sign) if size > _INLINE_BYTES else sign()
