"""HF's own forward of a base model that has been cut down to some of its blocks.

Callers check their inputs and make room in caches; caches count new tokens only when the caller says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins.block_io import AdapterUse, SpanInputs, SpanOutputs
from swarm_plugins.blocks.adapters.apply import adapter_patches
from swarm_plugins.blocks.adapters.token_rows import TokenRows
from swarm_plugins.blocks.attending import SDPA
from swarm_plugins.blocks.calls import BlockList, Call, CallStack, Entry, Exit, Gathered, Given, SkippedBlock, Watched
from swarm_plugins.blocks.eager import EAGER
from swarm_plugins.blocks.fused import FusedBlock, Rotation, fused_block, rotates_then_runs_blocks
from swarm_plugins.blocks.keepers import Keeper
from swarm_plugins.blocks.masks import masks_of
from swarm_plugins.blocks.own_layers import OwnLayers
from swarm_plugins.blocks.packed import PACKED, PackedPast, Packing, bounded, packed_past, padding_of, rows_of
from swarm_plugins.blocks.past import Past, PrefixPast, SessionPast
from swarm_plugins.blocks.routers import watch_routers
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.blocks.stacked import StackedPast, stacks
from swarm_plugins.borders import NO_TIES
from swarm_plugins.columns import Arguments, Columns
from swarm_plugins.errors import ConfigError

_CACHES = ("past_key_values", "cache_params", "state")
"""Names of the argument that takes a cache."""


class _Use(NamedTuple):
    """The adapters of one session (or of a forward) and the tokens they are used on."""

    adapters: AdapterUse
    num_rows: int
    num_new: int
    before: int
    padded: int = 0
    """Tokens of padding in front of them, where a module sees cached and new tokens."""


class CutModel:
    """Runs any part of the blocks of a cut-down model."""

    num_returned = 0
    """How many values layers return in a tuple, 0 for a tensor alone; see `probe`."""
    columns = Columns()
    """What passes between blocks; see `probe`."""
    hidden_size: int
    """Its width; see `probe`."""
    keeper: Keeper | None = None
    """Of states that the family keeps by means of its own; see `probe`."""
    handed: int | str | None = None
    """The argument that layers return behind hidden states, if they hand on an object with states; see `probe`."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer_path: str,
        blocks: range,
        dtype: torch.dtype,
        tied: frozenset[int] = NO_TIES,
    ) -> None:
        self.model = model
        self.tied = tied
        self.config = model.config
        self.blocks = blocks
        self.hidden_size = int(self.config.hidden_size)
        layers = model.get_submodule(layer_path)
        if not isinstance(layers, BlockList):
            raise ConfigError(f"the layer list {layer_path} is a {type(layers).__name__}, not a BlockList")
        self.layers: list[nn.Module] = list(layers)
        self.called: Sequence[int] = range(len(self.layers))
        """The blocks that the model calls, in order: not those that look at images (Mllama); see `probe`."""
        self.device = next(model.parameters()).device
        self.dtype = dtype
        self.attention: str = self.config._attn_implementation
        self.own_layers = OwnLayers(self.config)
        # With cache layers of their own, families change masks, too.
        if self.attention == "eager" and model._supports_attention_backend and not self.own_layers.are_of_the_family:
            self.attention = EAGER  # the same attention, in cuts of bounded size
        is_default = self.config._experts_implementation == "grouped_mm"
        if is_default and self.device.type == "cpu" and model._can_set_experts_implementation():
            model.set_experts_implementation("swarm_table")  # faster there; not measured elsewhere
        self._calls = CallStack(layers, self.config)
        rotation = Rotation()
        self._blocks: list[Any] = list(self.layers)
        """What runs each layer."""
        if self.attention == SDPA:
            for block in blocks:
                self._blocks[block] = fused_block(self.layers[block], self._calls, rotation) or self.layers[block]
        is_fused = all(isinstance(self._blocks[block], FusedBlock) for block in blocks)
        self._is_direct = is_fused and rotates_then_runs_blocks(model)
        known = inspect.signature(type(model).forward).parameters
        self.cache_name = next((name for name in _CACHES if name in known), _CACHES[0])
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        names = ("attention_mask", "position_ids", self.cache_name)
        self._names = [name for name in names if takes_all or name in known]
        """Arguments that the model's forward takes."""
        self._tables: dict[tuple[int, int, int, int | str | None], list[Any]] = {}
        self._joined: dict[int, bool] = {}
        # Adapters name modules in every step; only existing ones are kept, so it is bounded.
        self._modules: dict[tuple[int, str], nn.Module] = {}
        watch_routers(model, self.layers, blocks, self._calls)

    def module(self, block: int, path: str) -> nn.Module:
        """Returns a module of a block.

        Raises:
            AttributeError: If the block lacks it.
        """
        found = self._modules.get((block, path))
        if found is None:
            found = self._modules[block, path] = self.layers[block].get_submodule(path)
        return found

    def has_joined(self, block: int) -> bool:
        """Returns whether a block computes with what the cache returns before it attends to it, as far as is known."""
        return self._joined.get(block, False)

    def forward(
        self, inputs: SpanInputs, on_boundary: Callable[[], None] | None = None, made: list[Tensor] | None = None
    ) -> SpanOutputs:
        """Runs blocks without a session; calls ``on_boundary`` between them, in forward and backward.

        With a prefix, ``made`` gets the keys and values of the new tokens, K then V for each block.
        """
        past = PrefixPast(inputs.prefix, inputs.blocks, made) if inputs.prefix else None
        batch_size, num_new = inputs.hidden.shape[:2]
        before = 0 if past is None else past.length
        call = self._call(inputs.blocks, [_Use(inputs.adapters, batch_size, num_new, before)], [inputs])
        if on_boundary is not None:
            call.table = self._watched_table(inputs.blocks, call.between, on_boundary)
        mask = masks_of(inputs, inputs.attention_mask, before, attention=self.attention, config=self.config)
        return call.outputs(self.run(call, inputs.hidden, mask, inputs.position_ids, past, inputs.token_ids))

    def step(self, step: StepInputs, on_boundary: Callable[[], None] | None = None) -> SpanOutputs:
        """Runs the new tokens of one session and writes to its cache, which has room for them."""
        use = _Use(step.adapters, step.cache.batch_size, step.hidden.shape[1], step.cache.length)
        call = self._call(step.blocks, [use], [step])
        if on_boundary is not None:
            call.table = self._watched_table(step.blocks, call.between, on_boundary)
        past = SessionPast(step.cache, self._joined, self.own_layers)
        padding = padding_of(step)
        if self._is_direct and padding is None and step.hidden.shape[1] == 1 and step.is_plain:
            return call.outputs(self._run_single(call, step.blocks, step.hidden, step.position_ids, past))
        cache = step.cache
        mask = masks_of(step, padding, cache.length, attention=self.attention, config=self.config, first_of=cache.first)
        return call.outputs(self.run(call, step.hidden, mask, step.position_ids, past, step.token_ids))

    def stacks(self, steps: Sequence[StepInputs], packing: Packing) -> list[list[int]]:
        """Returns which steps may share a forward, by their indices."""
        if packing is Packing.NONE:
            return [[index] for index in range(len(steps))]
        if packing is Packing.PADDED:
            # Longer ones take more time to copy their keys than to multiply alone: L * D against D * D.
            return stacks(steps, pads=True, longest=self.hidden_size)
        are_joined = any(self._joined.values())
        if packing is Packing.SEQUENCE:
            plain = [index for index, step in enumerate(steps) if step.is_plain]
            groups = [*([plain] if plain else []), *([i] for i, step in enumerate(steps) if not step.is_plain)]
        else:
            groups = stacks(steps, pads=are_joined)
        return [part for group in groups for part in bounded(steps, group)] if are_joined else groups

    def step_packed(self, steps: Sequence[StepInputs], packing: Packing) -> list[SpanOutputs]:
        """Runs the new tokens of several sessions in one forward and writes to their caches."""
        return self._step_sequence(steps) if packing is Packing.SEQUENCE else self._step_rows(steps, packing)

    def _step_sequence(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        parts = rows_of(steps)
        hidden = torch.cat([step.hidden.reshape(1, -1, self.hidden_size) for step in steps], dim=1)  # [1, T, D]
        positions = torch.cat([part.positions() for part in parts], dim=1)
        uses = [_Use(part.step.adapters, part.batch_size, part.num_new, part.length - part.num_new) for part in parts]
        call = self._call(steps[0].blocks, uses, steps)
        call.attention = PACKED
        past = PackedPast(parts, self.attention, self._joined)
        with packed_past(past):
            if self._is_direct and all(part.num_new == 1 and part.attention_mask is None for part in parts):
                hidden = self._run_single(call, steps[0].blocks, hidden, positions, past)
            else:
                hidden = self.run(call, hidden, None, positions, past)
        return [part.outputs(hidden, call) for part in parts]

    def _step_rows(self, steps: Sequence[StepInputs], packing: Packing) -> list[SpanOutputs]:
        parts = rows_of(steps)
        hidden = torch.cat([step.hidden for step in steps])  # [R, 1, D]
        positions = torch.cat([part.positions() for part in parts], dim=1).t()  # [R, 1]
        is_apart = packing is Packing.ROWS
        past = StackedPast(parts, self.attention, self._joined if is_apart else {})
        uses = [
            _Use(part.step.adapters, part.batch_size, 1, part.length - 1, past.length + 1 - part.length)
            for part in parts
        ]
        call = self._call(steps[0].blocks, uses, steps)
        if is_apart:
            call.attention = PACKED
        with packed_past(past):
            hidden = self.run(call, hidden, None if is_apart else past.padding(), positions, past)
        past.keep_states()
        return [part.outputs(hidden, call) for part in parts]

    def run(
        self,
        call: Call,
        hidden: Tensor,
        mask: Tensor | dict[str, Any] | None = None,
        positions: Tensor | None = None,
        past: Past | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Runs the model's forward with a call in force; returns what its last block hands on.

        ``ids`` are the token ids, ``[B, S]``. None: the blocks do not depend on them.
        """
        called = [block for block in call.blocks if block in self.called]
        if not called:
            if call.between is not None:
                call.between = [hidden] * (len(call.blocks) - 1)
            return hidden
        outputs: list[Any] = []
        states, sides = self.columns.split(hidden)
        call.table = self._between_borders(call, called, states, sides, outputs.append)
        if ids is None:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        self.run_model(call, ids, mask, positions, past)
        if call.between is not None:
            made = dict(zip(called, [self.columns.after(one, sides) for one in call.between], strict=False))
            # Behind a block that is not called is what is before it.
            for block in call.blocks[:-1]:
                made.setdefault(block, made.get(block - 1, hidden))
            call.between[:] = [made[block] for block in call.blocks[:-1]]
        return self.columns.after(outputs[0], sides)

    def run_model(
        self,
        call: Call,
        ids: Tensor,
        mask: Tensor | dict[str, Any] | None = None,
        positions: Tensor | None = None,
        past: Past | None = None,
        *,
        makes_cache: bool = False,
    ) -> Any:
        """Runs the model's forward on tokens, ``[B, S]``, with a call's table as it is; returns its output.

        With ``makes_cache`` the model makes a cache of its own kind.
        """
        uses_cache = makes_cache or past is not None
        keeper = self.keeper
        lent = past if keeper is None else keeper.lend(past, len(ids))
        try:
            with self._calls.running(call):
                arguments = {"attention_mask": mask, "position_ids": positions, self.cache_name: lent}
                output = self.model(input_ids=ids, use_cache=uses_cache, **{k: arguments[k] for k in self._names})
            if keeper is not None and past is not None:
                keeper.take(past, call.blocks, lent, output)
        finally:
            if keeper is not None:
                keeper.restore()
        return output

    def _between_borders(
        self, call: Call, called: Sequence[int], hidden: Tensor, sides: list[Tensor], seen: Callable[[Any], None]
    ) -> list[Any]:
        """Returns a call's table with what came put in at its blocks, and what leaves the last one reported.

        ``sides`` will get what is gathered.
        """
        table, first = list(call.table), called[0]
        behind = next((block for block in self.called if block > called[-1]), None)
        if behind is not None:
            table[behind] = Exit(table[behind], lambda *given: seen(self.columns.returned(*given)))
        else:
            table[called[-1]] = Watched(table[called[-1]], seen)
        for block in called if sides else ():
            given = self.columns.given(block, sides, is_entry=block == first)
            table[block] = Given(table[block], given) if given else table[block]
        table[first] = Entry(table[first], lambda shape: self.columns.in_streams(hidden, shape))
        for block, index in self.columns.gathered.items():
            if block == first:
                sides[index] = hidden
            if block <= first:
                table[block] = Gathered(table[block], sides[index])
            elif block in called:
                table[block] = Exit(table[block], functools.partial(_note, sides, index))
        return table

    def _run_single(self, call: Call, blocks: range, hidden: Tensor, positions: Tensor | None, past: Past) -> Tensor:
        """Does what `run` does for one new token of each row, without the model's own preparations."""
        if positions is None:
            positions = torch.arange(past.length, past.length + 1, device=hidden.device)[None]
        model: Any = self.model
        with self._calls.running(call):
            rotation = model.rotary_emb(hidden, position_ids=positions)
            for run in call.table[blocks.start : blocks.stop]:
                hidden = run(
                    hidden,
                    attention_mask=None,
                    position_embeddings=rotation,
                    position_ids=positions,
                    past_key_values=past,
                    use_cache=True,
                )
        return hidden

    def table(self, blocks: range) -> list[Any]:
        """Returns a call's table that runs ``blocks`` and skips all others."""
        key = (blocks.start, blocks.stop, self.num_returned, self.handed)
        if key not in self._tables:
            skipped = (SkippedBlock(layer, self.num_returned, self.handed) for layer in self.layers)
            pairs = enumerate(zip(self._blocks, skipped, strict=True))
            self._tables[key] = [run if index in blocks else skip for index, (run, skip) in pairs]
        return self._tables[key]

    def _call(self, blocks: range, uses: Sequence[_Use], asked: Sequence[SpanInputs]) -> Call:
        between: list[Tensor] | None = [] if any(inputs.collect_hidden for inputs in asked) else None
        call = Call(
            blocks=blocks,
            table=self.table(blocks) if between is None else self._watched_table(blocks, between, None),
            attention=self.attention,
            router_logits={} if any(inputs.collect_router for inputs in asked) else None,
            between=between,
        )
        if any(use.adapters.adapters for use in uses):
            new = [use.num_new for use in uses for _ in range(use.num_rows)]
            total = [use.before + use.num_new for use in uses for _ in range(use.num_rows)]
            padded = [use.padded for use in uses for _ in range(use.num_rows)]
            tokens = TokenRows(new, total, self.device, padded)
            call.patches = adapter_patches([(use.adapters, use.num_rows) for use in uses], blocks, self.module, tokens)
        return call

    def _watched_table(
        self, blocks: range, between: list[Tensor] | None, boundary: Callable[[], None] | None
    ) -> list[Any]:
        def seen(returned: Any) -> None:
            if between is not None:
                between.append(returned)
            if boundary is not None:
                hidden = returned if isinstance(returned, Tensor) else returned[0]
                if hidden.requires_grad:
                    hidden.register_hook(lambda _: boundary())
                boundary()

        table = list(self.table(blocks))
        for block in blocks[:-1]:
            table[block] = Watched(self._blocks[block], seen)
        return table


def _note(sides: list[Tensor], index: int, hidden: Tensor, arguments: Arguments) -> None:
    sides[index] = hidden
