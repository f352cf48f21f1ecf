"""Sessions computed again here: the same steps into caches of our own, a few at a time.

A server cannot know which sessions have a shadow. Decode steps are compared in batches, each of which runs as one
prefill, so following a session costs a fraction of the time that it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarm_plugins.block_io import AdapterUse, SpanInputs
from swarm_plugins.client.history import History
from swarm_plugins.client.observer import StepCall
from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, SessionCaches, UncheckableError
from swarm_plugins.verification.recompute import check_kind, nudged_hidden, settled, travelled
from swarm_plugins.verification.scores import Comparison, Verdict, coarsest


class Shadow:
    """Follows one session on one server.

    Args:
        history: The session's record; its prefix is taken over, its steps are followed by ``add``.
        blocks: The blocks that the server runs.
        version: Model version that the server is asked for.
        kind: How the server computes.
    """

    def __init__(self, history: History, blocks: range, version: str, kind: Kind) -> None:
        self.version = version
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
        self._adapters: tuple[object, AdapterUse] | None = None
        """Digests and rows of the last step, and copies of its adapters."""
        self._lock = asyncio.Lock()
        self._is_lost = False
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
        """Follows the step that the session has just made.

        Raises:
            ProtocolError: If the server has not signed its answer.
            SpanMovedError: If it has signed for other blocks than it is believed to have.
        """
        step = call.history.steps[-1]
        receipt = check_receipt(call.peer, travelled(call.request, call.request.reply_codec), call.response)
        check_kind(call.peer, receipt, self.version, self.kind)
        self._steps.append(step)
        named = call.request.adapters, call.request.adapter_rows
        if self._adapters is None or self._adapters[0] != named:
            copies = tuple(one.map(lambda tensor: tensor.detach().to("cpu", copy=True)) for one in call.adapters)
            self._adapters = (named, AdapterUse(adapters=copies, rows=call.request.adapter_rows))
        self._mirror.append(replace(step, hidden=step.hidden.clone(), adapters=self._adapters[1]))
        self._outputs.append(call.response.hidden.clone())
        wire = str(call.request.hidden.dtype).removeprefix("torch.")
        self.precision = coarsest([self.kind.precision, wire, call.request.reply_codec])

    async def compare(self, blocks: LocalBlocks) -> list[Verdict]:
        """Compares the steps added since the last call.

        Raises:
            UncheckableError: If the blocks cannot be read or run here; the session cannot be followed any further.
        """
        async with self._lock:
            try:
                return [] if self._is_lost else await self._compare(blocks)
            except SwarmError as exc:
                self._is_lost = True  # the caches hold what only some of the blocks have run
                raise UncheckableError(one_line(exc)) from exc

    async def _compare(self, blocks: LocalBlocks) -> list[Verdict]:
        # Where not, a step's longest position decides how all its tokens are encoded.
        is_joinable = await blocks.has_fixed_positions(self.blocks.start, self.kind)
        first, last = self._compared, len(self._outputs)
        self._compared = last
        if first == last:
            return []
        claimed = torch.cat(self._outputs[first:last], dim=1)
        self._outputs[first:last] = [claimed[:, :0]] * (last - first)
        steps = self._steps_of(first, last, is_joinable=is_joinable)
        expected = await blocks.extend(self._caches, steps)
        self._pending.append((torch.cat([step.hidden for step in steps], dim=1), claimed, expected))
        hidden, claimed, expected = (torch.cat(parts, dim=1) for parts in zip(*self._pending, strict=True))
        comparison = Comparison(
            precision=self.precision,
            is_mixture=blocks.has_experts(self.blocks),
            num_blocks=len(self.blocks),
            mask=steps[-1].attention_mask,
        )

        async def run(nudge: int) -> list[Tensor]:
            whole = self._steps_of(0, last, is_joinable=is_joinable)
            return [(await self._again(blocks, whole, nudge))[:, -claimed.shape[1] :]]

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
