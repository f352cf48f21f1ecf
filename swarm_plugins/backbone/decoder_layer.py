"""Decoder layers that run on the swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from swarm_plugins.backbone.arguments import by_name
from swarm_plugins.backbone.standin import stand_in_class, turn_into_stand_ins

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

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """Returns the block's output, `[batch, length, width]`."""
        if args:
            # A few families pass the mask by position.
            original: type[nn.Module] = self._stand_in_of[1]  # type: ignore[index,assignment]
            kwargs = by_name(original, args, kwargs)
        output = self.swarm_stack.run_block(self.swarm_index, hidden_states, kwargs)
        return (output,) if self.swarm_stack.in_tuple else output


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
