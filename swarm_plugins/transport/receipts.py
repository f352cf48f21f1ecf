"""Receipts: a server's signature under what it was asked and what it answered.

A receipt lets a third party see that this identity gave this answer to this request: the request names version, blocks,
adapters and a nonce of the client, and both are hashed as they travel. The signing key is the peer's own, so no other
party is needed to check it.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

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
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.wire import encode

_DOMAIN = b"swarm_plugins receipt 1"
"""Keeps the signature from being one of anything else that the same key signs."""

Signable = TypeVar("Signable", ForwardResponse, BackwardResponse, SessionStepResponse, Commitment)
Asked = ForwardRequest | BackwardRequest | SessionStep | CommitRequest


def message_hash(message: Message, codec: Codec) -> bytes:
    """Returns the SHA-256 of a message's frame, packed with a codec."""
    digest = hashlib.sha256()
    for part in encode(message, codec=codec):
        digest.update(part)
    return digest.digest()


def tensor_hash(tensor: Tensor) -> bytes:
    """Returns the SHA-256 of a tensor's type, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype}{list(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()


def sign_answer(
    identity: Identity, request: Asked, answer: Signable, *, version: str, dtype: str, quantization: str
) -> Signable:
    """Returns the answer with a receipt."""
    statement = _statement(request, answer, version, dtype, quantization)
    receipt = Receipt(
        public_key=identity.public_key,
        signature=identity.sign(statement),
        version=version,
        dtype=dtype,
        quantization=quantization,
    )
    return msgspec.structs.replace(answer, receipt=receipt)


def check_receipt(peer: str, request: Asked, answer: Signable) -> Receipt:
    """Returns the receipt of an answer.

    Raises:
        ProtocolError: If there is none, or it is not this peer's receipt for this answer to this request.
    """
    receipt = answer.receipt
    if receipt is None:
        raise ProtocolError(f"server {peer} signed no receipt for its answer")
    if peer_id_of(receipt.public_key) != peer:
        raise ProtocolError(f"server {peer} signed a receipt with a key of another peer")
    plain = msgspec.structs.replace(answer, receipt=None)
    statement = _statement(request, plain, receipt.version, receipt.dtype, receipt.quantization)
    if not is_signed_by(receipt.public_key, statement, receipt.signature):
        raise ProtocolError(f"server {peer} signed a receipt for something other than its answer")
    return receipt


def _statement(request: Asked, answer: Message, version: str, dtype: str, quantization: str) -> bytes:
    # Packed as on the wire: a codec that loses bits gives the same bytes when its result is packed again.
    codec = request.reply_codec
    asked, answered = message_hash(request, codec), message_hash(answer, codec)
    return msgspec.msgpack.encode((_DOMAIN, asked, answered, version, dtype, quantization))
