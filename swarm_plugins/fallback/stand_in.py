"""A server in this process that stands in for missing ones."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm_plugins.book.record import Expected, PeerBook
from swarm_plugins.routing import SpanChoice
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.local import LocalRoutes

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.server.assembly import HostedBlocks

log = logging.getLogger(__name__)

_STEP_S, _TOKEN_S = 60.0, 1.0
"""Announced to this client's deadlines: this machine may be slow, but it does not vanish."""
_IDLE_S = 60.0
"""Blocks that were not used for so long, while servers of the swarm were, are freed."""
_LOOK_S = 5.0


@dataclass(eq=False)
class _Hosted:
    """Blocks that run here; no block does twice."""

    peer: str
    blocks: range
    served: HostedBlocks
    used_at: float = field(default_factory=time.monotonic)


class StandIn:
    """Serves missing blocks from this process; see `Fallback`.

    Args:
        local: Peers of this process, which this server becomes one of.
        book: Where its speed is announced.
        open_checkpoint: Opens the model, on first use.
    """

    def __init__(self, local: LocalRoutes, book: PeerBook, open_checkpoint: Callable[[], Checkpoint]) -> None:
        self._local = local
        self._book = book
        self._open_checkpoint = open_checkpoint
        self._hosted: dict[str, _Hosted] = {}
        self._lock = asyncio.Lock()
        """Held while blocks are chosen, loaded or freed."""
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._freeing: asyncio.Task[None] | None = None
        # Nothing else ends the servers of a model that is gone.
        weakref.finalize(self, _abandon, self._hosted, local).atexit = False

    async def stand_in(self, blocks: range) -> list[SpanChoice]:
        """Loads the blocks that are not here yet; returns a chain that runs all blocks.

        Each block is loaded once: servers that announce themselves and refuse, whatever blocks they claim by turns,
        cannot make this process hold more than the model. If the caller is cancelled, they are loaded all the same: no
        thread stops in the middle of that, and the next call needs them.

        Raises:
            CheckpointError: If the blocks cannot be read.
        """
        return await asyncio.shield(asyncio.create_task(self._chain(blocks), name="load blocks"))

    async def _chain(self, blocks: range) -> list[SpanChoice]:
        async with self._lock:
            here = {block: one for one in self._hosted.values() for block in one.blocks}
            used: list[_Hosted] = []
            chain: list[SpanChoice] = []
            for known, group in itertools.groupby(blocks, here.get):
                run = list(group)
                part = range(run[0], run[-1] + 1)
                used.append(known or await self._load(part))
                chain.append(SpanChoice(used[-1].peer, part.start, part.stop))
            # Only now: the last ones may have taken long to load.
            for one in used:
                one.used_at = time.monotonic()
            return chain

    async def _load(self, blocks: range) -> _Hosted:
        log.warning("no server holds blocks %d:%d: they run here until one does", blocks.start, blocks.stop)
        hosted = await asyncio.to_thread(self._host_unless_closed, blocks)
        if hosted is None or self._closed.is_set():
            raise asyncio.CancelledError
        self._local.serve(hosted.peer, hosted.served.handlers)
        self._book.observe(hosted.peer, Expected(_STEP_S, _TOKEN_S * len(blocks)))
        if self._freeing is None or self._freeing.done():
            freeing = _free_unused(self._hosted, self._local, self._book, self._lock)
            self._freeing = asyncio.create_task(freeing, name="free blocks")
        return hosted

    def _host_unless_closed(self, blocks: range) -> _Hosted | None:
        """Loads blocks and registers them here, so that `close` finds them even if the event loop has stopped."""
        if self._closed.is_set():
            return None
        hosted = self._host(blocks)
        with self._closing:
            if not self._closed.is_set():
                self._hosted[hosted.peer] = hosted
                return hosted
        hosted.served.close()
        return None

    def _host(self, blocks: range) -> _Hosted:
        # Late: loads what a server needs, now that this client has to be one.
        from swarm_plugins.server.assembly import host_blocks

        return _Hosted(new_identity().peer_id, blocks, host_blocks(self._open_checkpoint(), blocks))

    async def close(self) -> None:
        """Ends the server and frees the blocks; those that are being loaded, as soon as they are. Idempotent."""
        with self._closing:
            self._closed.set()
        if self._freeing is not None:
            self._freeing.cancel()
            await asyncio.wait({self._freeing})
        for one in list(self._hosted.values()):
            if await _withdraw(one, self._hosted, self._local):
                # Here: at the end of the interpreter, no thread takes new work.
                one.served.close()


async def _free_unused(hosted: dict[str, _Hosted], local: LocalRoutes, book: PeerBook, lock: asyncio.Lock) -> None:
    """Frees what was not used for a while, in which servers of the swarm were; does not keep the `StandIn` alive."""
    while hosted:
        await asyncio.sleep(_LOOK_S)
        versions = {one.served.service.version for one in hosted.values()}
        servers = [record for record in book.records().values() if record.info is not None]
        others = (
            one.ran_at
            for one in servers
            if one.info is not None and any(one.info.of(version) is not None for version in versions)
        )
        latest = max(others, default=-math.inf)
        # Not while blocks load for a chain that needs these as well.
        async with lock:
            for one in list(hosted.values()):
                one.used_at = max(one.used_at, book[one.peer].ran_at)
                if latest - one.used_at > _IDLE_S and one.served.is_idle and await _withdraw(one, hosted, local):
                    log.warning("servers hold blocks %d:%d again", one.blocks.start, one.blocks.stop)
                    # To its end, also if this task is cancelled: nothing else knows of these blocks any more.
                    await asyncio.shield(asyncio.to_thread(one.served.close))


async def _withdraw(one: _Hosted, hosted: dict[str, _Hosted], local: LocalRoutes) -> bool:
    """Lets no later request reach these blocks; returns whether they can be freed now."""
    # A backward whose graph was kept here replans.
    if hosted.pop(one.peer, None) is None:
        return False
    await local.end(one.peer)
    return True


def _abandon(hosted: dict[str, _Hosted], local: LocalRoutes) -> None:
    """Frees blocks in the background: a garbage collector calls this."""
    while hosted:
        _, one = hosted.popitem()
        local.forget(one.peer)
        threading.Thread(target=one.served.close, name="free blocks").start()
