"""Answers that are computed while their client asks for them again and again."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from swarm_plugins.errors import ConfigError, NumericError, SwarmError, UnsupportedError, printable
from swarm_plugins.web.protocol.errors import ApiError, api_error

Answer = bytes | dict[str, Any]
"""Protobuf, or what becomes JSON."""

HOLD_S = 20.0
"""How long a question waits for its answer, before the client has to ask again."""
_MAX_OF_A_KEY = 4096
_MAX_BYTES_OF_A_KEY = 256 << 20
"""Of requests under way and answers: 85 of the longest calls that the SDK sends."""


@dataclass
class _Future:
    tenant: str
    owner: Hashable
    """What it goes with: a session."""
    same: Hashable
    task: asyncio.Task[Answer]
    num_bytes: int
    """Of the request while it is under way, then of the answer."""
    is_read: bool = False


@dataclass
class _Share:
    """What one key has here."""

    ids: dict[str, None] = field(default_factory=dict)
    num_bytes: int = 0


class Futures:
    """Answers under way and kept. The same request sent again has the same answer."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Future] = {}
        self._by_request: dict[Hashable, str] = {}
        self._shares: dict[str, _Share] = {}

    def submit(
        self, tenant: str, owner: Hashable, same: Hashable, work: Callable[[], Awaitable[Answer]], num_bytes: int = 0
    ) -> str:
        """Begins work unless the same request has come before; returns the id to ask for its answer with.

        Args:
            tenant: Whose request it is.
            owner: What the answer goes with: `forget` drops all of one.
            same: Equal for the same request, sent again after its answer was lost.
            work: Computes the answer.
            num_bytes: What the request takes until then.

        Raises:
            ApiError: With status 429 if too many requests of this key are under way, or too many bytes of them.
        """
        same = (tenant, same)
        if same in self._by_request:
            return self._by_request[same]
        self._make_room(tenant, num_bytes)
        request_id = uuid.uuid4().hex
        task = asyncio.get_running_loop().create_task(_answered(work))
        self._by_id[request_id] = _Future(tenant, owner, same, task, num_bytes)
        self._by_request[same] = request_id
        share = self._shares.setdefault(tenant, _Share())
        share.ids[request_id] = None
        share.num_bytes += num_bytes
        task.add_done_callback(lambda done: self._note_size(request_id, done))
        return request_id

    async def retrieve(self, tenant: str, request_id: str) -> Answer | None:
        """Returns an answer; None if it is not there in time.

        Raises:
            ApiError: With status 410 if there is no such answer, or not any more.
        """
        found = self._by_id.get(request_id)
        if found is None or found.tenant != tenant:
            raise ApiError(
                "this answer is not here: it was dropped after its session ended, or never asked for", status=410
            )
        done, _ = await asyncio.wait([found.task], timeout=HOLD_S)
        if not done:
            return None
        found.is_read = True
        if found.task.cancelled():
            raise ApiError("the session of this request has ended", status=410)
        return found.task.result()

    def num_open(self, tenant: str | None = None) -> int:
        """Returns how many answers are under way: of one key, or of all."""
        return sum(not one.task.done() for one in self._by_id.values() if tenant in (None, one.tenant))

    def forget(self, owner: Hashable) -> None:
        """Drops all answers of an owner; what is under way ends."""
        for request_id in [known for known, one in self._by_id.items() if one.owner == owner]:
            self._drop(request_id)

    def close(self) -> None:
        """Drops all."""
        for request_id in list(self._by_id):
            self._drop(request_id)

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        share = self._shares.get(tenant, _Share())
        if _fit(len(share.ids), share.num_bytes + num_bytes):
            return
        # Those that were fetched go first, then those that wait to be; never what is under way.
        done = [known for known in share.ids if self._by_id[known].task.done()]
        under_way = len(share.ids) - len(done)
        bytes_under_way = share.num_bytes - sum(self._by_id[known].num_bytes for known in done)
        if not _fit(under_way, bytes_under_way + num_bytes):
            raise ApiError(
                f"{under_way} requests of this key are under way, with {bytes_under_way} bytes: wait for some",
                status=429,
            )
        for known in sorted(done, key=lambda known: not self._by_id[known].is_read):
            if _fit(len(share.ids), share.num_bytes + num_bytes):
                return
            self._drop(known)

    def _note_size(self, request_id: str, done: asyncio.Task[Answer]) -> None:
        found = self._by_id.get(request_id)
        if found is not None and not done.cancelled():
            answer = done.result()
            num_bytes = len(answer) if isinstance(answer, bytes) else len(json.dumps(answer))
            self._shares[found.tenant].num_bytes += num_bytes - found.num_bytes
            found.num_bytes = num_bytes

    def _drop(self, request_id: str) -> None:
        found = self._by_id.pop(request_id)
        self._by_request.pop(found.same, None)
        share = self._shares[found.tenant]
        del share.ids[request_id]
        share.num_bytes -= found.num_bytes
        if not share.ids:
            del self._shares[found.tenant]
        found.task.cancel()


def _fit(count: int, num_bytes: int) -> bool:
    """Returns whether a key may have one more, with which it has so many bytes."""
    return count < _MAX_OF_A_KEY and num_bytes <= _MAX_BYTES_OF_A_KEY


async def _answered(work: Callable[[], Awaitable[Answer]]) -> Answer:
    try:
        return await work()
    except Exception as exc:  # noqa: BLE001 - the client gets it as an answer
        return failure(exc)


def failure(error: Exception) -> dict[str, Any]:
    """Returns the protocol's answer for an error: whose it is, and one sentence; a long one is cut."""
    is_users = isinstance(error, ConfigError | UnsupportedError | NumericError) or (
        isinstance(error, ApiError) and error.status < 500
    )
    text = str(error) if isinstance(error, SwarmError) else str(api_error(error))
    return {"error": printable(text), "category": "user" if is_users else "server"}
