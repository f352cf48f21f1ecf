"""A store of made-up experts in small files, and what the tests of the cache ask of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swarm_plugins.offload.cache.cache import BoundedCache, make_cache
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.interfaces import BufferLayout, ExpertFormat, ExpertKey, FileRange


def num_open(folder: Path) -> int:
    """Returns how many files of a folder this process has open, whatever else of it opens and closes meanwhile."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is gone, and others may be.
        with suppress(FileNotFoundError):
            found += Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder.resolve())
    return found


@dataclass
class FakeStore:
    """Experts of two tensors, laid out one after the other in one file per layer, at odd offsets."""

    directory: Path
    num_experts: Mapping[int, int]
    widths: Mapping[int, int]
    """Elements of each tensor, by layer."""
    contents: dict[ExpertKey, np.ndarray] = field(default_factory=dict)

    def write(self) -> FakeStore:
        random = np.random.default_rng(0)
        for layer, count in self.num_experts.items():
            with self.path(layer).open("wb") as file:
                file.write(bytes(13))
                for expert in range(count):
                    data = random.integers(0, 256, 2 * self.tensor_bytes(layer), dtype=np.uint8)
                    self.contents[ExpertKey(layer, expert)] = data
                    file.write(data.tobytes())
        return self

    def path(self, layer: int) -> Path:
        return self.directory / f"layer{layer}.bin"

    def tensor_bytes(self, layer: int) -> int:
        return 4 * self.widths[layer]

    def stored_layout(self, layer: int) -> BufferLayout:
        shape = (self.widths[layer],)
        return BufferLayout.of([("up", torch.float32, shape), ("down", torch.float32, shape)])

    def ranges(self, key: ExpertKey) -> Sequence[FileRange]:
        size = self.tensor_bytes(key.layer)
        start = 13 + key.expert * 2 * size
        layout = self.stored_layout(key.layer)
        return [
            FileRange(
                self.path(key.layer), start + place * size, size, spec.offset, f"experts.{key.expert}.{spec.name}"
            )
            for place, spec in enumerate(layout.tensors)
        ]

    def expected(self, layer: int, expert: int) -> dict[str, bytes]:
        up, down = np.split(self.contents[ExpertKey(layer, expert)], 2)
        return {"up": up.tobytes(), "down": down.tobytes()}


@dataclass
class PlainFormat:
    """Computes with what is stored."""

    stored: BufferLayout

    @property
    def computed(self) -> BufferLayout:
        return self.stored

    def check(self, stored: Tensor, key: ExpertKey) -> None:
        pass

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        raise AssertionError("nothing is to be converted")

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass
class InvertedFormat(PlainFormat):
    """Computes with every byte inverted, in buffers of their own."""

    @property
    def computed(self) -> BufferLayout:
        return BufferLayout(self.stored.tensors, self.stored.num_bytes)

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        computed.copy_(~stored)


def make_store(directory: Path, num_layers: int = 3, num_experts: int = 4, width: int = 64) -> FakeStore:
    layers = range(num_layers)
    return FakeStore(directory, dict.fromkeys(layers, num_experts), dict.fromkeys(layers, width)).write()


def formats_of(store: FakeStore, kind: type[PlainFormat] = PlainFormat) -> dict[int, ExpertFormat]:
    return {layer: kind(store.stored_layout(layer)) for layer in store.num_experts}


def make(
    store: FakeStore, num_fast: int | None = None, kind: type[PlainFormat] = PlainFormat, **config: object
) -> BoundedCache:
    """A cache with room for so many experts of the first layer's size."""
    if num_fast is not None:
        config["fast_bytes"] = num_fast * store.stored_layout(0).num_bytes
    return make_cache(store, formats_of(store, kind), OffloadConfig(**config), torch.device("cpu"))  # type: ignore[arg-type]


def content(views: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: view.view(torch.uint8).numpy().tobytes() for name, view in views.items()}


def borrowed(cache: BoundedCache, layer: int, experts: Sequence[int]) -> dict[int, dict[str, bytes]]:
    """What is lent, copied while it is lent."""
    return {expert: content(views) for expert, views in cache.borrow(layer, experts)}


def forget_counts(cache: BoundedCache) -> None:
    """Counts from zero, with the memory as it is."""
    cache._stats.__init__()  # type: ignore[misc]
    cache._uses = {layer: [0] * count for layer, count in cache.num_experts.items()}
    cache._first_s = None


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits for what other threads do, for 30 s at the most."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_borrower(cache: BoundedCache) -> None:
    """Waits until another thread waits in a borrow."""
    wait_for(lambda: bool(vars(cache._changed)["_waiters"]))
