"""States that families keep by means of their own: on modules, in objects, in classes of caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from type_models import save_type

from swarm_plugins.blocks.kv import KVCache
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint

BLOCKS = range(1, 3)


@pytest.fixture(scope="module", params=["minimax", "recurrent_gemma", "rwkv", "xlstm"])
def span(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Span]:
    directory: Path = save_type(request.param, tmp_path_factory.mktemp(request.param))
    with closing(load_span(Checkpoint.open(directory), BLOCKS)) as loaded:
        yield loaded


def _hidden(span: Span, rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 6, span.spec.hidden_size, generator=torch.Generator().manual_seed(seed))


def _step(span: Span, cache: KVCache, hidden: Tensor) -> Tensor:
    return span.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden)])[0].hidden


def _alone(span: Span, hidden: Tensor) -> list[Tensor]:
    """Returns the outputs of a prompt of 4 tokens, and of two steps."""
    cache = span.new_cache(len(hidden), BLOCKS)
    outputs = [_step(span, cache, hidden[:, start:stop]) for start, stop in ((0, 4), (4, 5), (5, 6))]
    cache.close()
    return outputs


def test_a_step_in_the_middle_of_another_session_s_changes_neither(span: Span) -> None:
    one, two = _hidden(span, 2, 1), _hidden(span, 2, 2)
    expected, between = _alone(span, one), _alone(span, two)
    caches = [span.new_cache(2, BLOCKS) for _ in range(2)]
    _step(span, caches[0], one[:, :4])
    _step(span, caches[1], two[:, :4])
    found: list[Tensor] = []

    def interrupt() -> None:
        span.on_block_boundary = None
        found.append(_step(span, caches[1], two[:, 4:5]))

    span.on_block_boundary = interrupt
    try:
        found.append(_step(span, caches[0], one[:, 4:5]))
    finally:
        span.on_block_boundary = None
    torch.testing.assert_close(found, [between[1], expected[1]])
    torch.testing.assert_close(_step(span, caches[0], one[:, 5:]), expected[2])
    for cache in caches:
        cache.close()


def test_rows_are_chosen_and_copied_with_their_states(span: Span) -> None:
    hidden = _hidden(span, 2, 3)
    expected = _alone(span, hidden[[1, 0, 1]])
    cache = span.new_cache(2, BLOCKS)
    _step(span, cache, hidden[:, :4])
    cache.select([1, 0, 1])
    copied = cache.fork()
    for one in (cache, copied):
        torch.testing.assert_close(_step(span, one, hidden[[1, 0, 1], 4:5]), expected[1])
        one.close()


def test_the_bytes_of_all_states_are_counted_and_no_others(span: Span) -> None:
    cache = span.new_cache(3, BLOCKS)
    _step(span, cache, _hidden(span, 3, 4))
    held = sum(cast("Tensor", state).untyped_storage().nbytes() for state in cache.states.values())
    assert held == 3 * sum(span.spec.kv_layouts[block].row_bytes for block in BLOCKS) > 0
    assert {block for block, _, _ in cache.states} <= set(BLOCKS)
    cache.close()
    assert span.pool.used_bytes == 0
