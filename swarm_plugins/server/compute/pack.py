"""Which tokens of the waiting session steps run together, and how a long prefill is cut and put together again."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_plugins.block_io import SpanOutputs, join_outputs
from swarm_plugins.blocks.runner import StepInputs

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
        return whole.take_tokens(first, first + num_tokens)

    def add(self, chunk: StepInputs, outputs: SpanOutputs) -> None:
        """Takes the outputs of the chunk that was made last."""
        self._num_done += int(chunk.hidden.shape[1])
        self._outputs.append(outputs)

    def result(self) -> SpanOutputs:
        """Returns the outputs of the whole step."""
        return join_outputs(self._outputs, dim=1)


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
