"""Checks of answers that are already used, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from swarm_plugins.client.calls.call import WrongAnswerError
from swarm_plugins.errors import SwarmError

log = logging.getLogger(__name__)

_MAX_WAITING = 4


class BackgroundChecks:
    """Runs checks beside the work of those who use the answers."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether checks are under way."""
        return bool(self._running)

    @property
    def is_full(self) -> bool:
        """Whether so many are under way that an answer should rather wait for its check."""
        return len(self._running) >= _MAX_WAITING

    def start(self, check: Coroutine[Any, Any, None], name: str) -> None:
        """Begins a check; says so if it finds a wrong answer, or fails."""

        async def run() -> None:
            try:
                await check
            except WrongAnswerError as exc:
                log.warning("an answer that has already been used was wrong: %s", exc)
            except SwarmError as exc:
                log.warning("an answer that has already been used could not be checked: %s", exc)

        task = asyncio.create_task(run(), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Ends the checks. Idempotent."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
