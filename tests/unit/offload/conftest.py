"""A store of made-up experts, and a cache over it with room for four of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_kit import FakeStore, make, make_store

from swarm_plugins.offload.cache.cache import BoundedCache


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return make_store(tmp_path)


@pytest.fixture
def cache(store: FakeStore) -> Iterator[BoundedCache]:
    cache = make(store, num_fast=4, read_timeout_s=30)
    yield cache
    cache.close()
