"""Decoder layers that run on the swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from swarm_plugins.backbone.standin import stand_in_class, turn_into_stand_ins
from swarm_plugins.block_io import as_returned
from swarm_plugins.columns import arguments_of

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack


class RemoteDecoderLayer(nn.Module):
    """Mixin placed before a decoder layer's class: its forward calls the stack, its children never run."""

    swarm_stack: RemoteStack
    swarm_index: int

    @property
    def gradient_checkpointing(self) -> bool:
        """Always off: servers keep what they need or recompute it; PEFT's hooks would change hidden states."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        """Ignores what transformers sets on each layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's output, `[batch, length, width]`."""
        # Not by name: some families call it `layer_past`, and without it every token would be the first.
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        output: Any = self.swarm_stack.run_block(self.swarm_index, hidden_states, cache, arguments_of(args, kwargs))
        return output if isinstance(output, tuple) else as_returned(output, self.swarm_stack.num_returned)


def make_remote(layers: nn.ModuleList, stack: RemoteStack, device: str) -> None:
    """Converts the decoder layers that run on the swarm, in place."""
    remote = [layers[index] for index in stack.blocks]
    for index, layer in zip(stack.blocks, remote, strict=True):
        turn_into_stand_ins(layer, device)
        original: type[nn.Module] = layer._stand_in_of[1]  # type: ignore[index,assignment]
        layer.__class__ = stand_in_class(original, RemoteDecoderLayer)  # type: ignore[arg-type]
        layer.swarm_stack = stack  # type: ignore[assignment]
        layer.swarm_index = index  # type: ignore[assignment]
    stack.layers = remote
