"""With whom a node talks: peers of a list, or peers that know the swarm's secret; without either, everyone.

The proof of the secret is bound to the two peer ids, which the connection has authenticated, and to a fresh number of
each side, so that it is of no use to anyone else and at no other time:

    caller -> answerer   nonce_c
    answerer -> caller   nonce_a
    caller -> answerer   HMAC(key, "caller", caller, answerer, nonce_c, nonce_a)
    answerer -> caller   HMAC(key, "answerer", caller, answerer, nonce_c, nonce_a)

A caller that does not know the secret learns nothing from it. An answerer that does not gets one HMAC, by which it can
try out guesses: the secret must be long, and scrypt makes each guess slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import shlex
import stat
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from swarm_plugins.errors import ConfigError, RequestTimeoutError, TransportError
from swarm_plugins.recent import Recent
from swarm_plugins.transport.admission.addresses import origin_of

if TYPE_CHECKING:
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

log = logging.getLogger(__name__)

PROOF_PROTOCOL = "/swarm_plugins/1/secret"
REFUSED = "not admitted: "
"""Begins every refusal, so that a caller whose proof was forgotten knows to repeat it."""

_DOMAIN = b"swarm_plugins/secret/1"
_NONCE_BYTES = 32
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_PROOF_TIMEOUT_S = 5.0
_VALID_S = 3600.0
_FRESH_S = 10.0
"""A proof younger than this is not repeated: the other side may have been restarted since."""
_MAX_PROVEN = 4096
_MAX_AT_ONCE = 256
_MAX_OF_PEER = 4

Open = Callable[[str, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class StrangerError(TransportError):
    """A peer that was to be called does not belong to this private swarm."""


def load_secret(path: Path) -> bytes:
    """Reads a swarm's secret.

    Raises:
        ConfigError: If it cannot be read, is open to other users, empty, or too short or too long for a secret.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        with path.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read secret {path}: {exc.strerror}") from exc
    if mode & 0o077:
        raise ConfigError(
            f"secret {path} is open to other users of this machine (mode {mode:04o}): run chmod 600 "
            f"{shlex.quote(str(path))}"
        )
    secret = content.strip()
    if not secret:
        raise ConfigError(
            f"secret {path} is empty: write one into it, such as with openssl rand -hex 32, and give the same to all "
            "peers of the swarm"
        )
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ConfigError(
            f"secret {path} has {len(secret) if len(secret) <= _MAX_SECRET_BYTES else 'too many'} bytes: expected "
            f"{_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}, such as from openssl rand -hex 32"
        )
    return secret


class Gate:
    """Admits peers of a list, or peers that prove to know a secret. Used by several threads.

    Args:
        own: This node's peer id.
        open_stream: Opens a stream of a protocol to a peer.
        allowed: The only peers to talk with. None: any.
        secret: What peers must know. None: nothing.
    """

    def __init__(
        self, own: str, open_stream: Open, *, allowed: Collection[str] | None = None, secret: bytes | None = None
    ) -> None:
        self._own = own
        self._open = open_stream
        self._allowed = None if allowed is None else frozenset(allowed)
        self._key = None if secret is None else Scrypt(salt=_DOMAIN, length=32, n=2**14, r=8, p=1).derive(secret)
        self._proven: Recent[str, float] = Recent(_MAX_PROVEN)
        self._entering: Recent[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock] = Recent(_MAX_PROVEN)
        self._lock = threading.Lock()
        self._answering: dict[asyncio.Timeout, tuple[str, bytes]] = {}
        """Of the proofs under way, the oldest first: until when, of which peer, at which address."""

    @property
    def is_secret(self) -> bool:
        """Whether peers must know a secret."""
        return self._key is not None

    def take_over(self, before: Gate) -> None:
        """Adopts the proofs of an earlier gate with the same key pair: peers do not know of its new daemon."""
        if before._key == self._key:
            with before._lock:
                proven = [*before._proven.items()]
            with self._lock:
                self._proven.update(proven)

    def refusal(self, peer: str) -> str | None:
        """Returns why a peer that calls is not admitted, or None."""
        if self._allowed is not None and peer not in self._allowed:
            return (
                f"{REFUSED}peer {peer} is not among the allowed peers of {self._own}: ask its operator to add this id "
                "(--allowed-peers), and keep it (--identity, SwarmConfig(identity=...))"
            )
        if self._key is not None and not self._has_proven(peer, _VALID_S):
            return (
                f"{REFUSED}peer {peer} has not proved that it knows this swarm's secret: give it with --secret-file "
                "or SwarmConfig(secret_file=...)"
            )
        return None

    async def enter(self, peer: str, timeout_s: float) -> None:
        """Makes sure, before a peer is called, that it belongs to the same swarm, and proves the same to it.

        Args:
            peer: Whom to call.
            timeout_s: Longest wait.

        Raises:
            TransportError: If the peer is not allowed, cannot be reached, or does not know the secret.
        """
        if self._allowed is not None and peer not in self._allowed:
            raise TransportError(
                f"peer {peer} is not among the allowed peers of this node: add its id, or do not call it"
            )
        if self._key is None or self._has_proven(peer, _FRESH_S):
            return
        timeout_s = min(timeout_s, _PROOF_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s), self._turn(peer):
                if self._has_proven(peer, _FRESH_S):
                    return
                reader, writer = await self._open(peer, PROOF_PROTOCOL)
                try:
                    is_proven = await self._call(peer, reader, writer)
                finally:
                    writer.close()
        except TransportError as exc:
            if "protocols not supported" not in str(exc):
                raise
            is_proven = False
        except TimeoutError as exc:
            raise RequestTimeoutError(
                f"peer {peer} has not proved within {timeout_s:g} s that it belongs to this private swarm: "
                "it is overloaded, or hangs"
            ) from exc
        except (OSError, asyncio.IncompleteReadError):
            is_proven = False
        if not is_proven:
            raise StrangerError(
                f"peer {peer} does not belong to this private swarm: it has another secret than this side, or none"
            )
        self._note(peer)

    def _turn(self, peer: str) -> asyncio.Lock:
        """Returns a lock for simultaneous calls to share one proof: answerers accept only a few per peer at a time."""
        key = (asyncio.get_running_loop(), peer)
        with self._lock:
            lock = self._entering.get(key)
            if lock is None:
                lock = self._entering[key] = asyncio.Lock()
            return lock

    def forget(self, peer: str) -> None:
        """Drops a proof that the other side does not remember."""
        with self._lock:
            self._proven.pop(peer, None)

    async def answer(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a caller's proof; says nothing to one that fails."""
        peer = info.peer_id.to_base58()
        with contextlib.closing(writer):
            if self._key is None or sum(other == peer for other, _ in self._answering.values()) >= _MAX_OF_PEER:
                return
            if self._allowed is not None and peer not in self._allowed:
                return
            deadline = asyncio.timeout(_PROOF_TIMEOUT_S)
            try:
                async with deadline:
                    self._make_room()
                    self._answering[deadline] = (peer, origin_of(info.addr.to_bytes()).host)
                    theirs = await reader.readexactly(_NONCE_BYTES)
                    ours = secrets.token_bytes(_NONCE_BYTES)
                    writer.write(ours)
                    proof = await reader.readexactly(_NONCE_BYTES)
                    if hmac.compare_digest(proof, self._tag(b"caller", peer, self._own, theirs, ours)):
                        self._note(peer)
                        writer.write(self._tag(b"answerer", peer, self._own, theirs, ours))
                        await writer.drain()
                    else:
                        log.info("peer %s does not know this swarm's secret", peer)
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
                log.debug("peer %s did not prove the secret: %r", peer, exc)
            finally:
                self._answering.pop(deadline, None)

    def _make_room(self) -> None:
        """Ends the oldest proof of the address that has most of them, if too many are under way.

        Strangers cost nothing: if their proofs kept others out, nobody could enter.
        """
        if len(self._answering) < _MAX_AT_ONCE:
            return
        crowd = Counter(host for _, host in self._answering.values()).most_common(1)[0][0]
        oldest = next(deadline for deadline, (_, host) in self._answering.items() if host == crowd)
        del self._answering[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())

    async def _call(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        ours = secrets.token_bytes(_NONCE_BYTES)
        writer.write(ours)
        theirs = await reader.readexactly(_NONCE_BYTES)
        writer.write(self._tag(b"caller", self._own, peer, ours, theirs))
        proof = await reader.readexactly(_NONCE_BYTES)
        return hmac.compare_digest(proof, self._tag(b"answerer", self._own, peer, ours, theirs))

    def _tag(self, role: bytes, caller: str, answerer: str, nonce_c: bytes, nonce_a: bytes) -> bytes:
        parts = (_DOMAIN, role, caller.encode(), answerer.encode(), nonce_c, nonce_a)
        # Each with its length: parts cannot be cut otherwise.
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key or b"", message, "sha256")

    def _note(self, peer: str) -> None:
        with self._lock:
            self._proven[peer] = time.monotonic()

    def _has_proven(self, peer: str, within_s: float) -> bool:
        return time.monotonic() - self._proven.get(peer, float("-inf")) < within_s
