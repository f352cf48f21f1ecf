"""Decoder layers that run on the swarm, and those beside them that run here."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's output; hooks see it unless the decoder only notes what layers are given."""
        return (self.forward if self.swarm_stack.is_noting else super().__call__)(*args, **kwargs)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's output, `[batch, length, width]`."""
        # Not by name: some families call it `layer_past`, and without it every token would be the first.
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        output: Any = self.swarm_stack.run_block(self.swarm_index, hidden_states, cache, arguments_of(args, kwargs))
        return output if isinstance(output, tuple) else as_returned(output, self.swarm_stack.num_returned)


class LocalDecoderLayer(nn.Module):
    """Mixin placed before a decoder layer's class: it runs, unless its decoder only notes what layers are given."""

    swarm_stack: RemoteStack
    swarm_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's output."""
        if self.swarm_stack.is_noting:
            return RemoteDecoderLayer.forward(self, *args, **kwargs)  # type: ignore[arg-type]  # alike
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles by the original class: a dynamic subclass cannot be found by name."""
        return _rebuilt, (type(self).__mro__[2],), self.__dict__


def _rebuilt(original: type[nn.Module]) -> nn.Module:
    cls = _local_class(original)  # type: ignore[arg-type]  # classes are hashable
    return cls.__new__(cls)


@functools.cache
def _local_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"Local{original.__name__}", (LocalDecoderLayer, original), {"__doc__": original.__doc__})


def make_remote(layers: nn.ModuleList, stack: RemoteStack, device: str) -> None:
    """Converts the decoder layers that run on the swarm, in place, and those beside them."""
    remote = [layers[index] for index in stack.blocks]
    for index, layer in zip(stack.blocks, remote, strict=True):
        turn_into_stand_ins(layer, device)
        original: type[nn.Module] = layer._stand_in_of[1]  # type: ignore[index,assignment]
        layer.__class__ = stand_in_class(original, RemoteDecoderLayer)  # type: ignore[arg-type]
        layer.swarm_stack = stack  # type: ignore[assignment]
        layer.swarm_index = index  # type: ignore[assignment]
    stack.layers = remote
    for index, layer in enumerate(layers):
        if index not in stack.blocks:
            layer.__class__ = _local_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
            layer.swarm_stack = stack  # type: ignore[assignment]
            layer.swarm_index = index  # type: ignore[assignment]
