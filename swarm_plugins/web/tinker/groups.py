"""Samples of one prompt as rows of one generation: loops ask for each sample of a group by itself, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field, replace

from swarm_plugins.web.engine.request import Finished, Generation, Scored
from swarm_plugins.web.tinker.gathering import GATHER_S

_MAX_ROWS = 32


@dataclass(frozen=True)
class Drawn:
    """Samples of a prompt."""

    samples: tuple[tuple[Finished, tuple[Scored, ...]], ...]
    """Each with the log probabilities of its tokens."""
    prompt: tuple[Scored, ...]
    """Of the prompt's tokens, if they are wanted."""


@dataclass
class _Group:
    key: Hashable
    generation: Generation
    rows: int = 0
    task: asyncio.Task[Drawn] | None = None
    leaving: set[int] = field(default_factory=set)


class Groups:
    """Draws samples, those of one prompt together.

    Args:
        draw: Draws the ``n`` samples of a generation.
    """

    def __init__(self, draw: Callable[[Generation], Awaitable[Drawn]]) -> None:
        self._draw = draw
        self._open: dict[Hashable, _Group] = {}

    async def draw(self, generation: Generation) -> Drawn:
        """Returns the samples of a generation, which may be drawn with those of others."""
        if generation.seed is not None or generation.n > _MAX_ROWS:
            return await self._draw(generation)  # the same samples each time, whoever asks beside
        key = _key(generation)
        group = self._open.get(key)
        if group is None or group.rows + generation.n > _MAX_ROWS:
            group = self._open[key] = _Group(key, generation)
            group.task = asyncio.get_running_loop().create_task(self._run(group))
        first = group.rows
        group.rows += generation.n
        return await self._share(group, first, generation.n)

    async def _run(self, group: _Group) -> Drawn:
        rows = 0
        while rows < group.rows < _MAX_ROWS:
            rows = group.rows
            await asyncio.sleep(GATHER_S)
        self._close(group)
        return await self._draw(replace(group.generation, n=group.rows))

    def _close(self, group: _Group) -> None:
        """Lets nobody else into a group. Idempotent."""
        if self._open.get(group.key) is group:
            del self._open[group.key]

    async def _share(self, group: _Group, first: int, count: int) -> Drawn:
        if group.task is None:
            raise RuntimeError("a group has no task")
        try:
            # Who leaves does not take the others' samples away.
            drawn = await asyncio.shield(group.task)
        except asyncio.CancelledError:
            group.leaving.update(range(first, first + count))
            if len(group.leaving) == group.rows:
                self._close(group)
                group.task.cancel()
            raise
        return Drawn(drawn.samples[first : first + count], drawn.prompt)


def _key(one: Generation) -> Hashable:
    sampled = (one.sampling, one.max_new_tokens, one.stop, one.stop_tokens, one.never_ends)
    return (one.adapter, one.tenant, one.tokens, sampled, one.logprobs, one.score_prompt)
