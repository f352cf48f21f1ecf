"""Spans of every family's toy, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from blocks_kit import BLOCKS, Pair

from swarm_plugins.blocks import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def make(family: str) -> Pair:
        checkpoint = Checkpoint.open(str(save_tiny(family, tmp_path_factory.mktemp(family))))
        return Pair(family, checkpoint, load_span(checkpoint, BLOCKS, kv_bytes=1 << 24))

    return make


@pytest.fixture
def llama(pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of("llama")
