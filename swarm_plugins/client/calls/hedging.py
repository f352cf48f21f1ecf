"""Asks a replica too while a server is late: the first answer counts, the other request is cancelled.

Dean & Barroso 2013, "The Tail at Scale": a few further requests cut the longest waits. They are few, because a server
is late only after what its requests take in 95 of 100 cases, and because of `HedgeBudget`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from swarm_plugins.book import judging
from swarm_plugins.book.record import Overtaken
from swarm_plugins.book.rules import Rules
from swarm_plugins.client.calls.call import Answer, Call, Caller, Request, Response
from swarm_plugins.routing import Demand

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import SwarmView

log = logging.getLogger(__name__)

T = TypeVar("T")


class Hedged:
    """Asks replicas of late servers, too; see `Caller`.

    Args:
        inner: Asks a server.
        view: Knows the replicas.
    """

    def __init__(self, inner: Caller, view: SwarmView) -> None:
        self._inner = inner
        self._view = view
        self._budget = HedgeBudget(view.peers.book.rules)

    async def ask(self, call: Call[Request, Response], peer: str) -> Answer[Request, Response]:
        """Asks a server, and a replica while it takes longer than it does as a rule."""
        if not call.is_queued:
            return await self._inner.ask(call, peer)
        book, tokens, num_blocks = self._view.peers.book, call.tokens, len(call.blocks)
        record = book.kept(peer)
        usual_s = judging.usual_s(record, call.rpc, blocks=num_blocks, tokens=tokens)
        self._budget.earn()
        with record.backlog.asking(tokens) as before:
            if usual_s is None:
                return await self._inner.ask(call, peer)
            # What was seen is without a queue; those before this one in the queue take as long for each token.
            turns = 1.0 + before / tokens
            late_s = turns * usual_s + book.rules.hedge_slack_s

            def ask_replica() -> Coroutine[Any, Any, Answer[Request, Response]] | None:
                demand, without = Demand(tokens=tokens), {peer, *call.excluded}
                other = self._view.replica(call.blocks, demand, without=without)
                if other is None or not self._budget.take():
                    return None
                log.info("server %s has not answered for %.2f s: %s is asked too", peer, late_s, other)
                return self._inner.ask(call, other)

            started = time.perf_counter()
            answer = await first_answer(self._inner.ask(call, peer), ask_replica, late_s=late_s)
        if answer.peer != peer:
            # It took longer than this, and how much will never be known.
            book.observe(peer, Overtaken(call.rpc, tokens, (time.perf_counter() - started) / turns, num_blocks))
        return answer


class HedgeBudget:
    """Bounds the further requests to a share of all, also when all servers are late because the network is."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._saved = 1.0

    def earn(self) -> None:
        """Counts a request."""
        self._saved = min(self._saved + self._rules.hedge_share, self._rules.hedge_burst)

    def take(self) -> bool:
        """Returns whether a further request may be made, and counts it."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


async def first_answer(
    request: Coroutine[Any, Any, T],
    spare: Callable[[], Coroutine[Any, Any, T] | None],
    *,
    late_s: float,
    most: int = 1,
) -> T:
    """Returns the first answer, to a request or to further ones that are made while it is late.

    Errors count only of the request itself; the others are cancelled in the end.

    Args:
        request: The request.
        spare: Makes a further request; None if there is nobody to ask.
        late_s: Seconds after which a further request is made, and again until ``most`` are.
        most: Most further requests.
    """
    tasks = [asyncio.create_task(request)]
    try:
        for _ in range(most):
            done, _ = await asyncio.wait(tasks, timeout=late_s, return_when=asyncio.FIRST_COMPLETED)
            other = None if done else spare()
            if other is None:
                break
            tasks.append(asyncio.create_task(other))
        return await _first(tasks)
    finally:
        for task in tasks:
            task.cancel()
        if len(tasks) > 1 or not tasks[0].done():
            await asyncio.gather(*tasks, return_exceptions=True)


async def _first(tasks: Sequence[asyncio.Task[T]]) -> T:
    while True:
        ended = next((task for task in tasks if task.done() and (task is tasks[0] or task.exception() is None)), None)
        if ended is not None:
            return ended.result()
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
