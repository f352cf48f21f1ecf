"""Adapters on their way to servers: each span gets its part, named by a digest that is computed once per change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.client.peers import ShippedAdapter

__all__ = ["AdapterPart", "AdapterSelection", "ClientAdapter", "DigestCache"]

K = TypeVar("K")
V = TypeVar("V")
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class ClientAdapter:
    """An adapter of the client: structure and the live tensors that are trained."""

    spec: AdapterSpec
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterSelection:
    """Which adapters a call uses."""

    adapters: tuple[ClientAdapter, ...] = ()
    rows: tuple[int, ...] | None = None
    """For each row of the batch the index of its one adapter, -1 for none. None: all adapters on all rows."""
    dropout_seed: int | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of all adapters, in order."""
        return tuple(tensor for adapter in self.adapters for tensor in adapter.tensors)

    def is_same(self, other: AdapterSelection) -> bool:
        """Returns whether the other selection applies the very same tensors in the same way."""
        return (
            (self.rows, self.dropout_seed) == (other.rows, other.dropout_seed)
            and [adapter.spec for adapter in self.adapters] == [adapter.spec for adapter in other.adapters]
            and [id(tensor) for tensor in self.tensors] == [id(tensor) for tensor in other.tensors]
        )

    def row_slice(self, rows: slice, seed_offset: int) -> AdapterSelection:
        """Returns the selection for some rows of the batch, with a dropout seed of their own."""
        return AdapterSelection(
            adapters=self.adapters,
            rows=None if self.rows is None else self.rows[rows],
            dropout_seed=None if self.dropout_seed is None else self.dropout_seed + seed_offset,
        )


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """The parts of a selection's adapters that lie on one span."""

    shipped: tuple[ShippedAdapter, ...]
    indices: tuple[int, ...]
    """Positions of the shipped tensors among all tensors of the selection."""
    rows: tuple[int, ...] | None

    @property
    def digests(self) -> tuple[str, ...]:
        """Names of the shipped adapters, in order."""
        return tuple(adapter.digest for adapter in self.shipped)


@dataclass(frozen=True)
class _Cut:
    """The part of an adapter that lies on some blocks."""

    adapter: ClientAdapter
    spec: AdapterSpec
    indices: list[int]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Named:
    """A cut with the name that its content had."""

    cut: _Cut
    contents: list[int]
    shipped: ShippedAdapter


class DigestCache:
    """Cuts adapters to spans and names the parts, hashing again only what has changed.

    Args:
        capacity: Parts remembered.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        # Entries hold the objects whose ids are in their keys, so that these ids cannot be used by others meanwhile.
        self._cuts: OrderedDict[tuple[int, range], _Cut] = OrderedDict()
        self._named: OrderedDict[tuple[object, ...], _Named] = OrderedDict()

    def part(self, selection: AdapterSelection, blocks: range, *, verify: bool = True) -> AdapterPart:
        """Returns what has to be shipped for some blocks.

        Args:
            selection: The adapters in use.
            blocks: The span's blocks.
            verify: Look at the tensors' values too. Some changes leave no other trace: ``parameter.data.add_()``, and
                optimizers with kernels of their own. False where nothing can have changed them, between the tokens of
                one generation.
        """
        shipped = []
        indices: list[int] = []
        offset = 0
        for adapter in selection.adapters:
            cut = self._cut(adapter, blocks)
            shipped.append(self._shipped(cut, verify=verify))
            indices.extend(offset + index for index in cut.indices)
            offset += len(adapter.tensors)
        return AdapterPart(shipped=tuple(shipped), indices=tuple(indices), rows=selection.rows)

    def _cut(self, adapter: ClientAdapter, blocks: range) -> _Cut:
        key = (id(adapter), blocks)
        cut = self._cuts.get(key)
        if cut is None:
            modules, indices = _modules_on(adapter.spec, blocks)
            tensors = tuple(adapter.tensors[index] for index in indices)
            cut = self._cuts[key] = _Cut(adapter, AdapterSpec(modules=modules), indices, tensors)
            _forget_oldest(self._cuts, self.capacity)
        self._cuts.move_to_end(key)
        return cut

    def _shipped(self, cut: _Cut, *, verify: bool) -> ShippedAdapter:
        key: tuple[object, ...] = (id(cut), *((tensor.data_ptr(), tensor._version) for tensor in cut.tensors))
        known = self._named.get(key)
        if known is None or verify:
            contents = _contents(cut.tensors)
            if known is None or known.contents != contents:
                shipped = ShippedAdapter(adapter_digest(cut.spec, cut.tensors), cut.spec, cut.tensors)
                known = self._named[key] = _Named(cut, contents, shipped)
                _forget_oldest(self._named, self.capacity)
        self._named.move_to_end(key)
        return known.shipped


def _forget_oldest(entries: OrderedDict[K, V], capacity: int) -> None:
    while len(entries) > capacity:
        entries.popitem(last=False)


def _contents(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a number for each tensor's values, several times faster than a digest; it tells changes only."""
    if not tensors:
        return []
    sums = [tensor.detach().view(_WHOLE[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist()


def _modules_on(spec: AdapterSpec, blocks: range) -> tuple[tuple[AdapterModule, ...], list[int]]:
    """Returns the modules on some blocks and the positions of their tensors."""
    modules = []
    indices: list[int] = []
    position = 0
    for module in spec.modules:
        if module.block in blocks:
            modules.append(module)
            indices.extend(range(position, position + len(module.shapes)))
        position += len(module.shapes)
    return tuple(modules), indices
