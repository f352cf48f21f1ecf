"""All remote blocks of one model: the first one called runs the whole chain, the others hand its result on.

transformers calls decoder layers one after the other; a request for each would cost a round trip for each. So the
first block sends the hidden states through all spans and returns the result; the following blocks recognise that
very tensor and return it (or their own output, when every block's hidden states are wanted).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from swarm_plugins.backbone.adapters import AdapterReader
from swarm_plugins.backbone.arguments import read_arguments
from swarm_plugins.backbone.cache import RemoteCacheState, adopt_cache
from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.backbone.standin import structure_version
from swarm_plugins.client.adapters import AdapterSelection
from swarm_plugins.client.chain_call import BlockInputs, BlockOutputs
from swarm_plugins.client.connection import RemoteBlocks, SwarmConnection, connect
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.versions import ModelVersion

__all__ = ["RemoteStack"]


class _Running:
    """A chain's result on its way through the layer loop."""

    def __init__(self, outputs: BlockOutputs, num_blocks: int, *, collected: bool) -> None:
        routers = dict(zip(outputs.router_blocks, outputs.router_logits, strict=True))
        hidden = [*outputs.hidden_states, outputs.hidden] if collected else [outputs.hidden] * num_blocks
        self.hidden = hidden
        """What each block returns."""
        self.routers = routers
        self.next_block = 0
        self.last: Tensor | None = None


class RemoteStack:
    """Connects the remote blocks of one model with their swarm.

    Args:
        version: The model version that servers must serve.
        num_blocks: Blocks of the model.
        settings: Which swarm. None when a connection is given.
        connection: A connection of one's own (an in-process transport, say).
        model: The model's directory or id, as its user wrote it; for messages.
    """

    def __init__(
        self,
        *,
        version: ModelVersion,
        num_blocks: int,
        settings: SwarmSettings | None = None,
        connection: SwarmConnection | None = None,
        model: str | None = None,
    ) -> None:
        self.version = version
        self.model = model
        self.num_blocks = num_blocks
        self.settings = settings
        self.connection = connection
        self.layers: Sequence[nn.Module] = ()
        self.in_tuple = False
        """Whether the model's loop expects layers to return a tuple."""
        self._remote: RemoteBlocks | None = None
        self._reader: AdapterReader | None = None
        self._local = threading.local()

    @property
    def remote(self) -> RemoteBlocks:
        """The blocks on the swarm; connects at the first use."""
        if self._remote is None:
            if self.connection is None:
                if self.settings is None:
                    raise UnsupportedError("this copy of the model has lost its connection; load the model again")
                self.connection = connect(self.settings.initial_peers, self.settings.config)
            self._remote = self.connection.blocks(version=self.version, num_blocks=self.num_blocks, model=self.model)
        return self._remote

    def check(self) -> None:
        """Joins the swarm and looks for a chain that covers all blocks.

        Raises:
            TransportError: If the swarm cannot be joined.
            MissingBlocksError: If some block has no living server.
        """
        self.remote.check()

    def run_block(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Returns the output of one block; the first of a pass runs them all.

        Raises:
            UnsupportedError: If hidden states were changed between blocks, or something is asked for that servers
                cannot give.
        """
        running: _Running | None = getattr(self._local, "running", None)
        if running is not None and running.next_block == index:
            if hidden is not running.last:
                self._local.running = None
                raise UnsupportedError(
                    f"the hidden states were changed between remote blocks {index - 1} and {index} (by a hook?); "
                    "remote blocks run as one chain, so change their input or output instead"
                )
        elif index == 0:
            running = self._run(range(self.num_blocks), hidden, kwargs)
        else:
            running = self._run(range(index, index + 1), hidden, kwargs)
        return self._hand_on(running, index)

    def _hand_on(self, running: _Running, index: int) -> Tensor:
        collector = _active_collector.get()
        if collector is not None and "router_logits" in collector and index in running.routers:
            collector["router_logits"].append(running.routers[index])
        running.last = running.hidden[running.next_block if len(running.hidden) > 1 else 0]
        running.next_block = index + 1
        self._local.running = running if index + 1 < self.num_blocks and len(running.hidden) > 1 else None
        return running.last

    def _run(self, blocks: range, hidden: Tensor, kwargs: dict[str, Any]) -> _Running:
        self._local.running = None
        collector = _active_collector.get() or {}
        if "attentions" in collector:
            raise UnsupportedError(
                "output_attentions=True cannot work on remote blocks: attention weights stay on servers"
            )
        arguments = read_arguments(hidden, kwargs)
        if arguments.cache is not None and len(blocks) < self.num_blocks:
            raise UnsupportedError(f"block {blocks.start} was called alone with a cache; call the whole model")
        inputs = BlockInputs(
            # What is sent leaves an accelerator once here, and not once for each server, nor waits there for a replay.
            hidden=hidden.cpu(),
            position_ids=arguments.position_ids,
            attention_mask=arguments.attention_mask,
            adapters=self._adapters(blocks, hidden.shape[0]),
            collect_hidden="hidden_states" in collector and len(blocks) > 1,
            collect_router="router_logits" in collector,
        )
        cache = arguments.cache
        state = adopt_cache(cache, self.remote, self.num_blocks) if cache is not None else None
        outputs = _moved(self._forward(inputs, blocks, state), hidden.device)
        return _Running(outputs, len(blocks), collected=inputs.collect_hidden)

    def _forward(self, inputs: BlockInputs, blocks: range, state: RemoteCacheState | None) -> BlockOutputs:
        if state is None:
            return self.remote.forward(inputs, blocks)
        tensors = (inputs.hidden, *inputs.adapters.tensors, *state.prefix)
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return state.step(inputs)
        if not state.is_untouched:
            raise UnsupportedError(
                "gradients cannot flow through a KV cache that lives on servers; run under torch.no_grad(), "
                "or pass the whole sequence with use_cache=False"
            )
        with_prefix = BlockInputs(**{**vars(inputs), "prefix": state.prefix})
        outputs = self.remote.forward(with_prefix, blocks)
        state.owe(inputs)
        return outputs

    def _adapters(self, blocks: range, batch_size: int) -> AdapterSelection:
        if self._reader is None:
            self._reader = AdapterReader(self.layers)
        return self._reader.select(structure_version(), blocks, batch_size)

    def __getstate__(self) -> dict[str, Any]:
        """Live handles are dropped; they are made again at the first use."""
        kept = dict(self.__dict__)
        kept.update(connection=None, _remote=None, _reader=None, _local=None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteStack:
        twin = RemoteStack(
            version=self.version,
            num_blocks=self.num_blocks,
            settings=self.settings,
            connection=self.connection,
            model=self.model,
        )
        memo[id(self)] = twin
        twin.in_tuple = self.in_tuple
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin


def _moved(outputs: BlockOutputs, device: torch.device) -> BlockOutputs:
    return BlockOutputs(
        hidden=outputs.hidden.to(device),
        hidden_states=[hidden.to(device) for hidden in outputs.hidden_states],
        router_logits=[logits.to(device) for logits in outputs.router_logits],
        router_blocks=outputs.router_blocks,
    )
