"""Which steps share a forward: nobody's decode steps keep another peer's prefill waiting."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.layer_masks import packed
from swarm_plugins.server.compute.work import Step, choose_pack


def step(tokens: int, rows: int = 1, *, least: int = 1) -> Any:
    return SimpleNamespace(num_left=tokens, batch_size=rows, least=least)


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
        pytest.param([step(500, least=500), step(1)], [500], id="whole"),
        pytest.param([step(1), step(500, least=500)], [1], id="whole-later"),
        pytest.param([step(1), step(50, least=50)], [1, 50], id="whole-if-it-fits"),
        pytest.param([step(500, least=200), step(1)], [200], id="as-many-as-belong-together"),
        pytest.param([step(1), step(500, least=50)], [1, 99], id="more-than-belong-together"),
        pytest.param([step(500, least=50), *[step(1)] * 200], [50, *[1] * 50], id="before-many-decode-steps"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_a_pack_of_100_tokens(waiting: list[Any], expected: list[int]) -> None:
    assert [num_tokens for _, num_tokens in choose_pack(waiting, 100)] == expected


async def test_a_cache_makes_room_for_all_chunks_with_the_first() -> None:
    cache: Any = SimpleNamespace(length=0)
    whole = Step(StepInputs(cache=cache, blocks=range(1), hidden=torch.ones(1, 100, 1)), None)
    found = []
    for size in (64, 30, 6):
        chunk = whole.chunk(size)
        found.append((chunk.hidden.shape[1], chunk.goes_on, chunk.to_come))
        whole.add(chunk, SpanOutputs(hidden=chunk.hidden))
    assert found == [(64, False, 36), (30, True, 6), (6, True, 0)]


async def test_an_image_stays_whole() -> None:
    masks = packed([""], [torch.ones(1, 3, 3, dtype=torch.bool)])
    cache: Any = SimpleNamespace(length=0)
    inputs = StepInputs(cache=cache, blocks=range(1), hidden=torch.ones(1, 3, 1), layer_masks=masks)
    assert Step(inputs, None).least == 3
    assert Step(replace(inputs, layer_masks=None), None).least == 1


async def test_padding_that_states_see_stays_whole_and_no_more() -> None:
    cache: Any = SimpleNamespace(length=0)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :5] = False
    whole = StepInputs(cache=cache, blocks=range(1), hidden=torch.ones(2, 9, 1), attention_mask=mask, has_states=True)
    step = Step(whole, None)
    assert step.least == 5
    step.add(chunk := step.chunk(5), SpanOutputs(hidden=chunk.hidden))
    assert step.least == 1
    assert Step(replace(whole, has_states=False), None).least == 1
