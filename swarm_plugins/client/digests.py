"""Cuts adapters into one part per span, each named by a digest that is computed once per change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.recent import Recent

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class AdapterPart:
    """The parts of a call's adapters that lie on one span."""

    shipped: tuple[LoadedAdapter, ...]
    indices: tuple[int, ...]
    """Positions of the shipped tensors among all tensors of the call."""
    contents: tuple[int, ...]
    """A checksum of each shipped tensor."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the shipped adapters, in order."""
        return tuple(adapter.digest for adapter in self.shipped)


class _Cut(NamedTuple):
    """The part of an adapter on some blocks, without a digest yet."""

    whole: LoadedAdapter
    part: LoadedAdapter
    indices: list[int]


class _Named(NamedTuple):
    """A cut with its digest."""

    cut: _Cut
    contents: list[int]
    shipped: LoadedAdapter


class DigestCache:
    """Cuts adapters to spans and names the parts; only changed tensors are hashed again."""

    def __init__(self, capacity: int = 256) -> None:
        # Entries hold the objects whose ids are in their keys, so that these ids cannot be used by others meanwhile.
        self._cuts: Recent[tuple[int, range], _Cut] = Recent(capacity)
        self._named: Recent[tuple[object, ...], _Named] = Recent(capacity)

    def part(self, use: AdapterUse, blocks: range, *, verify: bool = True) -> AdapterPart:
        """Returns the adapter parts to ship for some blocks.

        ``verify`` also looks at the tensors' values. Some changes leave no other trace: ``parameter.data.add_()``, and
        optimizers with kernels of their own. False where nothing can have changed them, as between the tokens of one
        generation.
        """
        shipped = []
        indices: list[int] = []
        contents: list[int] = []
        offset = 0
        for adapter in use.adapters:
            cut = self._cut(adapter, blocks)
            named = self._name(cut, verify=verify)
            shipped.append(named.shipped)
            contents.extend(named.contents)
            indices.extend(offset + index for index in cut.indices)
            offset += len(adapter.tensors)
        return AdapterPart(shipped=tuple(shipped), indices=tuple(indices), contents=tuple(contents))

    def _cut(self, adapter: LoadedAdapter, blocks: range) -> _Cut:
        key = (id(adapter), blocks)
        cut = self._cuts.get(key)
        if cut is None:
            spec, indices = adapter.spec.on(blocks)
            tensors = tuple(adapter.tensors[index] for index in indices)
            part = LoadedAdapter(spec=spec, tensors=tensors)
            cut = self._cuts[key] = _Cut(adapter, part, indices)
        self._cuts.move_to_end(key)
        return cut

    def _name(self, cut: _Cut, *, verify: bool) -> _Named:
        spec, tensors = cut.part.spec, cut.part.tensors
        # Tensors of inference mode have no version counter, and cannot be trained.
        versions = (0 if tensor.is_inference() else tensor._version for tensor in tensors)
        key: tuple[object, ...] = (id(cut), *zip((tensor.data_ptr() for tensor in tensors), versions, strict=True))
        known = self._named.get(key)
        if known is None or verify:
            contents = _contents(tensors)
            if known is None or known.contents != contents:
                shipped = LoadedAdapter(digest=adapter_digest(spec, tensors), spec=spec, tensors=tensors)
                known = self._named[key] = _Named(cut, contents, shipped)
        self._named.move_to_end(key)
        return known


class CallAdapters:
    """The adapters of one call, as they were when it began: every request of the call names the same ones."""

    def __init__(self, digests: DigestCache, use: AdapterUse) -> None:
        self._digests = digests
        self._use = use
        self._contents: list[int] | None = None
        self._parts: dict[range, AdapterPart] = {}

    def part(self, blocks: range) -> AdapterPart:
        """Returns the adapter parts to ship for some blocks.

        Raises:
            UnsupportedError: If they have changed since the call began.
        """
        if self._contents is None:
            self._contents = _contents(self._use.tensors)
        part = self._parts.get(blocks)
        if part is None:
            part = self._parts[blocks] = self._digests.part(self._use, blocks)
            if any(self._contents[index] != now for index, now in zip(part.indices, part.contents, strict=True)):
                raise changed_adapter_error()
        return part


def changed_adapter_error() -> UnsupportedError:
    """Returns the error of a call in which an adapter is not the same from its first request to its last."""
    return UnsupportedError(
        "an adapter was changed while a forward or backward with it was under way: change adapters between steps"
    )


def _contents(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a checksum of each tensor: several times faster than a digest, but only good for detecting changes."""
    if not tensors:
        return []
    sums = [tensor.detach().view(_WHOLE[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist()
