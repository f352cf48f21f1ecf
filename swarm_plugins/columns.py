"""The one tensor that travels between servers: hidden states and, in further columns, what layers take besides.

Some layers take what a model makes of its embeddings: an input for each layer (Gemma 3n, Gemma 4), or the embeddings
again (Zamba). Only the client can make these *side inputs*. They travel behind the hidden states, and each server hands
them on as they came, so the gradient that comes back to the client is the sum over all servers.

What a layer hands on to the next one in the same way, such as the state of Zaya's routers, is *carried*: it travels in
columns as well, which are zero before the first block, and each server puts its own in the place of what came.

Some models hand what certain layers get to all later layers, next to each other, and go on with it behind the last one
(Inkling 2). These hidden states are *gathered* on the way, and travel like what is carried.

Client and servers find the same columns by themselves: both run the family's own forward over layers that do nothing,
and see with what they are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.block_io import is_same

Arguments = Mapping[int | str, Any]
"""What a layer is called with behind its hidden states, by position or by name."""


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns the arguments of a call."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs.items())
    return arguments


@dataclass(frozen=True)
class Columns:
    """How the tensor between servers, ``[B, S, D]``, is made of hidden states and side inputs."""

    are_streams_first: bool = False
    """Whether a model keeps streams of hidden states as ``[streams, B, S, width]``, not ``[B, S, streams, width]``."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of what is carried and of each side input, behind ``[B, S]``."""
    taken: Mapping[int, Mapping[int | str, int]] = field(default_factory=dict)
    """By block and argument: which side input it is."""
    carried: Mapping[int | str, int] = field(default_factory=dict)
    """By argument of each layer but the first: the place of it in what the layer before returns. The first shapes."""
    gathered: Mapping[int, int] = field(default_factory=dict)
    """By block: which column its input travels in, where the model itself makes later blocks' arguments of it."""

    @property
    def width(self) -> int:
        """Columns behind the hidden states."""
        return sum(math.prod(shape) for shape in self.shapes)

    def flat(self, hidden: Tensor) -> Tensor:
        """Returns hidden states of a model, whose streams stand next to each other then, ``[B, S, D]``."""
        if hidden.ndim == 3:
            return hidden
        return (hidden.movedim(0, 2) if self.are_streams_first else hidden).flatten(2)

    def in_streams(self, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns hidden states, ``[B, S, D]``, as a model has them whose own are of this shape."""
        if len(shape) == 3:
            return hidden
        own = (shape[0], *shape[3:]) if self.are_streams_first else tuple(shape[2:])
        streams: Tensor = hidden.unflatten(2, own)
        return streams.movedim(2, 0) if self.are_streams_first else streams

    def join(self, hidden: Tensor, sides: Sequence[Tensor]) -> Tensor:
        """Returns the tensor that travels, given hidden states ``[B, S, D]``."""
        if not sides:
            return hidden
        return torch.cat([hidden, *(one.flatten(2).to(hidden) for one in sides)], dim=2)

    def split(self, joined: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns hidden states, ``[B, S, D]``, and side inputs of a tensor that has travelled."""
        if not self.shapes:
            return joined, []
        sizes = [math.prod(shape) for shape in self.shapes]
        hidden, *sides = joined.split([joined.shape[2] - sum(sizes), *sizes], dim=2)
        return hidden, [one.unflatten(2, shape) for one, shape in zip(sides, self.shapes, strict=True)]

    def given(self, block: int, sides: Sequence[Tensor], *, is_entry: bool = False) -> dict[int | str, Tensor]:
        """Returns the arguments of a block that have travelled; what is carried only to the first one of a server."""
        carried = self.carried if is_entry and block else ()
        found = dict(zip(carried, sides, strict=False))
        return found | {key: sides[index] for key, index in self.taken.get(block, {}).items()}

    def returned(self, hidden: Tensor, arguments: Arguments) -> dict[int, Tensor]:
        """Returns what a layer has returned, by place, given what the next one is called with."""
        return {0: hidden, **{place: arguments[key] for key, place in self.carried.items()}}

    def after(self, returned: Any, sides: Sequence[Tensor]) -> Tensor:
        """Returns the tensor that travels on behind a layer that has returned this."""
        hidden = returned if isinstance(returned, Tensor) else returned[0]
        carried = [returned[place] for place in self.carried.values()]
        return self.join(self.flat(hidden), [*carried, *sides[len(carried) :]])

    def handed_on(self, returned: tuple[Any, ...], sides: Sequence[Tensor]) -> tuple[Any, ...]:
        """Returns what a layer returns with what is carried in its places, given what has travelled."""
        places = dict(zip(self.carried.values(), sides, strict=False))
        return tuple(places.get(place, one) for place, one in enumerate(returned))

    def collect(self, calls: Mapping[int, Arguments], hidden: Tensor, carried: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns what travels behind the hidden states, given the arguments of all blocks.

        ``carried`` is what the block before has handed on; zeros, if there is none.

        Raises:
            KeyError: If a block, or an argument, was not given.
        """
        sides = {index: calls[block][key] for block, keys in self.taken.items() for key, index in keys.items()}
        sides |= dict(enumerate(carried))
        return [
            sides[index] if index in sides else hidden.new_zeros(*hidden.shape[:2], *shape)
            for index, shape in enumerate(self.shapes)
        ]

    def with_carried(self, carried: Mapping[int | str, int], shapes: Sequence[tuple[int, ...]]) -> Columns:
        """Returns the columns for layers that hand on more, of these shapes."""
        taken = {
            block: {key: index + len(carried) for key, index in keys.items()} for block, keys in self.taken.items()
        }
        gathered = {block: index + len(carried) for block, index in self.gathered.items()}
        return replace(self, carried=carried, shapes=(*shapes, *self.shapes), taken=taken, gathered=gathered)


def find_columns(
    tokens: Sequence[int],
    inputs: Mapping[int, Tensor],
    calls: Mapping[int, Arguments],
    is_side: Callable[[int, int | str, Tensor], bool],
) -> Columns:
    """Finds out how a model calls its layers.

    Args:
        tokens: Rows and tokens that it is given, of different numbers.
        inputs: The hidden states that each layer gets, other ones each.
        calls: The arguments of each layer.
        is_side: Whether an argument is made of embeddings.
    """
    found: list[Tensor] = []
    taken: dict[int, dict[int | str, int]] = {}
    gathered: set[int] = set()
    for block, arguments in calls.items():
        for key, value in arguments.items():
            is_like = isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == tuple(tokens)
            if not is_like or not is_side(block, key, value):
                continue
            if blocks := _gathered(value, inputs):
                # The last one's input shows in no argument, but may be needed behind it.
                gathered |= {*blocks, max(calls)}
                continue
            index = next((index for index, one in enumerate(found) if is_same(one, value)), len(found))
            found[index:] = found[index:] or [value]
            taken.setdefault(block, {})[key] = index
    first = inputs[min(inputs)]
    return Columns(
        are_streams_first=tuple(first.shape[:2]) != tuple(tokens),
        shapes=tuple(tuple(one.shape[2:]) for one in (*found, *[first] * len(gathered))),
        taken=taken,
        gathered={block: index for index, block in enumerate(sorted(gathered), len(found))},
    )


def _gathered(value: Tensor, inputs: Mapping[int, Tensor]) -> list[int]:
    """Returns the blocks of whose inputs, ``[B, S, D]``, an argument is made, ``[B, S, blocks, D]``; else none."""
    parts = value.unbind(2) if value.ndim == 4 else ()
    found = [[block for block, one in inputs.items() if _is_equal(part, one)] for part in parts]
    return [blocks[0] for blocks in found] if all(found) else []


def _is_equal(one: Tensor, two: Tensor) -> bool:
    # What is made of absent embeddings is NaN.
    return one.shape == two.shape and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


def find_carried(handed: Sequence[Tensor], arguments: Arguments) -> dict[int | str, int]:
    """Returns which of the values that a layer has returned behind its hidden states the next one is called with."""
    return {key: place for place, one in enumerate(handed, 1) for key, value in arguments.items() if value is one}
