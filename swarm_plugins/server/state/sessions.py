"""The sessions a server holds: unguessable names, limits for each peer, forks only by the same peer."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from swarm_plugins.block_io import CacheOp
from swarm_plugins.blocks.kv import KVCache, RewindError
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.state.inbox import Inbox
from swarm_plugins.server.state.prefixes import Begun

MAX_OPS = 256
"""Most cache operations in one step; clients send a few, a message could hold ten thousands."""
_MAX_OP_ROWS = 1 << 16
"""Most rows after all operations of a step together: a message of 7 kB could name millions, one after the other."""
_SHORTENING = ("crop", "reset")


@dataclass(eq=False)
class Session:
    """One generation stream's cache on this server."""

    peer: str
    version: str
    """Model version that its client asked for."""
    blocks: range
    cache: KVCache
    inbox: Inbox
    name: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    is_closed: bool = False
    is_busy: bool = False
    """Whether a step is waiting or running."""
    used_at: float = field(default_factory=time.monotonic)
    """When the last step ended."""
    num_changes: int = 0
    """Steps that came with cache operations, so far; counted on the compute thread."""
    begun: Begun | None = None
    """How it has begun, as long as that can be told; see `PrefixStore`."""
    history: bytes = b""
    """Hash of all that the cache has come from, for receipts; empty since a step whose result is not signed."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the KV budget that it holds."""
        return 0 if self.is_closed else self.cache.num_bytes

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Renews the lease by a step that succeeds."""
        self.is_busy = True
        try:
            yield
            self.used_at = time.monotonic()
        finally:
            self.is_busy = False

    def change(self, ops: tuple[CacheOp, ...], new_tokens: int) -> None:
        """Applies checked operations before a step; only on the compute thread."""
        self.num_changes += 1
        apply_ops(ops, self.cache, new_tokens)

    def close(self) -> None:
        """Releases the cache; only on the compute thread. Idempotent."""
        self.is_closed = True
        self.cache.close()


@dataclass(eq=False)
class _Growth:
    """The most a session may hold while a step runs."""

    peer: str
    most_bytes: int
    session: Session | None

    @property
    def num_left(self) -> int:
        """Bytes the session may still take; a long step takes them chunk by chunk."""
        return max(0, self.most_bytes - (0 if self.session is None else self.session.held_bytes))


class SessionTable:
    """All open sessions, by name."""

    def __init__(self, max_per_peer: int) -> None:
        self.max_per_peer = max_per_peer
        self._sessions: dict[str, Session] = {}
        self._per_peer: Counter[str] = Counter()
        self._growths: dict[_Growth, None] = {}

    def __len__(self) -> int:
        """Returns the number of open sessions."""
        return len(self._sessions)

    @contextlib.contextmanager
    def counted(self, peer: str) -> Iterator[None]:
        """Counts a session of ``peer`` from before it is opened to the end of its stream.

        Raises:
            RequestError: ``overloaded`` if the peer has too many.
        """
        if self._per_peer[peer] >= self.max_per_peer:
            raise RequestError(
                "overloaded",
                f"{self._per_peer[peer]} sessions of this client are open here, the limit is {self.max_per_peer}: "
                "close some, or batch the sequences",
            )
        self._per_peer[peer] += 1
        try:
            yield
        finally:
            self._per_peer[peer] -= 1
            if not self._per_peer[peer]:
                del self._per_peer[peer]

    def add(self, session: Session) -> None:
        """Lists an open session."""
        self._sessions[session.name] = session

    def remove(self, session: Session) -> None:
        """Forgets a session. Idempotent."""
        self._sessions.pop(session.name, None)

    def find(self, peer: str, name: str) -> Session:
        """Returns a session of ``peer``.

        Raises:
            RequestError: ``unknown_session`` if the peer has no session of this name.
        """
        session = self._sessions.get(name)
        if session is None or session.peer != peer or session.is_closed:
            raise RequestError("unknown_session", f"session {name[:64]!r} is not open here: open a new one and replay")
        return session

    def num_outside(self, blocks: range) -> int:
        """Returns how many open sessions need other blocks than these."""
        return sum(
            not (blocks.start <= session.blocks.start and session.blocks.stop <= blocks.stop)
            for session in self._sessions.values()
        )

    def held_bytes(self, owns: Callable[[str], bool] = lambda _: True) -> int:
        """Returns the bytes of the KV budget that sessions of some peers hold, or are about to."""
        held = sum(session.held_bytes for session in self._sessions.values() if owns(session.peer))
        return held + self.promised_bytes(owns)

    def promised_bytes(self, owns: Callable[[str], bool] = lambda _: True) -> int:
        """Returns how many bytes some peers' sessions are about to take. May be called on any thread."""
        return sum(growth.num_left for growth in list(self._growths) if owns(growth.peer))

    @contextlib.contextmanager
    def growing(self, peer: str, amount: int, session: Session | None = None) -> Iterator[None]:
        """Reserves ``amount`` bytes for a session of ``peer``, or one about to open, less what it has taken of them."""
        growth = _Growth(peer, amount + (0 if session is None else session.held_bytes), session)
        self._growths[growth] = None
        try:
            yield
        finally:
            del self._growths[growth]

    def expired(self, lease_s: float, *, rank: Callable[[str], float] = lambda _: 0.0) -> list[Session]:
        """Returns the sessions without a step for ``lease_s``: of peers of the lowest rank first, then the idlest."""
        now = time.monotonic()
        # A copy: a thread that serves metrics asks too.
        idle = [one for one in list(self._sessions.values()) if not one.is_busy and now - one.used_at > lease_s]
        return sorted(idle, key=lambda one: (rank(one.peer), one.used_at))


def shape_after(ops: tuple[CacheOp, ...], batch_size: int, length: int, *, max_rows: int) -> tuple[int, int]:
    """Returns batch size and length after ``ops``; ``max_rows`` holds after each, even if a later one removes rows.

    Raises:
        RequestError: ``bad_request`` if an operation cannot be applied.
    """
    if len(ops) > MAX_OPS:
        raise BadRequestError(f"{len(ops)} cache operations in one step, the limit is {MAX_OPS}")
    handled = 0
    for op in ops:
        if op.kind == "crop":
            length = _length_after(op, length)
        elif op.kind == "reset":
            length = 0
        else:
            batch_size = _rows_after(op, batch_size)
            handled += batch_size
        if batch_size > max_rows:
            raise BadRequestError(f"cache operation {op.kind} makes {batch_size} rows, the limit is {max_rows}")
        if handled > _MAX_OP_ROWS:
            raise BadRequestError(
                f"the cache operations of this step handle more than {_MAX_OP_ROWS} rows: send them with several steps"
            )
    return batch_size, length


def _only_index(op: CacheOp) -> int:
    if len(op.indices) != 1:
        raise BadRequestError(f"cache operation {op.kind} takes one index, got {len(op.indices)}")
    return op.indices[0]


def _length_after(op: CacheOp, length: int) -> int:
    index = _only_index(op)
    if not 0 <= index <= length:
        raise BadRequestError(f"cannot crop a cache of {length} tokens to {index}")
    return index


def _rows_after(op: CacheOp, batch_size: int) -> int:
    if op.kind == "repeat":
        times = _only_index(op)
        if times < 1:
            raise BadRequestError(f"cannot repeat rows {times} times, expected 1 or more")
        return batch_size * times
    wrong = [index for index in op.indices if not 0 <= index < batch_size]
    if wrong or not op.indices:
        raise BadRequestError(
            f"cache operation {op.kind} names row {wrong[0] if wrong else 'nothing'}, rows 0 to {batch_size - 1} exist",
        )
    if op.kind == "reorder" and len(op.indices) != batch_size:
        raise BadRequestError(f"cache operation reorder names {len(op.indices)} rows, the cache has {batch_size}")
    return len(op.indices)


def selected_rows(ops: tuple[CacheOp, ...], batch_size: int) -> list[int] | None:
    """Returns the old index of each row after checked operations; None if no row moves."""
    rows = np.arange(batch_size)
    for op in ops:
        if op.kind == "repeat":
            rows = rows.repeat(op.indices[0])
        elif op.kind in ("reorder", "select"):
            rows = rows[list(op.indices)]
    return None if np.array_equal(rows, np.arange(batch_size)) else rows.tolist()


def apply_ops(ops: tuple[CacheOp, ...], cache: KVCache, new_tokens: int) -> None:
    """Applies checked operations, before so many new tokens; only on the compute thread."""
    length = min([cache.length, *(op.indices[0] if op.kind == "crop" else 0 for op in ops if op.kind in _SHORTENING)])
    # The cache is copied once, however many operations there are: the rest of the server waits meanwhile.
    if length < cache.length:
        try:
            cache.crop(length)
        except RewindError as error:
            raise RequestError("unknown_session", f"{error}: open a new session and replay") from None
    if (rows := selected_rows(ops, cache.batch_size)) is not None:
        cache.select(rows, new_tokens)
