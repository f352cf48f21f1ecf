"""All remote blocks of one model: the first one called runs the whole chain, the others pass its result on.

transformers calls decoder layers one by one; a request for each would cost a round trip each. So the first remote block
sends the hidden states through all spans and returns the result; the others recognise that very tensor and return it
(or their own output, if hidden states are wanted or a hook reads them). Local blocks, before and after them, are
ordinary layers. Where a module of the user's runs between two blocks, one chain ends and the next begins.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.utils.output_capturing import _active_collector

from swarm_plugins.backbone.adapter_reader import AdapterReader
from swarm_plugins.backbone.arguments import by_name, read_arguments, read_ids
from swarm_plugins.backbone.cache import note_failure, run_cached
from swarm_plugins.backbone.hooks import counted, num_changes, outputs_wanted, seen_by_hooks
from swarm_plugins.backbone.own_cache import CacheSwap
from swarm_plugins.backbone.standin import structure_version
from swarm_plugins.block_io import SpanInputs, SpanOutputs, as_returned, is_same
from swarm_plugins.borders import NO_TIES, nearest_border
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.columns import Arguments, Columns
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.fallback.stand_in import StandIn
from swarm_plugins.moe.recorded import router_widths
from swarm_plugins.rotary import whole_beyond
from swarm_plugins.verification.verifier import make_guard
from swarm_plugins.versions import ModelVersion

if TYPE_CHECKING:
    from swarm_plugins.backbone.context import SwarmSettings
    from swarm_plugins.client.connection import RemoteBlocks, SwarmConnection


class _Running:
    """A chain's result while it passes through the layer loop."""

    def __init__(self, outputs: SpanOutputs, inputs: SpanInputs, shape: Sequence[int], columns: Columns) -> None:
        self.routers = dict(zip(outputs.router_blocks, outputs.router_logits, strict=True))
        states = (columns.split(one)[0] for one in (*outputs.hidden_states, outputs.hidden))
        *between, last = (columns.in_streams(one, shape) for one in states)
        self.hidden = [*(between if inputs.collect_hidden else [last] * (len(inputs.blocks) - 1)), last]
        """The output of each block, as far as models go on with it."""
        self.sides = sides = columns.split(outputs.hidden)[1]
        """What has travelled behind the last one."""
        for block in inputs.blocks[1:]:
            if block in columns.gathered:
                self.hidden[block - inputs.blocks.start - 1] = sides[columns.gathered[block]]
        self.first_block = self.next_block = inputs.blocks.start
        self.last: Tensor | None = None
        self.num_changes: int | None = None
        """How often ``last`` had been changed in place when it was handed on."""

    def is_last(self, hidden: Tensor) -> bool:
        """Returns whether a block is given exactly what the one before it returned."""
        return self.last is not None and is_same(hidden, self.last) and num_changes(hidden) == self.num_changes


class RemoteStack:
    """Connects the remote blocks of one model with their swarm."""

    def __init__(
        self,
        *,
        version: ModelVersion,
        num_blocks: int,
        tied: frozenset[int] = NO_TIES,
        local_blocks: tuple[int, int] = (0, 0),
        settings: SwarmSettings | None = None,
        connection: SwarmConnection | None = None,
        model: str | None = None,
    ) -> None:
        self.version = version
        self.model = model
        self.num_blocks = num_blocks
        self.tied = tied
        """Blocks that run on the server of the block before."""
        self.local_blocks = local_blocks
        """How many blocks run here at the start and at the end of the model."""
        self.settings = settings
        self.connection = connection
        self.layers: Sequence[nn.Module] = ()
        """The remote decoder layers."""
        self.config: PreTrainedConfig | None = None
        """Of their decoder."""
        self.num_returned = 0
        """How many values the model expects its layers to return in a tuple; 0: a tensor alone."""
        self.own_cache: str | None = None
        """By which name the decoder takes a cache of its own kind. None: it takes one of transformers."""
        self.called: Sequence[int] = self.blocks
        """The remote blocks that the model calls, in order."""
        self.takes_ids = False
        """Whether layers are given the ids of tokens."""
        self.columns = Columns()
        """What passes between servers."""
        self.routers: Mapping[int, int | None] | None = None
        """The blocks that have router logits; see `SpanInputs`."""
        self.chains = [self.blocks]
        """The blocks that run one after another without coming back here."""
        self._remote: RemoteBlocks | None = None
        self._reader: AdapterReader | None = None
        self._local = threading.local()

    @property
    def remote(self) -> RemoteBlocks:
        """The blocks on the swarm; connects on first use."""
        if self._remote is None:
            if self.connection is None:
                if self.settings is None:
                    raise UnsupportedError("this copy of the model has lost its connection; load the model again")
                self.connection = self.settings.connection()
            # Not through this object, which the helpers must not keep alive.
            open_checkpoint = functools.partial(_open_checkpoint, self.model, self.version)
            config, guard, serve_here = self.connection.config, None, None
            if config.wants_checks(self.connection.initial_peers):
                guard = functools.partial(
                    make_guard, config=config, version=self.version, open_checkpoint=open_checkpoint
                )
            if config.local_fallback:
                serve_here = functools.partial(StandIn, open_checkpoint=open_checkpoint)
            self._remote = self.connection.blocks(
                version=self.version,
                num_blocks=self.num_blocks,
                tied=self.tied,
                model=self.model,
                make_guard=guard,
                serve_here=serve_here,
            )
        return self._remote

    @property
    def blocks(self) -> range:
        """The blocks that run on the swarm."""
        first, last = self.local_blocks
        return range(first, self.num_blocks - last)

    @property
    def is_noting(self) -> bool:
        """Whether the decoder runs in this thread to see what layers are given, not to compute."""
        return getattr(self._local, "noted", None) is not None

    @contextlib.contextmanager
    def noting(self) -> Iterator[dict[int, Arguments]]:
        """Lets all layers note what they are given, in this thread, and return their input."""
        noted: dict[int, Arguments] = {}
        self._local.noted = noted
        try:
            yield noted
        finally:
            self._local.noted = None

    def cut(self, left_out: range) -> None:
        """Ends a chain before some blocks, and begins another one behind them; an empty range leaves none out.

        Raises:
            ConfigError: If the blocks on both sides cannot run apart from each other.
            UnsupportedError: If blocks hand on more than hidden states.
        """
        for border in {left_out.start, left_out.stop} & self.tied:
            raise ConfigError(
                f"nothing can run before block {border}, which uses keys and values, or a choice of tokens, of blocks "
                f"before it: the nearest place is before block {nearest_border(border, self.tied)}"
            )
        if self.columns.carried or self.columns.gathered:
            raise UnsupportedError(
                "nothing can run between the blocks of this model, which hand on more than hidden states: change its "
                "input or output instead"
            )
        parts = [
            part
            for chain in self.chains
            for part in (
                range(chain.start, min(chain.stop, left_out.start)),
                range(max(chain.start, left_out.stop), chain.stop),
            )
        ]
        self.chains = [part for part in parts if part]

    def check(self) -> None:
        """Joins the swarm; raises MissingBlocksError if some remote block has no server."""
        remote = self.remote
        if not remote.connection.config.local_fallback:
            remote.check(self.blocks)

    def watch(self, decoder: nn.Module) -> None:
        """Notes what the decoder, whose layers these are, is called with."""
        self.config = decoder.config  # type: ignore[assignment]
        # Before anything wraps the routers.
        self.routers = router_widths(decoder, dict(zip(self.blocks, self.layers, strict=True)))
        decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        decoder.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._called_with is not None:
            self._leave(decoder, (), None)  # Ctrl-C ended the call before, and torch then skips the hooks
        # With it, some families go on between two layers with the last tokens only; their heads cut again.
        kwargs = {name: value for name, value in kwargs.items() if name != "logits_to_keep"}
        self._local.called_with = called_with = by_name(type(decoder), args, kwargs)
        self._local.decoder = decoder
        if self.own_cache is not None:
            self._local.swap = swap = CacheSwap(self.own_cache, called_with, decoder)
            self._local.called_with = swap.called_with
            return (), swap.without
        return args, kwargs

    def _leave(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        called_with, running = self._called_with or {}, getattr(self._local, "running", None)
        swap: CacheSwap | None = getattr(self._local, "swap", None)
        self._local.called_with = self._local.running = self._local.decoder = self._local.swap = None
        cache = next((value for value in called_with.values() if isinstance(value, Cache)), None)
        if output is None and cache is not None:  # it has raised
            note_failure(cache)
        if output is not None and running is not None:
            raise UnsupportedError(
                f"the model ended before block {running.next_block} of a chain that runs as one: set num_hidden_layers "
                f"to {self.num_blocks} again, and leave assistant_early_exit out"
            )
        return output if swap is None else swap.put_into(output)

    def run_block(self, index: int, hidden: Tensor, cache: Cache | None, arguments: Arguments) -> Any:
        """Returns the output of one block; the first of a pass runs them all.

        Args:
            index: Of the block.
            hidden: Its input.
            cache: That it was called with.
            arguments: Others; those with a name count if it was called alone, not by its decoder.

        Raises:
            UnsupportedError: If hidden states were changed between blocks, or servers cannot return what is wanted.
        """
        noted: dict[int, Arguments] | None = getattr(self._local, "noted", None)
        if noted is not None:
            noted[index] = arguments
            return hidden
        running: _Running | None = getattr(self._local, "running", None)
        if running is not None and running.next_block == index:
            if not running.is_last(hidden):
                self._local.running = None
                raise UnsupportedError(
                    f"the hidden states were changed between remote blocks {index - 1} and {index} (by a hook?), which "
                    "run as one chain: use swarm_plugins.insert_module, which ends the chain there"
                )
        else:
            alone = range(index, index + 1)
            blocks = next((chain for chain in self.chains if index == self._next_called(chain.start)), alone)
            named = {name: value for name, value in arguments.items() if isinstance(name, str)}
            swap: CacheSwap | None = getattr(self._local, "swap", None)
            carried = self._carried(arguments) if index else []
            running = self._run(blocks, hidden, swap.cache if swap else cache, self._called_with or named, carried)
        return self._hand_on(running, index)

    def _next_called(self, index: int) -> int:
        """Returns the first block from one on that the model calls."""
        return next((block for block in self.called if block >= index), self.num_blocks)

    def _carried(self, arguments: Arguments) -> list[Tensor]:
        """Returns what the layer before a remote block has handed on to it."""
        found = [arguments.get(key) for key in self.columns.carried]
        if any(one is None for one in found):
            raise UnsupportedError("a block of this model was called alone, but takes what the one before hands on")
        return cast("list[Tensor]", found)

    def _hand_on(self, running: _Running, index: int) -> Any:
        collector = _active_collector.get()
        if collector is not None and "router_logits" in collector and index in running.routers:
            collector["router_logits"].append(running.routers[index])
        running.last = running.hidden[index - running.first_block]
        running.num_changes = num_changes(running.last)
        running.next_block = self._next_called(index + 1)
        if running.next_block - running.first_block < len(running.hidden):
            self._local.running = running
            return running.last
        self._local.running = None
        returned = as_returned(running.last, self.num_returned)
        return self.columns.handed_on(returned, running.sides) if self.columns.carried else returned

    def _run(
        self,
        blocks: range,
        hidden: Tensor,
        cache: Cache | None,
        called_with: dict[str, Any],
        carried: Sequence[Tensor],
    ) -> _Running:
        self._local.running = None
        collector = _active_collector.get() or {}
        if "attentions" in collector or self._wants("output_attentions", called_with):
            raise UnsupportedError(
                "output_attentions=True cannot work on remote blocks: attention weights stay on servers"
            )
        if "hidden_states" in collector and not all(layer._forward_hooks for layer in self.layers):
            raise UnsupportedError(
                "output_hidden_states=True cannot work on this model, which collects them inside of blocks that are on "
                "servers: leave it out"
            )
        shape, hidden = hidden.shape, self.columns.flat(hidden)
        hidden = self.columns.join(hidden, self._further(hidden, carried))
        arguments = read_arguments(hidden, called_with, cache, has_side_inputs=bool(self.columns.shapes))
        if cache is not None and blocks not in self.chains:
            raise UnsupportedError(f"block {blocks.start} was called alone with a cache; call the whole model")
        if self._reader is None:
            self._reader = AdapterReader(self.layers, first=self.blocks.start)
        use = self._reader.select(structure_version(), blocks, hidden.shape[0])
        offsets = self._reader.offsets
        if offsets is not None and cache is None:
            use = use.with_starts(offsets, 0, hidden.shape[1])
        wants_hidden = "hidden_states" in collector or self._wants("output_hidden_states", called_with)
        seen = self._seen_by_hooks(blocks)
        inputs = SpanInputs(
            blocks=blocks,
            # Copied from an accelerator once, not once per server; a replay does not hold memory there.
            hidden=hidden.cpu(),
            position_ids=arguments.position_ids,
            attention_mask=arguments.attention_mask,
            layer_masks=arguments.layer_masks,
            token_ids=read_ids(self._called_with or {}) if self.takes_ids else None,
            adapters=use,
            collect_hidden=(wants_hidden or bool(seen)) and len(blocks) > 1,
            hidden_of=outputs_wanted(collector, seen, wants_hidden=wants_hidden) if cache is not None else None,
            collect_router="router_logits" in collector,
            whole_beyond=whole_beyond(self.config),
            routers=self.routers,
        )
        if cache is None:
            outputs = self.remote.forward(inputs)
        else:
            # Of several chains, the first may need no gradient where a later one does.
            is_training = len(self.chains) > 1 and torch.is_grad_enabled()
            outputs = run_cached(self.remote, inputs, cache, offsets, is_training=is_training)
        outputs = outputs.map(lambda tensor: tensor.to(hidden.device))
        return _Running(outputs.map(counted) if seen else outputs, inputs, shape, self.columns)

    def _seen_by_hooks(self, blocks: range) -> frozenset[int]:
        """Returns the blocks of a chain, except the last, whose outputs users' hooks see."""
        called = [block for block in self.called if block in blocks]
        return seen_by_hooks(called, [self.layers[block - self.blocks.start] for block in called])

    def _further(self, hidden: Tensor, carried: Sequence[Tensor]) -> list[Tensor]:
        """Returns what layers take besides hidden states, given what a layer before has handed on.

        The first layer is called with its own alone: the decoder runs a second time, over layers that do nothing.
        """
        if not self.columns.taken:
            return self.columns.collect({}, hidden, carried)
        decoder: nn.Module | None = getattr(self._local, "decoder", None)
        if decoder is None:
            raise UnsupportedError("a block of this model was called alone, but blocks share inputs: call its decoder")
        with self.noting() as noted:
            decoder.forward(**self._called_with or {})
        return self.columns.collect(noted, hidden, carried)

    @property
    def _called_with(self) -> dict[str, Any] | None:
        """What the decoder runs on in this thread."""
        found: dict[str, Any] | None = getattr(self._local, "called_with", None)
        return found

    def _wants(self, option: str, called_with: dict[str, Any]) -> bool:
        """Returns whether a decoder of the older kind, which collects outputs itself, is asked for some."""
        asked = called_with.get(option)
        return bool(getattr(self.config, option, False) if asked is None else asked)

    def __getstate__(self) -> dict[str, Any]:
        """Drops live handles, which are recreated on first use."""
        kept = dict(self.__dict__)
        kept.update(connection=None, _remote=None, _reader=None, _local=None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteStack:
        twin = copy.copy(self)  # without live handles
        memo[id(self)] = twin
        twin.connection = self.connection
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin


def _open_checkpoint(model: str | None, version: ModelVersion) -> Checkpoint:
    """Opens a model's checkpoint again, to compute blocks here."""
    is_local = version.revision.startswith("local-")
    return Checkpoint.open(model or version.name, revision=None if is_local else version.revision)
