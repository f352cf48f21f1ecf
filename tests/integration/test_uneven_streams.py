"""Streams without a length that end earlier in one process: all stop with it, and none waits in a collective."""

from __future__ import annotations

from pathlib import Path

import pytest
import stream_checks as checks
import trainer_kit
from parallel_kit import run_ranks

pytestmark = [pytest.mark.timeout(300)]
# A fixture.
model = trainer_kit.model

MEMORY = {"offload": "none"}


def test_a_trainer_that_writes_checkpoints_stops_everywhere(model: Path, tmp_path: Path) -> None:
    for found in run_ranks(2, checks.ends_together, model, MEMORY, tmp_path):
        assert found["alike"] == 0
        assert found["ends"] == 4
        assert found["nothing here"] == 0
        assert found["one knows"] == checks.KNOWN
        # The step that a last batch makes is made by all.
        assert found["in the middle"] == 1
        assert found["goes on"] == 6
        assert found["place"] == [{"place": 7}]


def test_so_does_a_loop_of_ones_own() -> None:
    for found in run_ranks(2, checks.fabric_ends_together, MEMORY):
        assert found == {"batches": [2, 2], "size": 4}


def test_so_do_ranks_that_hold_each_others_experts() -> None:
    first, second = run_ranks(2, checks.experts_end_together)
    assert first == second
    assert all(first)
