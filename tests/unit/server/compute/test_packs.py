"""Which steps share a forward: nobody's decode steps keep another peer's prefill waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm_plugins.server.compute.work import choose_pack


def step(tokens: int, rows: int = 1) -> Any:
    return SimpleNamespace(num_left=tokens, batch_size=rows, is_whole=False)


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param([step(1), step(6), step(1)], [1, 1, 6], id="decode-goes-first"),
        pytest.param([step(1), step(500)], [1, 99], id="a-prefill-takes-what-is-left"),
        pytest.param([step(6), step(1, 1500), step(1, 1500)], [6], id="a-wide-decode-step-waits-for-its-turn"),
        pytest.param([step(500), *[step(1)] * 200], [25, *[1] * 75], id="many-decode-steps-leave-a-quarter"),
        pytest.param([step(500), step(1)], [99, 1], id="the-rest-of-the-pack-too"),
        pytest.param([step(1, 1500), step(6)], [1], id="wider-than-the-pack"),
        pytest.param([step(6, 1500), step(1)], [1], id="rows-wider-than-the-pack"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_a_pack_of_100_tokens(waiting: list[Any], expected: list[int]) -> None:
    assert [num_tokens for _, num_tokens in choose_pack(waiting, 100)] == expected
