"""Lets waiting training calls of different models share a pass over the base."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from swarm_plugins.fair_queueing import FairLock
from swarm_plugins.tuning.computing import Computed
from swarm_plugins.tuning.joint import Call, Joint
from swarm_plugins.web.tinker.gathering import GATHER_S, compute_for
from swarm_plugins.web.tinker.leaving import finished

_MAX_CALLS = 8
_MAX_TOKENS = 8192
"""Of a pass that is shared: who shares one waits for all of it."""


@dataclass(eq=False)
class _Waiting:
    tenant: str
    call: Call
    backward: bool
    done: asyncio.Future[list[Computed]]
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(len(one.tokens) for one in self.call.datums)


class Passes:
    """Computes training calls. Keys take turns by what they have had; whose turn it is takes others along.

    Args:
        base: The base model.
        turns: Among whom the machine is divided.
        threads: Where it is computed.
    """

    def __init__(self, base: Any, turns: FairLock, threads: Executor) -> None:
        self._turns = turns
        self._threads = threads
        self._joint = Joint(base)
        # Of calls that can share a pass, one is under way: those that come meanwhile share the next.
        self._shared_turns = FairLock()
        self._waiting: dict[_Waiting, asyncio.Task[None]] = {}
        self._last: set[int] = set()
        """The models of the last pass."""

    def forget(self) -> None:
        """Drops what is kept of models, since one of them has gone."""
        self._joint.clear()

    async def compute(self, tenant: str, call: Call, *, backward: bool) -> list[Computed]:
        """Returns what a call has computed; raises like `Tuner.compute`."""
        loop = asyncio.get_running_loop()
        one = _Waiting(tenant, call, backward, loop.create_future())
        if one.num_tokens > _MAX_TOKENS or not self._joint.can_take(call.tuner):
            stop = threading.Event()
            async with self._turns.turn(tenant):
                return await finished(
                    self._threads,
                    lambda: call.tuner.compute(call.datums, call.loss, backward=backward, stop=stop),
                    stop,
                )
        self._waiting[one] = loop.create_task(self._lead(one))
        try:
            return await one.done
        finally:
            leader = self._waiting.pop(one, None)
            if leader is not None:  # its client has left before its turn
                leader.cancel()

    async def _lead(self, one: _Waiting) -> None:
        shares = {one.tenant: float(one.num_tokens)}
        async with self._shared_turns.turn(one.tenant, shares), self._turns.turn(one.tenant, shares):
            if self._last != {id(one.call.tuner)}:
                await asyncio.sleep(GATHER_S)
            together = self._claim(one)
            for other in together[1:]:
                shares[other.tenant] = shares.get(other.tenant, 0.0) + other.num_tokens
            self._last = {id(each.call.tuner) for each in together}
            await self._run(together)

    def _claim(self, first: _Waiting) -> list[_Waiting]:
        """Takes calls that wait and can share a pass, in the order of their arrival."""
        del self._waiting[first]
        together, room = [first], _MAX_TOKENS - first.num_tokens
        for other, leader in list(self._waiting.items()):
            if other.backward == first.backward and other.num_tokens <= room and len(together) < _MAX_CALLS:
                together.append(other)
                room -= other.num_tokens
                del self._waiting[other]
                leader.cancel()
        return together

    async def _run(self, together: list[_Waiting]) -> None:
        calls, backward = [one.call for one in together], together[0].backward

        def work() -> list[list[Computed] | Exception]:
            try:
                return self._joint.compute(calls, backward=backward)
            except Exception as exc:
                for call in calls:
                    if backward:
                        call.tuner.fail(str(exc))
                raise

        await compute_for([one.done for one in together], self._threads, work)
        if any(one.done.cancelled() for one in together):
            self.forget()  # a client has left meanwhile
