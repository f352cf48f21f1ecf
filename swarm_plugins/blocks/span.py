"""A span that servers run: blocks of a model, the caches of its sessions, and their budget.

`Span.forward` is stateless and differentiable. `Span.step` appends to the caches of sessions; several sessions run as
one packed forward as far as the model allows it (`Packing`). A step may run in the middle of a forward or its backward,
or of another session's step, in the same thread, from `Span.on_block_boundary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from swarm_plugins.block_io import SpanInputs, SpanOutputs, join_outputs
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.probing.probe import Traits
from swarm_plugins.blocks.runner import SpanSpec, StepInputs
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.interfaces import ExpertCache
from swarm_plugins.rotary import has_fixed_positions, whole_beyond

_SCORE_BYTES = 16
"""Of one head, for a pair of tokens: the score, its softmax in float32, and copies of both in the blocks' type."""


class Span:
    """Consecutive blocks of a model, ready to run; fulfils `SpanRunner`. All calls come from one thread.

    Checks cheap invariants only: inputs from peers must be checked against ``spec`` first.
    """

    on_block_boundary: Callable[[], None] | None = None
    """Called between blocks of `forward` and of its backward, and of a step alone. It may call `step`, and is None
    meanwhile: that one is not interrupted."""

    def __init__(self, cut: CutModel, traits: Traits, pool: KVPool, experts: ExpertCache | None = None) -> None:
        layouts = traits.kv_layouts
        self.spec = SpanSpec(
            blocks=cut.blocks,
            tied=cut.tied,
            hidden_size=cut.hidden_size,
            dtype=cut.dtype,
            device=cut.device,
            max_positions=int(getattr(cut.config, "max_position_embeddings", 0) or 1 << 20),
            kv_layouts=layouts,
            has_fixed_positions=has_fixed_positions(cut.config) and all(one.is_plain for one in layouts.values()),
            whole_beyond=whole_beyond(cut.config),
            pair_bytes=_pair_bytes(cut, layouts),
            makes_masks=getattr(cut.config, "sliding_window", None) is not None,
            vocab_size=int(cut.config.vocab_size) if traits.takes_ids else 0,
            mask_kinds=traits.mask_kinds,
            position_planes=traits.position_planes,
        )
        self.model = cut.model
        self.pool = pool
        self.packing = traits.packing
        """How sessions share a forward."""
        self.never_called = traits.never_called
        """Block and path of modules whose weight is read by others: adapters there would do nothing."""
        self._takes_several = traits.takes_several
        self._takes_rows = traits.takes_rows
        self._cut = cut
        self._experts = experts

    @property
    def blocks(self) -> range:
        """Global indices of the span's blocks."""
        return self.spec.blocks

    def close(self) -> None:
        """Closes the readers of offloaded experts; the span cannot run afterwards. Idempotent."""
        if self._experts is not None:
            self._experts.close()

    def module(self, block: int, path: str) -> nn.Module:
        """Returns a module of a block.

        Raises:
            AttributeError: If the block lacks it.
        """
        return self._cut.module(block, path)

    def new_cache(self, batch_size: int, blocks: range, prefix: Sequence[Tensor] = ()) -> KVCache:
        """Opens a session's cache; see `SpanRunner`."""
        self._check_blocks(blocks)
        cache = KVCache(self.pool, self.spec.kv_layouts, blocks, batch_size, self.spec.device)
        if prefix:
            try:
                cache.reserve(prefix[0].shape[2])
                for block, keys, values in zip(blocks, prefix[::2], prefix[1::2], strict=True):
                    cache.append(block, keys, values)
                cache.advance(prefix[0].shape[2])
            except BaseException:
                cache.close()
                raise
        return cache

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs blocks without a session; differentiable where gradients are enabled. See `SpanRunner`."""
        self._check_shapes(inputs, inputs.prefix[0].shape[2] if inputs.prefix else 0)
        return self._cut.forward(inputs, self.on_block_boundary)

    def forward_part(self, inputs: SpanInputs) -> tuple[SpanOutputs, tuple[Tensor, ...]]:
        """Runs some tokens of rows behind the ones before them; see `SpanRunner`."""
        self._check_shapes(inputs, inputs.prefix[0].shape[2])
        made: list[Tensor] = []
        outputs = self._cut.forward(inputs, self.on_block_boundary, made)
        return outputs, tuple(made)

    def step(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        """Runs new tokens of sessions and appends to their caches; see `SpanRunner`."""
        if not steps:
            return []
        for step in steps:
            self._check_step(step, steps[0].blocks)
        if len({id(step.cache) for step in steps}) != len(steps):
            raise ConfigError("a session appears twice in one step: its steps follow one another")
        for step in steps:
            step.cache.reserve(step.hidden.shape[1], goes_on=step.goes_on, to_come=step.to_come)
        # Caches count new tokens only when everything has run, so an exception leaves all as they were.
        with torch.inference_mode():
            outputs: dict[int, SpanOutputs] = {}
            for indices in self._cut.stacks(steps, self.packing):
                outputs.update(zip(indices, self._together([steps[index] for index in indices]), strict=True))
        for step in steps:
            step.cache.advance(step.hidden.shape[1])
        # Copies: tensors made in inference mode could not go into a graph later.
        return [outputs[index].map(torch.clone) for index in range(len(steps))]

    def _together(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        return self._cut.step_packed(steps, self.packing) if len(steps) > 1 else [self._step(steps[0])]

    def _step(self, step: StepInputs) -> SpanOutputs:
        """Runs a session's new tokens alone."""
        if self._takes_several or step.hidden.shape[1] == 1 or not step.cache.length:
            return self._step_at_once(step)
        cache, outputs = step.cache, []
        length, states = cache.length, cache.states
        try:
            for token in range(step.hidden.shape[1]):
                outputs.append(self._step_at_once(step.take_tokens(token, token + 1)))
                cache.advance(1)
            made = cache.states
        finally:
            cache.length, cache.states = length, states
        cache.new_states = made
        return join_outputs(outputs, dim=1)

    def _step_at_once(self, step: StepInputs) -> SpanOutputs:
        """Runs all new tokens of a session at once; single ones row by row, if the family mixes these up."""
        cache = step.cache
        if self._takes_rows or cache.batch_size == 1 or step.hidden.shape[1] > 1:
            return self._cut.step(step, self.on_block_boundary)
        states, num_rows = cache.states, cache.batch_size
        outputs, made = [], []
        try:
            cache.batch_size = 1
            for row in range(num_rows):
                alone = slice(row, row + 1)
                cache.states = {key: cast("Tensor", one)[alone] for key, one in states.items()}
                cache.new_states = {}
                outputs.append(self._cut.step(step.take_rows(alone), self.on_block_boundary))
                made.append(cast("dict[tuple[int, str, int], Tensor]", cache.new_states))
        finally:
            cache.states, cache.batch_size = states, num_rows
        cache.new_states = {key: torch.cat([one[key] for one in made]) for key in made[0]}
        return join_outputs(outputs, dim=0)

    def _check_step(self, step: StepInputs, blocks: range) -> None:
        cache = step.cache
        if step.blocks != blocks:
            raise ConfigError(f"the steps of one call name blocks {blocks} and {step.blocks}: group them by blocks")
        if step.blocks.start < cache.blocks.start or step.blocks.stop > cache.blocks.stop:
            raise ConfigError(f"blocks {step.blocks} are asked of a session opened for blocks {cache.blocks}")
        self._check_shapes(step, cache.length)
        if step.hidden.shape[0] != cache.batch_size:
            raise ConfigError(f"hidden states have {step.hidden.shape[0]} rows, the session has {cache.batch_size}")
        mask, num_new = step.attention_mask, step.hidden.shape[1]
        if cache.has_states and cache.length and mask is not None and not bool(mask[:, -num_new:].all()):
            raise ConfigError(
                "padding among new tokens that follow cached ones: blocks with states of fixed size see it in the "
                "first step only, send the whole prompt with that"
            )

    def _check_blocks(self, blocks: range) -> None:
        own = self.spec.blocks
        if blocks.step != 1 or not blocks or blocks.start < own.start or blocks.stop > own.stop:
            raise ConfigError(
                f"blocks {blocks.start} to {blocks.stop} are asked of a span of blocks {own.start} to {own.stop}"
            )

    def _check_shapes(self, inputs: SpanInputs, before: int) -> None:
        """Checks what costs no look at values; ``before`` counts the tokens before the new ones."""
        self._check_blocks(inputs.blocks)
        hidden, mask, spec = inputs.hidden, inputs.attention_mask, self.spec
        if hidden.ndim != 3 or hidden.shape[2] != spec.hidden_size or 0 in hidden.shape:
            raise ConfigError(
                f"hidden states have shape {list(hidden.shape)}; expected [batch, length, {spec.hidden_size}], none of "
                "them 0"
            )
        if hidden.dtype != spec.dtype:
            raise ConfigError(f"hidden states are {hidden.dtype}, the span computes in {spec.dtype}: cast them")
        if before + hidden.shape[1] > spec.max_positions:
            # Some families recompute frequencies, for all sessions, from a longer sequence.
            raise ConfigError(
                f"the sequence would have {before + hidden.shape[1]} tokens ({before} before, {hidden.shape[1]} new), "
                f"the model has {spec.max_positions} positions: shorten it"
            )
        if mask is not None and mask.shape != (hidden.shape[0], before + hidden.shape[1]):
            raise ConfigError(
                f"attention_mask has shape {list(mask.shape)}; expected [{hidden.shape[0]}, "
                f"{before + hidden.shape[1]}]: the tokens before and the new ones"
            )


def _pair_bytes(cut: CutModel, layouts: Mapping[int, BlockKV]) -> int:
    kinds = ["num_attention_heads"] if cut.attention == "eager" else []
    kinds += ["index_n_heads"] if any(layout.index_width for layout in layouts.values()) else []
    heads = (getattr(cut.config, kind, None) for kind in kinds)
    return _SCORE_BYTES * sum(one for one in heads if isinstance(one, int))
