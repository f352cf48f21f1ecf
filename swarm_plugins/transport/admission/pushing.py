"""What allows a server to send hidden states to another one on a client's behalf.

A session has a secret, which the client that opens it tells its server. From that the client makes a token for each
step, for the one peer that may push it: a token that is passed on, or used again, allows nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

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
