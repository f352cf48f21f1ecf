"""Which tokens of the waiting session steps run together, and how a long prefill is cut and put together again.

Shapes: ``B`` batch, ``S`` new tokens, ``L`` cached + new tokens, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_plugins.blocks.types import SpanOutputs, StepInputs

__all__ = ["PartialStep", "choose_pack"]


class PartialStep:
    """A session step that may run in several chunks.

    Args:
        inputs: The whole step.
    """

    def __init__(self, inputs: StepInputs) -> None:
        """Stores the step; nothing has run."""
        self.inputs = inputs
        self._num_done = 0
        self._cached: int | None = None
        self._outputs: list[SpanOutputs] = []

    @property
    def batch_size(self) -> int:
        """Rows of the step."""
        return int(self.inputs.hidden.shape[0])

    @property
    def num_left(self) -> int:
        """Tokens per row that have not run."""
        return int(self.inputs.hidden.shape[1]) - self._num_done

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have run."""
        return self.num_left == 0

    def begin(self) -> None:
        """Notes how long the cache is before the first chunk. Idempotent."""
        if self._cached is None:
            self._cached = self.inputs.cache.length

    def undo(self) -> None:
        """Takes back the chunks that have run."""
        if self._num_done and self._cached is not None:
            self.inputs.cache.crop(self._cached)

    def chunk(self, num_tokens: int) -> StepInputs:
        """Returns the next ``num_tokens`` tokens per row as a step of their own."""
        whole, first = self.inputs, self._num_done
        if first == 0 and num_tokens == self.num_left:
            return whole
        last = first + num_tokens
        mask = whole.attention_mask
        if mask is not None:
            # [B, L] -> the columns that exist once this chunk is in the cache
            mask = mask[:, : int(mask.shape[1]) - (self.num_left - num_tokens)]
        return StepInputs(
            cache=whole.cache,
            blocks=whole.blocks,
            hidden=whole.hidden[:, first:last],  # [B, num_tokens, D]
            position_ids=None if whole.position_ids is None else whole.position_ids[:, first:last],
            attention_mask=mask,
            adapters=whole.adapters,
            collect_hidden=whole.collect_hidden,
            collect_router=whole.collect_router,
        )

    def add(self, chunk: StepInputs, outputs: SpanOutputs) -> None:
        """Takes the outputs of the chunk that was made last."""
        self._num_done += int(chunk.hidden.shape[1])
        self._outputs.append(outputs)

    def result(self) -> SpanOutputs:
        """Returns the outputs of the whole step."""
        parts = self._outputs
        if len(parts) == 1:
            return parts[0]
        batch = self.batch_size
        return SpanOutputs(
            hidden=torch.cat([part.hidden for part in parts], dim=1),  # [B, S, D]
            hidden_states=tuple(
                torch.cat(states, dim=1) for states in zip(*(part.hidden_states for part in parts), strict=True)
            ),
            router_logits=tuple(
                _join_rows(logits, batch) for logits in zip(*(part.router_logits for part in parts), strict=True)
            ),
            router_blocks=parts[0].router_blocks,
        )


def _join_rows(parts: Sequence[Tensor], batch: int) -> Tensor:
    """Joins ``[B * s, E]`` chunks along the sequence to ``[B * S, E]``."""
    width = parts[0].shape[-1]
    joined = torch.cat([part.reshape(batch, -1, width) for part in parts], dim=1)  # [B, S, E]
    return joined.reshape(-1, width)


def choose_pack(waiting: Sequence[PartialStep], max_tokens: int) -> list[tuple[PartialStep, int]]:
    """Chooses what runs in the next packed forward.

    Short steps (decode) first, in their order; what room they leave goes to the prefills, cut to fit.

    Args:
        waiting: All waiting steps, in the order in which it is their turn.
        max_tokens: Tokens (rows times length) of one pack. The first step runs with at least one token per row, so
            that a step wider than the pack still makes progress.

    Returns:
        The chosen steps with the number of tokens per row to run.
    """
    chosen: list[tuple[PartialStep, int]] = []
    room = max_tokens
    for step in sorted(waiting, key=lambda step: step.num_left > 1):
        num_tokens = min(step.num_left, room // step.batch_size)
        if num_tokens < 1:
            if chosen:
                continue
            num_tokens = 1
        chosen.append((step, num_tokens))
        room = max(0, room - num_tokens * step.batch_size)
    return chosen
