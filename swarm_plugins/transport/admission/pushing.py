"""What allows a server to send hidden states to another one on a client's behalf.

A session has a secret, which the client that opens it tells its server. From that the client makes a token for each
step, for the one peer that may push it: a token that is passed on, or used again, allows nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec
from torch import Tensor

from swarm_plugins.transport.messages import BackwardRequest, ForwardRequest, SessionStep

_DOMAIN = b"swarm_plugins push 1"


def new_push_key() -> bytes:
    """Returns a secret for a session or a slot."""
    return secrets.token_bytes(32)


def push_token(key: bytes, sender: str, step: int) -> bytes:
    """Returns what allows a peer to push the hidden states of one step of a session."""
    return hmac.digest(key, _DOMAIN + f" {step} {sender}".encode(), hashlib.sha256)


def is_push_allowed(key: bytes, sender: str, step: int, token: bytes) -> bool:
    """Returns whether a token was made for this peer and step."""
    return bool(key) and hmac.compare_digest(push_token(key, sender, step), token)


def plain_step(request: SessionStep, hidden: Tensor) -> SessionStep:
    """Returns a step without any pushing, with its hidden states: what a server computes, and what receipts are for."""
    return msgspec.structs.replace(request, hidden=hidden, pushed_bytes=0, push_to=None)


def plain_forward(request: ForwardRequest, hidden: Tensor) -> ForwardRequest:
    """Returns a forward without any pushing, with its hidden states; see `plain_step`."""
    return msgspec.structs.replace(request, hidden=hidden, pushed=None, push_to=None)


def plain_backward(request: BackwardRequest, grad: Tensor) -> BackwardRequest:
    """Returns a backward without any pushing, with the gradient of its output; see `plain_step`."""
    return msgspec.structs.replace(request, grad_hidden=grad, pushed=None, push_to=None)
