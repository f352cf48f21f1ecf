"""What a call changes about a model, and how calls nest.

A span runs HF's own forward of the base model, so the layer list keeps its full number of entries: blocks that the
span does not hold, or that a call skips, pass the hidden states through.

A decode step may run in the middle of a training forward or backward of the same model, in the same thread. So
everything that a call changes (which blocks run, the attention implementation, patched modules) is listed in a `Call`,
entered and left as a whole; what was in force before comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from swarm_plugins.block_io import SpanOutputs, as_returned
from swarm_plugins.columns import Arguments, arguments_of


class BlockList(nn.ModuleList):
    """A layer list that yields the running call's table instead of its own layers."""

    active: Sequence[Any] | None = None
    """One callable for each layer; None: the layers themselves."""

    def set_active(self, active: Sequence[Any] | None) -> None:
        """Sets the table that iteration and slices yield."""
        # Bypasses nn.Module's attribute hook, which costs more than the rest of a call's set-up.
        self.__dict__["active"] = active

    def __iter__(self) -> Iterator[Any]:
        """Iterates over what a call runs."""
        return super().__iter__() if self.active is None else iter(self.active)

    def __getitem__(self, index: Any) -> Any:
        """Returns what a call runs at an index, or in a slice."""
        return super().__getitem__(index) if self.active is None else self.active[index]


class Passing(nn.Module):
    """Replaces a block outside the span; has its attributes, which some models read, but none of its weights."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Not as a module of this one: it is not to be loaded or moved. Its weights have no memory.
        self.__dict__["original"] = original.to("meta")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns its input."""
        return hidden_states


class SkippedBlock:
    """Replaces a block in one call: passes the hidden states on in the form that the model's layers return."""

    def __init__(self, original: nn.Module, num_returned: int, handed: int | str | None = None) -> None:
        self._original = original
        self._num_returned = num_returned
        self._handed = handed
        """The argument that layers return behind hidden states."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Passes the hidden states on."""
        returned = as_returned(hidden_states, self._num_returned)
        if self._handed is None or self._num_returned < 2:
            return returned
        return (hidden_states, arguments_of(args, kwargs).get(self._handed), *returned[2:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Entry:
    """The first block of a call: runs on the hidden states that came, whatever the model made before it."""

    def __init__(self, layer: Callable[..., Any], came: Callable[[Sequence[int]], Tensor]) -> None:
        self._layer = layer
        self._came = came
        """Returns the hidden states that came, in the shape of the model's own."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the block."""
        return self._layer(self._came(hidden_states.shape), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class Given:
    """A block that gets some arguments from the client, whatever the model made for it."""

    def __init__(self, layer: Callable[..., Any], given: Mapping[int | str, Tensor]) -> None:
        self._layer = layer
        self._given = given

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the block."""
        by_name = {name: self._given.get(name, value) for name, value in kwargs.items()}
        by_place = (self._given.get(place, value) for place, value in enumerate(args))
        return self._layer(hidden_states, *by_place, **by_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class Gathered:
    """A block whose input the model itself hands to later ones: what came goes into the model's own tensor."""

    def __init__(self, layer: Callable[..., Any], came: Tensor) -> None:
        self._layer = layer
        self._came = came

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the block."""
        return self._layer(hidden_states.copy_(self._came), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class Exit:
    """The skipped block behind the last one of a call: reports to ``seen`` what it is called with.

    So what a model computes between two blocks is computed with the one before. Also a block whose input is gathered.
    """

    def __init__(self, skipped: Callable[..., Any], seen: Callable[[Tensor, Arguments], None]) -> None:
        self._skipped = skipped
        self._seen = seen

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Reports its input, and passes it on."""
        self._seen(hidden_states, arguments_of(args, kwargs))
        return self._skipped(hidden_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._skipped, name)


class Watched:
    """A block that reports to ``seen`` what it returns."""

    def __init__(self, layer: Callable[..., Any], seen: Callable[[Any], None]) -> None:
        self._layer = layer
        self._seen = seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block and reports what it returns."""
        output = self._layer(*args, **kwargs)
        self._seen(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@dataclass(kw_only=True)
class Call:
    """What one call changes about the model."""

    blocks: range
    """The blocks that it runs."""
    table: Sequence[Any]
    """One callable for each layer."""
    attention: str
    """Name of the attention implementation."""
    patches: Mapping[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    """Modules whose forward is replaced."""
    router_logits: dict[int, Tensor] | None = None
    """Collects router logits by block. None: not wanted."""
    between: list[Tensor] | None = None
    """Collects the outputs between the blocks. None: not wanted."""

    def outputs(self, hidden: Tensor) -> SpanOutputs:
        """Returns everything that was collected, with the last hidden states."""
        routers = self.router_logits or {}
        return SpanOutputs(
            hidden=hidden,
            hidden_states=tuple(self.between or ()),
            router_logits=tuple(routers.values()),
            router_blocks=tuple(routers),
        )


class CallStack:
    """Enters calls, one inside another."""

    def __init__(self, layers: BlockList, config: PreTrainedConfig) -> None:
        self._layers = layers
        self.config = config
        self._idle_attention: str = config._attn_implementation
        self._attention = self._idle_attention
        self.current: Call | None = None

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """Enters a call; restores the outer one at the end."""
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
        if self._attention != attention:
            self.config._attn_implementation = self._attention = attention
        if new is not None:
            for module, forward in new.patches.items():
                # Hides the class's method; bypasses nn.Module's attribute hook for speed.
                module.__dict__["forward"] = forward
