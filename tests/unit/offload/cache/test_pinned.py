"""RAM in front of a device: copied from when the expert is there, read into when not. The device is played by RAM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from cache_kit import FakeStore, InvertedFormat, PlainFormat, borrowed, formats_of, make_store
from torch import Tensor

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.cache import cache
from swarm_plugins.offload.cache.cache import BoundedCache
from swarm_plugins.offload.cache.pinned import PinnedLoader
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.disk.buffers import BufferPool
from swarm_plugins.offload.disk.read_queue import ReadQueue


@dataclass
class LateCopy:
    """Copies when it is waited for: overwriting or using a buffer too early gives wrong bytes."""

    run: Callable[[], object]
    is_done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def before_use(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        with self.lock:
            if not self.is_done:
                self.run()
                self.is_done = True


@dataclass
class LateCopies:
    allocated: list[int] = field(default_factory=list)
    num_started: int = 0

    def allocate(self, num_bytes: int) -> Tensor:
        self.allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def follow(self) -> None:
        pass

    def start(self, source: Tensor, into: Tensor, convert: Callable[[Tensor, Tensor], None] | None) -> LateCopy:
        self.num_started += 1
        return LateCopy(lambda: (convert or (lambda source, into: into.copy_(source)))(source, into))


def make(
    store: FakeStore, num_fast: int, num_ram: int, kind: type[PlainFormat] = PlainFormat
) -> tuple[BoundedCache, LateCopies]:
    copies, size, formats = LateCopies(), store.stored_layout(0).num_bytes, formats_of(store, kind)
    queue = ReadQueue(2)
    loader = PinnedLoader(store, formats, copies, num_ram * size, queue)
    pool = BufferPool(num_fast * size, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), "fast_bytes")
    return BoundedCache(store, formats, OffloadConfig(), loader, pool, queue), copies


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return make_store(tmp_path)


@pytest.mark.parametrize("num_ram", [0, 1, 2, 5, 12])
def test_bytes_are_right_and_ram_within_its_budget_and_a_buffer_per_reader(store: FakeStore, num_ram: int) -> None:
    cache, copies = make(store, 3, num_ram)
    for _ in range(3):
        for layer in range(3):
            expected = {expert: store.expected(layer, expert) for expert in range(4)}
            assert borrowed(cache, layer, range(4)) == expected
    assert len(copies.allocated) <= num_ram + OffloadConfig().num_readers
    cache.close()


def test_what_is_in_ram_is_not_read_again(store: FakeStore) -> None:
    cache, copies = make(store, 3, 12)
    for _ in range(4):
        for layer in range(3):
            borrowed(cache, layer, range(4))
    assert cache.stats().bytes_read == 12 * 2 * store.tensor_bytes(0)
    assert copies.num_started > 12
    cache.close()


def test_conversion_is_done_where_the_copy_goes(store: FakeStore) -> None:
    cache, _ = make(store, 3, 4, InvertedFormat)
    up = borrowed(cache, 0, [1])[1]["up"]
    assert up == bytes(255 - byte for byte in store.expected(0, 1)["up"])
    cache.close()


def test_a_failed_read_leaves_ram_usable(store: FakeStore) -> None:
    cache, _ = make(store, 3, 2)
    whole = store.path(1).read_bytes()
    store.path(1).write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match=r"layer1\.bin: the file ends"):
        borrowed(cache, 1, [3])
    assert borrowed(cache, 0, range(4)) == {expert: store.expected(0, expert) for expert in range(4)}
    store.path(1).write_bytes(whole)
    assert borrowed(cache, 1, [3]) == {3: store.expected(1, 3)}
    cache.close()


@pytest.mark.parametrize(
    ("budgets", "is_ahead"),
    [
        pytest.param({"fast_bytes": 1 << 20, "ram_bytes": 0}, False, id="all-on-the-device"),
        pytest.param({"ram_bytes": 1 << 20}, False, id="all-in-ram"),
        pytest.param({"ram_bytes": 100}, True, id="some-on-disk"),
        pytest.param({"ram_bytes": 1 << 20, "prefetch": True}, True, id="as-asked"),
    ],
)
def test_without_need_of_the_disk_nothing_is_read_ahead(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, budgets: dict[str, int], *, is_ahead: bool
) -> None:
    monkeypatch.setattr(cache, "CudaCopies", lambda _: LateCopies())
    monkeypatch.setattr(cache, "device_buffer", lambda _: LateCopies().allocate)
    config = OffloadConfig(**{"fast_bytes": 3 * store.stored_layout(0).num_bytes, **budgets})
    made = cache.make_cache(store, formats_of(store, PlainFormat), config, torch.device("cuda"))  # type: ignore[arg-type]
    assert made.config.prefetch is is_ahead
    made.close()
