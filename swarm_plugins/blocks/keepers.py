"""States that a family keeps by means of its own.

Some keep them in an object that the model's forward makes and returns (RWKV, xLSTM), some in a class of caches derived
from transformers' own (MiniMax), some on their modules (RecurrentGemma). Before a step a *keeper* puts a session's
states where the family looks for them; after it, it takes them out again, as one tensor ``[B, ...]`` for each place and
block. Always as copies: such families write in place. So a session's cache treats them like any other state.

`probing.keeping` finds out which kind a model needs, and its places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from swarm_plugins.blocks.past import Past, StatefulPast

Path = tuple[Any, ...]


class Place(NamedTuple):
    """Where a state of one block is."""

    path: Path
    """Keys and indices that lead there."""
    rows: int
    """The dimension of the batch."""
    layers: int | None = None
    """The dimension with an entry for each layer of the model. None: the tensor is the block's alone."""

    def of(self, whole: Tensor, block: int) -> Tensor:
        """Returns a block's part of the tensor at this place, a view ``[B, ...]``."""
        rows = self.rows
        if self.layers is not None:
            whole, rows = whole.select(self.layers, block), rows - (rows > self.layers)
        return whole.movedim(rows, 0)


Places = Mapping[int, Sequence[Place]]
"""By block."""


def leaves(kept: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Iterates over the tensors in nested containers, with the path to each."""
    if isinstance(kept, Tensor):
        yield path, kept
    elif isinstance(kept, Mapping):
        for key, value in kept.items():
            yield from leaves(value, (*path, key))
    elif isinstance(kept, (list, tuple)):
        for index, value in enumerate(kept):
            yield from leaves(value, (*path, index))


def attributes(kept: Any) -> Any:
    """Returns the containers of an object: itself, or its attributes."""
    return kept if isinstance(kept, (list, tuple, Mapping)) else vars(kept)


class Keeper:
    """Puts states in place and takes them out."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def lend(self, past: Past | None, rows: int) -> Any:
        """Puts the states of a past, if there is one, in place; returns what the model's forward takes as its cache."""
        raise NotImplementedError

    def take(self, past: Past, blocks: range, lent: Any, returned: Any) -> None:
        """Hands the new states of some blocks to a past.

        Args:
            past: Where they go.
            blocks: Those that ran.
            lent: What `lend` returned.
            returned: The output of the model's forward.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Ends what the last `lend` has begun: a call may run in the middle of another one."""

    def _kept(self, past: Past | None) -> Iterator[tuple[Place, int, Tensor]]:
        """Iterates over the states of a past: place, block, tensor."""
        for block, places in self.places.items() if past is not None else ():
            for number, place in enumerate(places):
                state = cast("StatefulPast", past).get_kept(block, number)
                if state is not None:
                    yield place, block, state

    def _keep(self, past: Past, blocks: range, whole: Callable[[Path], Tensor]) -> None:
        for block in blocks:
            for number, place in enumerate(self.places.get(block, ())):
                state = place.of(whole(place.path).detach(), block)
                cast("StatefulPast", past).keep(block, number, state.clone(memory_format=torch.contiguous_format))


class InObject(Keeper):
    """States in an object that the model's forward takes, and makes if it is given none.

    Args:
        places: See `Keeper`.
        name: By which the forward returns it.
        fresh: Returns a new one for so many rows.
    """

    def __init__(self, places: Places, name: str, fresh: Callable[[int], Any]) -> None:
        super().__init__(places)
        self._name = name
        self._fresh = fresh

    def lend(self, past: Past | None, rows: int) -> Any:
        """Returns an object with the states; None before the first token."""
        kept = list(self._kept(past))
        if not kept:
            return None
        made = self._fresh(rows)
        found = dict(leaves(attributes(made)))
        with torch.no_grad():
            for place, block, state in kept:
                place.of(found[place.path], block).copy_(state)
        return made

    def take(self, past: Past, blocks: range, lent: Any, returned: Any) -> None:
        """Takes the states out of the object that was returned."""
        found = dict(leaves(attributes(returned[self._name])))
        self._keep(past, blocks, found.__getitem__)


class InCacheClass(Keeper):
    """States in further attributes of a family's own class of caches: the past becomes one of that class."""

    def __init__(self, places: Places, family: type[DynamicCache]) -> None:
        super().__init__(places)
        self._family = family

    def lend(self, past: Past | None, rows: int) -> Past | None:
        """Returns the past, in the family's class, with the states in its attributes."""
        if past is None:
            return None
        past = in_class(past, self._family)
        for place, _, state in self._kept(past):
            attribute, index = place.path
            entries = vars(past)[attribute]
            entries.extend([None] * (index + 1 - len(entries)))
            entries[index] = state
        return past

    def take(self, past: Past, blocks: range, lent: Any, returned: Any) -> None:
        """Takes the states out of the past's attributes."""
        self._keep(past, blocks, lambda path: vars(lent)[path[0]][path[1]])


class InModules(Keeper):
    """States in attributes of modules: a path is a module's, below its block, and the attribute's name."""

    def __init__(self, places: Places, layers: Sequence[nn.Module]) -> None:
        super().__init__(places)
        self._layers = layers
        self._outer: list[list[Any]] = []
        """The attributes of the calls in whose middle others run."""

    def lend(self, past: Past | None, rows: int) -> Past | None:
        """Sets the attributes; None before the first token."""
        self._outer.append([self._get(block, place.path) for block, place in self._all()])
        for block, place in self._all():
            self._set(block, place, None)
        for place, block, state in self._kept(past):
            self._set(block, place, state)
        return past

    def take(self, past: Past, blocks: range, lent: Any, returned: Any) -> None:
        """Takes the states off the modules."""
        for block in blocks:
            self._keep(past, range(block, block + 1), functools.partial(self._get, block))

    def restore(self) -> None:
        """Sets the attributes to what they were."""
        for (block, place), state in zip(self._all(), self._outer.pop(), strict=True):
            self._set(block, place, state)

    def _all(self) -> list[tuple[int, Place]]:
        return [(block, place) for block, places in self.places.items() for place in places]

    def _set(self, block: int, place: Place, state: Tensor | None) -> None:
        path, name = place.path
        setattr(self._layers[block].get_submodule(path), name, state)

    def _get(self, block: int, path: Path) -> Any:
        return getattr(self._layers[block].get_submodule(path[0]), path[1])


def in_class(past: Past, family: type[DynamicCache]) -> Past:
    """Makes a past one of a family's class of caches as well, with the attributes that this class adds, and returns it.

    Everything else stays as the past has it.
    """
    past.__class__ = _joined_class(type(past), family)  # type: ignore[arg-type]  # classes are hashable
    for name in further_attributes(family):  # type: ignore[arg-type]
        vars(past)[name] = []
    return past


@functools.cache
def _joined_class(past: type[Past], family: type[DynamicCache]) -> type[Past]:
    return past if issubclass(past, family) else type(f"{past.__name__}As{family.__name__}", (past, family), {})


@functools.cache
def further_attributes(family: type[DynamicCache]) -> tuple[str, ...]:
    """Returns the names of the lists that a class of caches has besides those of `DynamicCache`."""
    plain = vars(DynamicCache())
    return tuple(name for name, value in vars(family()).items() if name not in plain and isinstance(value, list))
