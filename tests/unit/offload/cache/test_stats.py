"""What was counted can be read, taken and plotted."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_kit import borrowed, make, make_store

from swarm_plugins.offload.stats import OffloadStats


def test_nothing_counted_has_no_ratios_to_divide_by_zero() -> None:
    stats = OffloadStats()
    assert (stats.hit_ratio, stats.recall, stats.waste) == (0.0, 0.0, 0.0)


def test_ratios() -> None:
    stats = OffloadStats(
        hits=3, misses=1, guesses=8, guesses_used=6, asked_after_guess=12, guessed_loads=5, guessed_loads_used=4
    )
    assert (stats.hit_ratio, stats.recall, stats.waste) == (0.75, 0.5, pytest.approx(0.2))


def test_uses_are_counted_per_expert_and_time_is_taken(tmp_path: Path) -> None:
    cache = make(make_store(tmp_path), num_fast=4)
    for experts in ([1, 2], [2], [2, 3]):
        borrowed(cache, 1, experts)
    stats = cache.stats()
    assert stats.uses == {0: (0, 0, 0, 0), 1: (0, 1, 3, 1), 2: (0, 0, 0, 0)}
    assert 0 < stats.stall_s <= stats.seconds
    cache.close()
