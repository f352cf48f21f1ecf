"""What a server gives to be checked by: receipts for its answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.server.service import Service
from swarm_plugins.server.state.sessions import Session
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    CommitRequest,
    ForwardRequest,
    ForwardResponse,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.pushed import input_name
from swarm_plugins.transport.receipts import Asked, Signable, Signer, first_history

T = TypeVar("T")
Pushable = ForwardRequest | BackwardRequest | SessionStep
A = TypeVar("A", ForwardResponse, BackwardResponse, SessionStepResponse)
_INLINE_BYTES = 256 << 10
"""Larger messages are hashed outside of the event loop."""


async def signed(service: Service, request: Asked, answer: Signable) -> Signable:
    """Returns an answer with a receipt, if the request asks for one."""
    signer = _signer(service, request)
    if signer is None:
        return answer
    if isinstance(request, CommitRequest):
        main = request.forward.hidden
    else:
        main = request.grad_hidden if isinstance(request, BackwardRequest) else request.hidden
    found, _ = await _hashing(main.nbytes, functools.partial(signer.sign, request, answer))
    return found


async def signed_step(
    service: Service, session: Session, history: bytes, request: SessionStep, answer: SessionStepResponse
) -> SessionStepResponse:
    """Returns a step's answer with a receipt, if the request asks for one, and extends the session's history then."""
    signer = _signer(service, request)
    if signer is None:
        return answer
    sign = functools.partial(signer.sign, request, answer, history)
    answer, session.history = await _hashing(request.hidden.nbytes, sign)
    return answer


async def opening_history(service: Service, request: SessionOpen) -> bytes:
    """Returns the history that a session begins with; empty if this server signs nothing."""
    if service.identity is None:
        return b""
    num_bytes = sum(tensor.nbytes for tensor in request.prefix)
    return await _hashing(num_bytes, functools.partial(first_history, request))


async def completed(sending: Awaitable[str], request: Pushable, answer: A, is_pushed: bool) -> A:
    """Returns an answer with what became of its output's way to another server, and the hash of a pushed input."""
    not_pushed, input_hash = await sending, b""
    if is_pushed:
        given: Tensor = getattr(request, input_name(request))
        input_hash = await _hashing(given.nbytes, functools.partial(tensor_hash, given))
    return msgspec.structs.replace(answer, not_pushed=not_pushed, input_hash=input_hash)


def _signer(service: Service, request: Asked) -> Signer | None:
    if not request.nonce or service.identity is None:
        return None
    info = service.info()
    return Signer(service.identity, service.version, info.dtype, info.quantization)


async def _hashing(num_bytes: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if num_bytes > _INLINE_BYTES else work()
