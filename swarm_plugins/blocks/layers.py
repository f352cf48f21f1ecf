"""The layer list of a span's model: the full number of entries, of which a call runs some and skips the others.

A span runs HF's own forward of the base model, so the list has to look complete to it; blocks that the span does not
hold, or that a call does not ask for, hand the hidden states through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["BlockList", "Passing", "SkippedBlock", "Watched"]


class BlockList(nn.ModuleList):
    """A layer list that yields, while a call runs, what the call wants to be run."""

    active: Sequence[Any] | None = None
    """One callable for each layer; None: the layers themselves."""

    def set_active(self, active: Sequence[Any] | None) -> None:
        """Sets what iteration and slices yield."""
        # Past nn.Module's attribute hook, which costs more than everything else of a call's set-up.
        self.__dict__["active"] = active

    def __iter__(self) -> Iterator[Any]:
        """Iterates over what a call runs."""
        return super().__iter__() if self.active is None else iter(self.active)

    def __getitem__(self, index: Any) -> Any:
        """Returns what a call runs at an index, or in a slice."""
        return super().__getitem__(index) if self.active is None else self.active[index]


class Passing(nn.Module):
    """Stands in the layer list for a block that this span does not hold.

    Args:
        original: The block; its plain attributes are kept, since some models read them (an attention type).
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns its input."""
        return hidden_states


class SkippedBlock:
    """Stands for a block in one call: hands the hidden states on, in the form in which the model's layers do.

    Args:
        original: The block, or what stands for it; its attributes are forwarded.
        in_tuple: Whether the model's layers return a tuple.
    """

    def __init__(self, original: nn.Module, in_tuple: bool) -> None:
        self._original = original
        self._in_tuple = in_tuple

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """Hands the hidden states on."""
        return (hidden_states,) if self._in_tuple else hidden_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Watched:
    """A block whose output somebody wants to see.

    Args:
        layer: The block.
        block: Its global index.
        seen: Called with the index and the output.
    """

    def __init__(self, layer: nn.Module, block: int, seen: Callable[[int, Tensor], None]) -> None:
        self._layer = layer
        self._block = block
        self._seen = seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block and shows its output."""
        output = self._layer(*args, **kwargs)
        self._seen(self._block, output[0] if isinstance(output, tuple) else output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
