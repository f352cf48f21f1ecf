"""A server that moves: it loads the span that the swarm lacks, announces it, and drains the one it leaves.

Whose turn it is follows from the records of all servers (`swarm_plugins.routing.turns`). One service serves both spans
meanwhile: compute thread, sessions, adapters and budgets stay, and each request runs on the span that holds its blocks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarm_plugins.blocks.span import Span
from swarm_plugins.errors import (
    CapacityError,
    CheckpointError,
    SwarmError,
    TransportError,
    is_out_of_memory,
    one_line,
)
from swarm_plugins.routing.placement import Move, is_safe
from swarm_plugins.routing.turns import Snapshot, Turns
from swarm_plugins.server import limits
from swarm_plugins.server.background import in_thread, return_free_memory
from swarm_plugins.server.compute.work import without_frames
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.draining import wait_until_ended
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.liveness import Liveness
from swarm_plugins.server.presence import Presence
from swarm_plugins.server.service import Service
from swarm_plugins.server.startup.placing import mobility_of, snapshot_of
from swarm_plugins.server.startup.preload import preload_adapter
from swarm_plugins.server.state.gradients import KeptForward

log = logging.getLogger(__name__)

_SETTLE_S = 3.0
"""Until an announced move can be seen by all: two that begin at once see each other, and both wait."""
_GAP_PAUSE_S = 1.0
"""Longest random pause before a gap is closed; before other moves it is half the time between two looks."""
_REST_S = 600.0
"""After a move that failed."""
_RELOAD_PAUSE_S = 30.0
"""Between attempts to load the old span again."""


@dataclass(kw_only=True)
class Mover:
    """Moves a server's span to where the swarm needs it, for as long as `run` runs."""

    config: ServeConfig
    presence: Presence
    service: Service
    """What answers requests."""
    spans: HostedSpans
    """What runs them."""
    load: Callable[[range], Span]
    """Loads a span, in a thread."""

    def __post_init__(self) -> None:
        self._resting_until = 0.0
        self._liveness = Liveness(self.presence, self.presence.peer_id)

    async def run(self) -> None:
        """Looks at the swarm from time to time, and moves when it is this server's turn."""
        turns = Turns(self.presence.peer_id)
        every_s = self.config.announce_every_s
        self.service.describe(mobility=mobility_of(self.config, self.spans.num_bytes))
        while True:
            await asyncio.sleep(every_s * random.uniform(0.75, 1.25))
            try:
                move = await self._due(turns)
                if move is None:
                    continue
                await asyncio.sleep(random.uniform(0, _GAP_PAUSE_S if move.closes_gap else every_s / 2))
                if await self._due(turns) == move:
                    await self.make(move)
            except SwarmError as error:
                self._resting_until = _now() + _REST_S
                log.warning("cannot move, staying for %.0f s: %s", _REST_S, error)

    async def _due(self, turns: Turns) -> Move | None:
        is_resting = self.service.draining.is_leaving or _now() < self._resting_until
        self.service.describe(mobility="pinned" if is_resting else mobility_of(self.config, self.spans.num_bytes))
        return None if is_resting else turns.mine(await self._look(), _now())

    async def _look(self) -> Snapshot:
        info = self.service.info()
        try:
            infos = await self._liveness.living(await self.presence.servers(info.version, info.num_blocks))
        except TransportError as error:
            log.debug("no look at the swarm this time: %s", error)
            infos = {}
        # The own record may be old; alone, there is nowhere to move to.
        return snapshot_of(info.num_blocks, infos | {self.presence.peer_id: info}, self.service.spec.tied)

    async def _announce(self, **changes: object) -> None:
        self.service.describe(**changes)
        try:
            await self.presence.announce(self.service.info)
        except TransportError as error:
            log.warning("cannot announce a move now: %s", error)

    async def make(self, move: Move) -> None:
        """Moves, unless other servers move or have gone: announces it, loads, serves, drains and drops.

        Raises:
            SwarmError: If the new span cannot be loaded; the old one is served then.
        """
        old = self.service.info()
        log.info("moving from blocks %d:%d to %d:%d", old.start, old.end, move.blocks.start, move.blocks.stop)
        try:
            await self._announce(target=_pair(move.blocks))
            await asyncio.sleep(min(_SETTLE_S, self.config.announce_every_s))
            if await self._is_free(move):
                await (self._drop_then_load(move) if old.mobility == "drops-first" else self._load_then_drop(move))
        finally:
            is_off = self.service.info().target is not None
            # Not announced here: a server that ends has no time, the next announcement follows in any case.
            self.service.describe(target=None)
        if is_off:
            await self._announce()

    async def _is_free(self, move: Move) -> bool:
        """Returns whether no other server moves, and all blocks that this one would leave have others."""
        snapshot = await self._look()
        others = [one.peer for one in snapshot.movers if one.peer != self.presence.peer_id]
        return not others and self._is_safe(snapshot, move)

    def _is_safe(self, snapshot: Snapshot, move: Move) -> bool:
        return not self.service.draining.is_leaving and is_safe(snapshot.num_blocks, snapshot.servers, move)

    async def _load_then_drop(self, move: Move) -> None:
        span = await self._loaded(move.blocks)
        if not self._is_safe(await self._look(), move):
            log.warning("staying: other servers of these blocks have gone meanwhile")
            span.close()
            return
        old = self.spans.spec.blocks
        offered = await self._serve(span, leaving=_pair(old))
        await self._wait_for_sessions(move.blocks)
        await self._on_compute_thread(self.spans.drop_left)
        await self._forget_all_but(move.blocks, offered)
        await self._announce(leaving=None)

    async def _drop_then_load(self, move: Move) -> None:
        service, old = self.service, self.spans.spec.blocks
        service.draining.begin(range(0))
        is_dropped = False
        try:
            await self._announce(state="draining")
            await self._wait_for_sessions(range(0))
            if not self._is_safe(await self._look(), move):
                log.warning("staying: other servers of these blocks have gone meanwhile")
                return
            await self._on_compute_thread(self.spans.drop_all)
            is_dropped = True
        finally:
            if not is_dropped:
                service.draining.end()
                service.describe(state="online")
        await self._forget_all_but(range(0), ())
        await self._announce(state="joining", start=move.blocks.start, end=move.blocks.stop)
        try:
            await self._serve(await self._loaded(move.blocks))
        except Exception as error:
            _release(error)
            await self._announce(start=old.start, end=old.stop, target=None)
            await self._serve_again(old)
            raise

    async def _serve_again(self, blocks: range) -> None:
        """Serves dropped blocks again; retries until that works or the server stops: without blocks it is useless."""
        while True:
            try:
                await self._serve(await self._loaded(blocks))
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing else can be served
                _release(error)
                text = "blocks %d:%d cannot be served again, next attempt in %.0f s: %s"
                log.warning(text, blocks.start, blocks.stop, _RELOAD_PAUSE_S, one_line(error, with_kind=True))
            await asyncio.sleep(_RELOAD_PAUSE_S)

    async def _loaded(self, blocks: range) -> Span:
        """Loads a span.

        Raises:
            SwarmError: If the checkpoint or the memory does not allow it.
        """
        try:
            return await in_thread(lambda: self.load(blocks))
        except SwarmError:
            raise
        except OSError as error:
            raise CheckpointError(f"blocks {blocks.start}:{blocks.stop} cannot be read: {one_line(error)}") from error
        except (MemoryError, RuntimeError) as error:
            # torch reports missing memory as a RuntimeError.
            if not is_out_of_memory(error):
                raise
            text = f"no memory is left to load blocks {blocks.start}:{blocks.stop}: {one_line(error)}"
            raise CapacityError(text) from error

    async def _serve(self, span: Span, **changes: object) -> list[str]:
        """Serves a span from now on, and announces it; returns the digests of the host's adapters on it."""
        service = self.service
        offered: list[str] = []
        for name in self.config.adapters:
            try:
                adapter = await in_thread(functools.partial(preload_adapter, name, span))
            except SwarmError as error:  # an adapter never costs the blocks
                log.warning("an adapter is not offered on the new blocks: %s", error)
                continue
            service.adapters.publish(adapter)
            offered.append(adapter.digest)
        await self._on_compute_thread(functools.partial(self.spans.add, span))
        service.draining.begin(span.blocks)
        # While it waits for open sessions the next move is not its turn.
        await self._announce(
            state="online",
            start=span.blocks.start,
            end=span.blocks.stop,
            target=None,
            mobility="pinned",
            total_kv_tokens=span.spec.kv_tokens(self.config.kv_bytes),
            kv_row_tokens=span.spec.kv_row_tokens,
            kv_token_bytes=span.spec.kv_token_bytes,
            kv_row_bytes=span.spec.kv_row_bytes,
            has_states=span.spec.has_states,
            **changes,
        )
        return offered

    async def _wait_for_sessions(self, kept: range) -> None:
        """Waits for the sessions that need other blocks than those that are kept."""
        left = await wait_until_ended(lambda: self.service.sessions.num_outside(kept), self.config.drain_s)
        if left:
            log.info("%d sessions go on elsewhere", left)

    async def _forget_all_but(self, kept: range, offered: Collection[str]) -> None:
        """Releases what keeps dropped spans in memory, and the host's adapters but those ``offered`` now."""

        def is_gone(forward: KeptForward) -> bool:
            return forward.inputs.blocks.start < kept.start or forward.inputs.blocks.stop > kept.stop

        self.service.activations.drop_where(is_gone)
        self.service.adapters.withdraw_all_but(offered)
        self.service.draining.end()
        await in_thread(return_free_memory)

    async def _on_compute_thread(self, function: Callable[[], object]) -> None:
        """Runs a function between two requests."""
        try:
            await self.service.scheduler.train(function, timeout_s=limits.REQUEST_TIMEOUT_S)
        except RequestError as error:
            raise CapacityError(f"spans could not be changed: {error}") from error


def _release(error: BaseException) -> None:
    """Drops what an error and its causes keep in memory: a part of a span, where there may be room for no other."""
    cause: BaseException | None = error
    while cause is not None:
        cause = without_frames(cause).__context__


def _pair(blocks: range) -> tuple[int, int]:
    return blocks.start, blocks.stop


def _now() -> float:
    return asyncio.get_running_loop().time()
