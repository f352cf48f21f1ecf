"""Does work once for all tasks that ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass
class _Task:
    task: asyncio.Task[None]
    num_waiting: int = 0


class SharedWork(Generic[K]):
    """Work by key: who asks for what is under way waits for that, and shares its failure, too."""

    def __init__(self) -> None:
        self._tasks: dict[K, _Task] = {}

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begins the work unless it is under way, and waits for it; it is cancelled when all who wait for it are."""
        shared = self._tasks.get(key)
        if shared is None:
            shared = self._tasks[key] = _Task(asyncio.create_task(work()))
        shared.num_waiting += 1
        try:
            await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                shared.task.cancel()
            if self._tasks.get(key) is shared and (shared.task.done() or not shared.num_waiting):
                del self._tasks[key]
