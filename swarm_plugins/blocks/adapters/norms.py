"""Norms of a span's weights with an adapter's low-rank updates, which DoRA divides by (Liu et al. 2024, section 4).

A norm takes a pass over the weight, and changes with the adapter only: it is kept between calls.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from swarm_plugins.adapter_spec import PeftLayer
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.weights.linears import wide_weight


class _Kept(NamedTuple):
    norm: Tensor
    storages: tuple[StorageWeakRef, ...]
    """Of the factors: their addresses are not used again while something refers to them weakly."""


class KeptNorms:
    """Keeps the norms that were used last; safe to use from several threads.

    Args:
        most_bytes: Most bytes of all norms.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[object, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> Tensor | None:
        """Returns the norm under a key, if it is kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key].norm

    def put(self, key: object, norm: Tensor, storages: tuple[StorageWeakRef, ...]) -> None:
        """Keeps a norm."""
        with self._lock:
            if key in self._kept:
                self._num_bytes -= self._kept.pop(key).norm.nbytes
            self._kept[key] = _Kept(norm, storages)
            self._num_bytes += norm.nbytes
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].norm.nbytes


_NORMS = KeptNorms(128 << 20)
"""Of all modules. An adapter on all linear layers of a model with 8 billion parameters has 6 MB of them in float32."""


def weight_norm(module: nn.Linear, factor_a: Tensor, factor_b: Tensor, scaling: float) -> Tensor:
    """Returns the norm of each row of a module's weight with a low-rank update, ``[out]``; without a gradient.

    It is kept: the factors do not change while tokens are generated.
    """
    factors = (factor_a, factor_b)
    if factor_a.is_meta or factor_a.is_inference() or factor_b.is_inference():
        return _computed(module, factor_a, factor_b, scaling)
    storages = tuple(StorageWeakRef(one.untyped_storage()) for one in factors)
    places = (_place(one, storage) for one, storage in zip(factors, storages, strict=True))
    key = (ref(module), scaling, *places)
    norm = _NORMS.get(key)
    if norm is None:
        norm = _computed(module, factor_a, factor_b, scaling)
        _NORMS.put(key, norm, storages)
    return norm


def _place(tensor: Tensor, storage: StorageWeakRef) -> tuple[object, ...]:
    return storage.cdata, tensor.storage_offset(), tensor.shape, tensor._version


def _computed(module: nn.Linear, factor_a: Tensor, factor_b: Tensor, scaling: float) -> Tensor:
    # A tensor of inference mode could not go into a graph later.
    with torch.inference_mode(mode=False), torch.no_grad():
        weight = wide_weight(module) + scaling * (factor_b @ factor_a)
        norm: Tensor = torch.linalg.norm(weight, dim=1).to(factor_b.dtype)
    return norm


class NormedLayer(NamedTuple):
    """A layer that starts from a norm, and the factors of its update."""

    layer: PeftLayer
    factor_a: Tensor
    factor_b: Tensor

    @property
    def norm_bytes(self) -> int:
        """Size of the norm: it has the type of the second factor, ``[out, r]``."""
        return len(self.factor_b) * self.factor_b.element_size()


def normed_layers(adapter: LoadedAdapter) -> Iterator[NormedLayer]:
    """Yields the layers of a checked adapter that start from norms, in their order."""
    part = adapter.spec.peft
    tensors = adapter.tensors[len(adapter.tensors) - len(part.shapes) :] if part else ()
    for layer in part.layers if part else ():
        if layer.needs_norm:
            named = {name: tensors[place] for name, place in zip(layer.names, layer.places, strict=True)}
            yield NormedLayer(layer, named["lora_A.weight"], named["lora_B.weight"])


def weight_norms(
    layers: Sequence[NormedLayer], linear_of: Callable[[PeftLayer], nn.Linear]
) -> Generator[None, None, tuple[Tensor, ...]]:
    """Computes the norms that layers start from, each in a part of its own: it is a pass over a whole weight."""
    found: list[Tensor] = []
    for layer, factor_a, factor_b in layers:
        if found:
            yield
        scaling = 1.0 if layer.scaling is None else layer.scaling
        found.append(weight_norm(linear_of(layer), factor_a, factor_b, scaling).cpu())
    return tuple(found)
