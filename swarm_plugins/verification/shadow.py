"""Sessions computed again here: the same steps into caches of our own, a few at a time.

A server cannot know which sessions have a shadow. Decode steps are compared in batches, each of which runs as one
prefill, so following a session costs a fraction of the time that it takes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch
from torch import Tensor

from swarm_plugins.block_io import AdapterUse, SpanInputs
from swarm_plugins.client.history import History
from swarm_plugins.client.observer import StepCall
from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, SessionCaches, UncheckableError
from swarm_plugins.verification.scores import Verdict, coarsest, compare_outputs, is_conclusive


class Shadow:
    """Follows one session on one server.

    Args:
        history: The session's record; its prefix is taken over, its steps are followed by ``add``.
        blocks: The blocks that the server runs.
        kind: How the server computes.
    """

    def __init__(self, history: History, blocks: range, kind: Kind) -> None:
        self.kind = kind
        self.blocks = blocks
        self._mirror = History(history.prefix)
        """The same steps with copies of the adapters, which may train before they are compared."""
        self._steps: list[SpanInputs] = []
        self._outputs: list[Tensor] = []
        self._compared = 0
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        """Inputs, answers and results here that are too few to be compared yet."""
        self._caches = SessionCaches(blocks, kind, history.prefix)
        self._adapters: tuple[tuple[str, ...], AdapterUse] | None = None
        self._lock = asyncio.Lock()
        self.precision = "float32"

    @property
    def num_waiting(self) -> int:
        """Steps not compared yet."""
        return len(self._outputs) - self._compared

    def follows(self, history: History) -> bool:
        """Returns whether the session still begins with the steps followed so far: a crop or reorder ends that."""
        known = self._steps
        return len(history.steps) == len(known) + 1 and all(
            one is other for one, other in zip(known, history.steps, strict=False)
        )

    def add(self, call: StepCall) -> None:
        """Follows the step that the session has just made."""
        step = call.history.steps[-1]
        self._steps.append(step)
        if self._adapters is None or self._adapters[0] != call.request.adapters:
            copies = tuple(one.map(lambda tensor: tensor.detach().to("cpu", copy=True)) for one in call.adapters)
            self._adapters = (call.request.adapters, AdapterUse(adapters=copies, rows=call.request.adapter_rows))
        self._mirror.append(replace(step, hidden=step.hidden.clone(), adapters=self._adapters[1]))
        self._outputs.append(call.response.hidden.clone())
        wire = str(call.request.hidden.dtype).removeprefix("torch.")
        self.precision = coarsest([self.kind.precision, wire, call.request.reply_codec])

    async def compare(self, blocks: LocalBlocks) -> list[Verdict]:
        """Compares the steps added since the last call.

        Raises:
            UncheckableError: If the blocks cannot be read or run here.
        """
        async with self._lock:
            try:
                return await self._compare(blocks)
            except SwarmError as exc:
                raise UncheckableError(one_line(exc)) from exc

    async def _compare(self, blocks: LocalBlocks) -> list[Verdict]:
        first, self._compared = self._compared, len(self._outputs)
        if first == self._compared:
            return []
        claimed = torch.cat(self._outputs[first : self._compared], dim=1)
        self._outputs[first : self._compared] = [claimed[:, :0]] * (self._compared - first)
        steps = self._mirror.merged(first)
        expected = await blocks.extend(self._caches, steps)
        self._pending.append((torch.cat([step.hidden for step in steps], dim=1), claimed, expected))
        is_mixture = blocks.has_experts(self.blocks, self.kind)
        hidden, claimed, expected = (torch.cat(parts, dim=1) for parts in zip(*self._pending, strict=True))
        if not is_conclusive(self.precision, hidden.shape[0] * hidden.shape[1], is_mixture=is_mixture):
            return []
        self._pending = []
        verdict = compare_outputs(
            hidden,
            claimed,
            expected,
            self.precision,
            mask=steps[-1].attention_mask,
            is_mixture=is_mixture,
            num_blocks=len(self.blocks),
        )
        return [verdict]
