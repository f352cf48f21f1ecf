"""Blocks computed here: a program that ends does not wait for all checks that are under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from type_models import tiny_type_config

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.verification import local_blocks
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, UncheckableError, mixtures_of


@pytest.fixture
def is_ending() -> Iterator[threading.Event]:
    yield local_blocks._is_ending
    local_blocks._is_ending.clear()


async def test_at_the_end_of_the_program_the_work_on_one_block_is_the_last(is_ending: threading.Event) -> None:
    # What Python calls before it waits for threads.
    [end] = [hook for hook in threading._threading_atexits if hook.func == is_ending.set]  # type: ignore[attr-defined]
    opened: list[int] = []

    def open_at_the_end() -> Checkpoint:
        opened.append(1)
        end()
        raise CheckpointError("no file")

    blocks = LocalBlocks(open_at_the_end, limit_bytes=1)
    errors = await asyncio.gather(*(blocks.can_hold(count) for count in range(1, 5)), return_exceptions=True)
    assert sorted(map(str, errors)) == ["no file", *["this program is ending"] * 3]
    assert len(opened) == 1
    with pytest.raises(UncheckableError, match="this program is ending"):
        blocks._span(range(1), Kind("float32", "none"))


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        *[(name, {0, 1, 2, 3}) for name in ("mixtral", "llama4_text", "dbrx", "jetmoe", "longcat_flash")],
        ("jamba", {1, 3}),
        ("qwen2", set()),
    ],
)
def test_blocks_that_choose_experts_are_known_by_the_config(model_type: str, expected: set[int]) -> None:
    assert mixtures_of(tiny_type_config(model_type)) == expected
