"""What is in force while a call runs, and how calls nest.

A decode step may run in the middle of a training forward or backward of the same model, in the same thread. So
everything that a call changes about the model (which blocks run, the attention implementation, patched modules) is
listed in a `Call`, entered and left as a whole, and what was in force before comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from swarm_plugins.blocks.layers import BlockList

__all__ = ["Call", "CallStack"]


@dataclass(kw_only=True)
class Call:
    """What one call changes about the model."""

    table: Sequence[Any]
    """What stands at each place of the layer list."""
    attention: str
    """Name of the attention implementation."""
    patches: Mapping[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    """Modules whose forward is replaced."""
    router_logits: dict[int, Tensor] | None = None
    """Collects router logits by block; None: not wanted."""
    between: list[Tensor] | None = None
    """Collects the blocks' outputs; None: not wanted."""


class CallStack:
    """Puts calls in force, one inside another.

    Args:
        layers: The model's layer list.
        config: The config that its modules read the attention implementation from.
    """

    def __init__(self, layers: BlockList, config: PreTrainedConfig) -> None:
        self._layers = layers
        self._config = config
        self._idle_attention: str = config._attn_implementation
        self.current: Call | None = None

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """Puts a call in force."""
        outer = self.current
        self._replace(outer, call)
        try:
            yield
        finally:
            self._replace(call, outer)

    def _replace(self, old: Call | None, new: Call | None) -> None:
        if old is not None:
            for module in old.patches:
                module.__dict__.pop("forward", None)
        self.current = new
        self._layers.set_active(None if new is None else new.table)
        attention = self._idle_attention if new is None else new.attention
        if self._config._attn_implementation != attention:
            self._config._attn_implementation = attention
        if new is not None:
            for module, forward in new.patches.items():
                # An instance's attribute hides the class's method; past nn.Module's attribute hook, for speed.
                module.__dict__["forward"] = forward
