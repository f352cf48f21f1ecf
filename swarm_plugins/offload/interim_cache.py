"""A cache that keeps the experts it read last, and reads when asked: to be replaced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.types import ExpertFormat, ExpertKey, ExpertStore

__all__ = ["make_cache"]


def make_cache(
    store: ExpertStore, formats: Mapping[int, ExpertFormat], config: OffloadConfig, device: torch.device
) -> Any:
    return _Cache(store, formats, config)


class _Cache:
    def __init__(self, store: ExpertStore, formats: Mapping[int, ExpertFormat], config: OffloadConfig) -> None:
        self._store, self._formats = store, formats
        self._limit = config.fast_bytes if config.fast_bytes is not None else 1 << 34
        self._kept: OrderedDict[ExpertKey, tuple[int, Mapping[str, Tensor]]] = OrderedDict()

    def borrow(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        for expert in experts:
            key = ExpertKey(layer, expert)
            if key not in self._kept:
                self._kept[key] = self._read(key)
                while sum(size for size, _ in self._kept.values()) > self._limit and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            yield expert, self._kept[key][1]

    def _read(self, key: ExpertKey) -> tuple[int, Mapping[str, Tensor]]:
        form = self._formats[key.layer]
        stored = _aligned(form.stored.num_bytes)
        for part in self._store.ranges(key):
            with part.path.open("rb") as file:
                file.seek(part.start)
                data = file.read(part.num_bytes)
            stored[part.offset : part.offset + part.num_bytes] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        computed = stored
        if form.computed is not form.stored:
            computed = _aligned(form.computed.num_bytes)
            form.convert(stored, computed)
        return form.computed.num_bytes, form.computed.views(computed)

    def guess(self, layer: int, experts: Sequence[int]) -> None: ...

    def close(self) -> None: ...


def _aligned(size: int) -> Tensor:
    buffer = torch.empty(size + 64, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64
    return buffer[start : start + size]
