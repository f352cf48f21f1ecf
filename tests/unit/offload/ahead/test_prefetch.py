"""What is guessed, for which layers, from what: with routers that can be seen through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm_plugins.errors import NumericError
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.offload.ahead.prefetch import LOOK_AHEAD, _Predictor

NUM_LAYERS, NUM_EXPERTS = 5, 6


@dataclass
class Notes:
    """Stands in for a cache: remembers what it is told."""

    config: OffloadConfig = field(default_factory=lambda: OffloadConfig(prefetch=True))
    num_experts: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(NUM_LAYERS), NUM_EXPERTS))
    on_asked: Callable[[int], bool] | None = None
    guesses: list[tuple[int, list[int]]] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        self.guesses.append((layer, list(experts)))

    def is_complete(self, layer: int) -> bool:
        return layer in self.complete

    def count_tokens(self, num_tokens: int) -> None:
        pass


class Largest(nn.Module):
    """Chooses the expert of the largest input."""

    dtype = torch.float32

    def forward(self, hidden: Tensor) -> Any:
        if hidden.dtype != self.dtype:
            raise RuntimeError("as a product of two types does")
        if not hidden.isfinite().all():
            raise NumericError("as the routers of PR-MoE do")
        weights, chosen = hidden.topk(1)
        return hidden, weights, chosen


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def walk(notes: Notes) -> Callable[[Callable[[int], Tensor]], None]:
    predictor = _Predictor(notes)  # type: ignore[arg-type]
    notes.on_asked = predictor.predict
    routers = [Largest().eval() for _ in range(NUM_LAYERS)]
    for layer, router in enumerate(routers):
        router.register_forward_pre_hook(predictor.hook(layer), with_kwargs=True)

    def walk(hidden: Callable[[int], Tensor]) -> None:
        notes.guesses.clear()
        for layer, router in enumerate(routers):
            router(hidden(layer))
            predictor.predict(layer)

    return walk


def unit(place: int) -> Tensor:
    return nn.functional.one_hot(torch.tensor([place]), NUM_EXPERTS).float()


def test_each_layer_is_guessed_twice_the_nearer_one_first(notes: Notes, walk: Any) -> None:
    for _ in range(2):
        walk(lambda layer: unit(3))
    assert LOOK_AHEAD == 2
    assert [layer for layer, _ in notes.guesses] == [1, 2, 2, 3, 3, 4, 4]
    assert all(experts == [3] for _, experts in notes.guesses)


def test_what_layers_add_to_every_token_is_learnt(notes: Notes, walk: Any) -> None:
    # Layer after layer the next expert is chosen: its input, as it is, always says the one before.
    for _ in range(2):
        walk(unit)
    assert notes.guesses == [(layer, [layer]) for layer in (1, 2, 2, 3, 3, 4, 4)]


def test_what_one_token_adds_moves_the_mean_a_little(notes: Notes, walk: Any) -> None:
    # The twentieth is one of those that the mean is taken of.
    for _ in range(19):
        walk(lambda layer: unit(3))
    walk(unit)
    walk(lambda layer: unit(3))
    assert all(experts == [3] for _, experts in notes.guesses)


def test_a_layer_that_is_all_there_is_passed_over(notes: Notes, walk: Any) -> None:
    walk(lambda layer: unit(3))
    notes.complete = {2}
    walk(lambda layer: unit(3))
    assert notes.guesses == [(layer, [] if layer == 2 else [3]) for layer in (1, 2, 2, 3, 3, 4, 4)]


def test_while_all_layers_are_there_nothing_is_guessed(notes: Notes, walk: Any) -> None:
    walk(lambda layer: unit(3))
    notes.complete = set(range(NUM_LAYERS))
    walk(lambda layer: unit(3))
    assert not notes.guesses
    # A cache may be emptied.
    notes.complete = set()
    walk(lambda layer: unit(3))
    assert [layer for layer, _ in notes.guesses] == [1, 2, 2, 3, 3, 4, 4]


def test_a_prompt_is_no_measure(notes: Notes, walk: Any) -> None:
    for _ in range(2):
        walk(lambda layer: unit(3))
    walk(lambda layer: unit(layer).repeat(9, 1))
    assert not notes.guesses
    walk(lambda layer: unit(3))
    assert all(experts == [3] for _, experts in notes.guesses)


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_pass_that_overflowed_leaves_no_trace(notes: Notes, walk: Any, odd: float, num_before: int) -> None:
    expected = [(layer, [layer]) for layer in (1, 2, 2, 3, 3, 4, 4)]
    for _ in range(num_before):
        walk(unit)
    with pytest.raises(NumericError):
        walk(lambda layer: torch.full((1, NUM_EXPERTS), odd) if layer == 2 else unit(layer))
    for _ in range(max(1, 2 - num_before)):
        walk(unit)
    assert notes.guesses == expected


def test_what_overflows_when_the_mean_is_added_is_not_guessed(notes: Notes, walk: Any) -> None:
    largest = torch.finfo(torch.float32).max
    walk(lambda layer: largest * unit(3) if layer == 1 else unit(3))
    # Its input and the mean are too much for layer 1, and only in this pass.
    walk(lambda layer: largest * unit(3) if layer < 2 else unit(3))
    assert notes.guesses[0] == (1, [])
    walk(lambda layer: unit(3))
    assert notes.guesses[0] == (1, [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_types_may_change_from_pass_to_pass(
    notes: Notes, walk: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        walk(unit)
    monkeypatch.setattr(Largest, "dtype", dtype)
    walk(lambda layer: unit(layer).to(dtype).repeat(3, 1))
    walk(lambda layer: unit(layer).to(dtype).repeat(3, 1))
    assert notes.guesses == [(layer, [layer]) for layer in (1, 2, 2, 3, 3, 4, 4)]
