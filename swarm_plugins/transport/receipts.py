"""Receipts: a server's signature under what it was asked and what it answered.

A receipt lets a third party see that this identity gave this answer to this request: the request names version, blocks,
adapters and a nonce of the client. The signing key is the peer's own, so no other party is needed to check it.

A request is hashed as the values that arrive: those are computed with, however they were packed. An answer is hashed as
it is packed to travel, as its receiver has nothing else.

The answer to a step of a session depends on the steps before it, so its receipt also covers the session's history on
this server: a hash of the opening, extended by the hash of each step's request. A server keeps nothing but that hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.identity import Identity, is_signed_by, peer_id_of
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Codec,
    Commitment,
    CommitRequest,
    ForwardRequest,
    ForwardResponse,
    Message,
    Receipt,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.wire import encode

_DOMAIN = b"swarm_plugins receipt 1"
"""Keeps the signature from being one of anything else that the same key signs."""
_SESSION_DOMAIN = b"swarm_plugins session receipt 1"
_HISTORY_DOMAIN = b"swarm_plugins session history 1"

Signable = TypeVar("Signable", ForwardResponse, BackwardResponse, SessionStepResponse, Commitment)
Asked = ForwardRequest | BackwardRequest | SessionStep | CommitRequest


def message_hash(message: Message, codec: Codec) -> bytes:
    """Returns the SHA-256 of a message's frame, packed with a codec."""
    digest = hashlib.sha256()
    for part in encode(message, codec=codec):
        digest.update(part)
    return digest.digest()


def request_hash(request: Message) -> bytes:
    """Returns the SHA-256 of a request as it arrived."""
    return message_hash(request, "none")


def first_history(opened: SessionOpen) -> bytes:
    """Returns the history of a session that has made no step yet."""
    return hashlib.sha256(_HISTORY_DOMAIN + request_hash(opened)).digest()


def next_history(history: bytes, asked: bytes) -> bytes:
    """Returns the history of a session after one more step, whose request has the hash ``asked``."""
    return hashlib.sha256(_HISTORY_DOMAIN + history + asked).digest()


def history_after(opened: SessionOpen, steps: Iterable[SessionStep]) -> bytes:
    """Returns the history of a session after some steps, as they arrived."""
    history = first_history(opened)
    for step in steps:
        history = next_history(history, request_hash(step))
    return history


class Signer(NamedTuple):
    """A server's key, and what it says about itself in its receipts."""

    identity: Identity
    version: str
    dtype: str
    quantization: str

    def sign(self, request: Asked, answer: Signable, history: bytes = b"") -> tuple[Signable, bytes]:
        """Returns the answer with a receipt, and the history of the session after it.

        ``history`` is the session's history before the step. If it is empty (unknown, or no session), the receipt names
        none, and none is returned.
        """
        asked = request_hash(request)
        receipt = Receipt(
            public_key=self.identity.public_key,
            signature=b"",
            version=self.version,
            dtype=self.dtype,
            quantization=self.quantization,
            history=history,
        )
        signature = self.identity.sign(_statement(asked, request.reply_codec, answer, receipt))
        signed = msgspec.structs.replace(answer, receipt=msgspec.structs.replace(receipt, signature=signature))
        return signed, next_history(history, asked) if history else b""


def check_receipt(peer: str, request: Asked, answer: Signable, history: bytes = b"") -> tuple[Receipt, bytes]:
    """Returns the receipt of an answer, and the history of the session after it.

    The history returned is empty if the receipt names none: then it vouches for this answer alone.

    Args:
        peer: Who has to have signed it.
        request: The request as it arrived there.
        answer: The answer as it arrived here.
        history: The session's history before the step; empty if it is unknown or there is no session.

    Raises:
        ProtocolError: If there is none, or it is not this peer's receipt for this answer to this request; or if it
            names another history.
    """
    receipt = answer.receipt
    if receipt is None:
        raise ProtocolError(f"server {peer} signed no receipt for its answer")
    if peer_id_of(receipt.public_key) != peer:
        raise ProtocolError(f"server {peer} signed a receipt with a key of another peer")
    asked = request_hash(request)
    plain = msgspec.structs.replace(answer, receipt=None)
    statement = _statement(asked, request.reply_codec, plain, receipt)
    if not is_signed_by(receipt.public_key, statement, receipt.signature):
        raise ProtocolError(f"server {peer} signed a receipt for something other than its answer")
    if not history or not receipt.history:
        return receipt, b""
    if receipt.history != history:
        raise ProtocolError(f"server {peer} signed a receipt for another history of the session")
    return receipt, next_history(history, asked)


def _statement(asked: bytes, codec: Codec, answer: Message, receipt: Receipt) -> bytes:
    # A codec that loses bits gives the same bytes when its result is packed again.
    about = (asked, message_hash(answer, codec), receipt.version, receipt.dtype, receipt.quantization)
    if receipt.history:
        return msgspec.msgpack.encode((_SESSION_DOMAIN, *about, receipt.history))
    return msgspec.msgpack.encode((_DOMAIN, *about))
