"""Adapters on their way to servers: each span gets its part, named by a digest that is computed once per change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.client.peers import ShippedAdapter

__all__ = ["AdapterPart", "AdapterSelection", "ClientAdapter", "DigestCache"]


@dataclass(frozen=True)
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

    def with_tensors(self, tensors: Sequence[Tensor]) -> AdapterSelection:
        """Returns the same selection over other tensors (an autograd function's own view of them)."""
        adapters = []
        position = 0
        for adapter in self.adapters:
            end = position + len(adapter.tensors)
            adapters.append(ClientAdapter(adapter.spec, tuple(tensors[position:end])))
            position = end
        return AdapterSelection(adapters=tuple(adapters), rows=self.rows, dropout_seed=self.dropout_seed)

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


class DigestCache:
    """Cuts adapters to spans and names the parts, hashing again only what has changed.

    Args:
        capacity: Parts remembered.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        # The entry holds the tensors themselves, so that their ids cannot be used by others meanwhile.
        self._parts: OrderedDict[tuple[object, ...], ShippedAdapter] = OrderedDict()

    def part(self, selection: AdapterSelection, blocks: range) -> AdapterPart:
        """Returns what has to be shipped for some blocks."""
        shipped = []
        indices: list[int] = []
        offset = 0
        for adapter in selection.adapters:
            modules, local = _modules_on(adapter.spec, blocks)
            tensors = [adapter.tensors[index] for index in local]
            shipped.append(self._shipped(AdapterSpec(modules=modules), tensors))
            indices.extend(offset + index for index in local)
            offset += len(adapter.tensors)
        return AdapterPart(shipped=tuple(shipped), indices=tuple(indices), rows=selection.rows)

    def _shipped(self, spec: AdapterSpec, tensors: Sequence[Tensor]) -> ShippedAdapter:
        key: tuple[object, ...] = (spec, *((tensor.data_ptr(), id(tensor), tensor._version) for tensor in tensors))
        known = self._parts.get(key)
        if known is None:
            known = ShippedAdapter(adapter_digest(spec, tensors), spec, tuple(tensors))
            self._parts[key] = known
            while len(self._parts) > self.capacity:
                self._parts.popitem(last=False)
        self._parts.move_to_end(key)
        return known


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
