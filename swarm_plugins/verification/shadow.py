"""Sessions computed again here: the same steps into caches of our own, a few at a time.

A server cannot know which sessions have a shadow. Decode steps are compared in batches, each of which runs as one
prefill, so following a session costs a fraction of the time that it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.block_io import AdapterUse, SpanInputs
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.transport.messages import Codec, SessionStep
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, SessionCaches, UncheckableError
from swarm_plugins.verification.recompute import nudged_hidden, packed_apart, settled
from swarm_plugins.verification.repeated import step_inputs
from swarm_plugins.verification.scores import Comparison, Verdict, coarsest


class _Part(NamedTuple):
    """Consecutive steps."""

    hidden: Tensor
    """``[B, S, D]``."""
    answers: list[tuple[Tensor, Codec]]
    """By step."""
    expected: Tensor
    """``[B, S, D]``, packed like the answers."""


class Shadow:
    """Computes the steps of one session again, and compares some of them.

    Args:
        prefix: Keys and values that the session starts with, K then V for each block.
        blocks: The blocks that the server runs.
        kind: How the server computes.
    """

    def __init__(self, prefix: Sequence[Tensor], blocks: range, kind: Kind) -> None:
        self.kind = kind
        self.blocks = blocks
        self.is_lost = False
        """Whether the session cannot be followed any further."""
        self.num_compared = 0
        """Steps that the last comparison reached to."""
        self._mirror = History(tuple(prefix))
        self._claimed: list[tuple[Tensor, Codec]] = []
        """Answers to the steps that are not compared yet, and how they were packed."""
        self._pending: list[_Part] = []
        """What is too little to be compared yet."""
        self._caches = SessionCaches(blocks, kind, prefix)
        self._lock = asyncio.Lock()
        self._precision = kind.session_precision
        """The coarsest type on the way of any step."""

    @property
    def num_waiting(self) -> int:
        """Steps not compared yet."""
        return len(self._claimed)

    def add(self, request: SessionStep, adapters: AdapterUse, claimed: Tensor) -> None:
        """Adds a step that is to be compared.

        Args:
            request: As it arrived at the server.
            adapters: Those that it names; they must not change any more.
            claimed: The server's answer, ``[B, S, D]``.
        """
        if not self.is_lost:
            self._append(request, adapters)
            self._claimed.append((claimed, request.reply_codec))

    async def skip(self, steps: Sequence[tuple[SessionStep, AdapterUse]], blocks: LocalBlocks) -> None:
        """Runs the session's first steps without comparing them.

        Raises:
            SwarmError: If the blocks cannot be read or run here.
        """
        for request, adapters in steps:
            self._append(request, adapters)
        self.num_compared = len(steps)
        if steps:
            is_joinable = await blocks.has_fixed_positions(self.blocks, self.kind)
            await blocks.extend(self._caches, self._steps_of(0, len(steps), is_joinable=is_joinable))

    async def compare(self, blocks: LocalBlocks) -> list[Verdict]:
        """Compares the steps added since the last call.

        Raises:
            UncheckableError: If the blocks cannot be read or run here; the session cannot be followed any further.
        """
        async with self._lock:
            try:
                return [] if self.is_lost else await self._compare(blocks)
            except SwarmError as exc:
                self.lose()  # the caches hold what only some of the blocks have run
                raise UncheckableError(one_line(exc)) from exc

    def _append(self, request: SessionStep, adapters: AdapterUse) -> None:
        self._mirror.append(step_inputs(request, self.blocks, adapters))
        wire = str(request.hidden.dtype).removeprefix("torch.")
        self._precision = coarsest([self._precision, wire, request.reply_codec])

    def lose(self) -> None:
        """Ends following the session."""
        self.is_lost = True
        self._claimed, self._pending = [], []

    async def _compare(self, blocks: LocalBlocks) -> list[Verdict]:
        # Where not, a step's longest position decides how all its tokens are encoded.
        is_joinable = await blocks.has_fixed_positions(self.blocks, self.kind)
        if not self._claimed:
            return []
        first, last = self.num_compared, self.num_compared + len(self._claimed)
        answers = self._claimed
        self._claimed, self.num_compared = [], last
        steps = self._steps_of(first, last, is_joinable=is_joinable)
        expected = await blocks.extend(self._caches, steps)
        hidden = torch.cat([step.hidden for step in steps], dim=1)
        self._pending.append(_Part(hidden, answers, packed_apart(expected, answers)))
        hidden = torch.cat([part.hidden for part in self._pending], dim=1)
        answers = [answer for part in self._pending for answer in part.answers]
        claimed = torch.cat([answer for answer, _ in answers], dim=1)
        expected = torch.cat([part.expected for part in self._pending], dim=1)
        comparison = Comparison(
            precision=self._precision,
            is_mixture=blocks.has_experts(self.blocks),
            num_blocks=len(self.blocks),
            mask=steps[-1].attention_mask,
        )

        async def run(nudge: int) -> list[Tensor]:
            whole = self._steps_of(0, last, is_joinable=is_joinable)
            return [packed_apart((await self._again(blocks, whole, nudge))[:, -claimed.shape[1] :], answers)]

        def compare(nudged: Sequence[Sequence[Tensor]]) -> list[Verdict]:
            verdict = comparison.outputs(hidden, claimed, expected, [moved for (moved,) in nudged])
            return [] if verdict is None else [verdict]

        verdicts = await settled(blocks, compare, run)
        if verdicts:
            self._pending = []
        return verdicts

    async def _again(self, blocks: LocalBlocks, steps: Sequence[SpanInputs], nudge: int) -> Tensor:
        """Runs a session from its start, from nudged inputs; returns the outputs for all its tokens."""
        caches, dtype = SessionCaches(self.blocks, self.kind, self._mirror.prefix), self.kind.torch_dtype
        nudged = [replace(step, hidden=nudged_hidden(step.hidden.to(dtype), nudge)) for step in steps]
        return await blocks.extend(caches, nudged)

    def _steps_of(self, first: int, last: int, *, is_joinable: bool) -> list[SpanInputs]:
        """Returns steps from ``first`` to ``last``, joined where that changes nothing."""
        part = self._mirror.copy()
        del part.steps[last:]
        return part.merged(first) if is_joinable else part.steps[first:]
