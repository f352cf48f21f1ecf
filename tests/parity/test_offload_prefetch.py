"""Speculative loading changes only what is read when."""

from __future__ import annotations

import copy
import functools
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import SETTINGS, Toys, tokens
from torch import nn

from swarm_plugins.errors import NumericError
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.ahead.prefetch import MAX_ROWS, _Predictor
from swarm_plugins.offload.stats import OffloadStats

BUDGET_BYTES = 150_000


def load(directory: Path, *, prefetch: Any) -> Any:
    return load_offloaded(directory, OffloadConfig(fast_bytes=BUDGET_BYTES, prefetch=prefetch))


def generate(model: Any, length: int = 12) -> torch.Tensor:
    return model.generate(tokens(1), max_new_tokens=length, do_sample=False, eos_token_id=None)


def stats_of(model: Any) -> OffloadStats:
    # Readers may still be at work on a last guess.
    time.sleep(0.01)
    return model.offload_stats()


@pytest.mark.parametrize("family", SETTINGS)
def test_tokens_are_the_same_and_guesses_are_made(toys: Toys, family: str) -> None:
    guessing, plain = load(toys(family), prefetch=True), load(toys(family), prefetch=False)
    assert torch.equal(generate(guessing), generate(plain))
    assert stats_of(guessing).guesses > 0
    assert stats_of(plain).guesses == 0


def test_guesses_find_more_than_chance(toys: Toys) -> None:
    model = load(toys("mixtral"), prefetch=True)
    generate(model, 40)
    stats = stats_of(model)
    # Two of six at random: a third.
    assert stats.recall > 0.4
    assert stats.guesses_used <= stats.guesses


def test_nothing_is_guessed_while_training(toys: Toys) -> None:
    model = load(toys("mixtral"), prefetch=True).train()
    with torch.no_grad():
        for _ in range(3):
            model(tokens(1, 1))
    assert stats_of(model).guesses == 0


def test_routers_are_asked_early_for_few_tokens_only(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(toys("mixtral"), prefetch=True)
    asked: list[int] = []
    monkeypatch.setattr(_Predictor, "_apply", lambda self, layer, *others: asked.append(layer) or ())
    for length in (MAX_ROWS + 1, MAX_ROWS, 1):
        asked.append(length)
        model(tokens(1, length))
    # Who follows whom was seen in the prompt.
    assert asked == [MAX_ROWS + 1, MAX_ROWS, 1, 2, 2, 1, 1, 2, 2]


def test_passes_after_one_that_overflowed_are_as_before(toys: Toys) -> None:
    model, ids = load(toys("prmoe"), prefetch=True), tokens(1, 1)
    for _ in range(3):  # who follows whom, and by how much, has to be seen
        expected = model(ids).logits
    overflow = model.model.layers[0].register_forward_hook(lambda module, given, output: output * torch.inf)
    with pytest.raises(NumericError):
        model(ids)
    overflow.remove()
    assert torch.equal(model(ids).logits, expected)


def test_guessing_draws_no_random_numbers_and_records_no_router_logits(toys: Toys) -> None:
    model = load(toys("mixtral"), prefetch=True)
    state = torch.get_rng_state()
    model(tokens(1, 1))  # what the routers are called with has to be seen once
    output = model(tokens(1, 1), output_router_logits=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(output.router_logits) == model.config.num_hidden_layers
    assert stats_of(model).guesses > 0


def test_tokens_and_passes_are_counted(toys: Toys) -> None:
    model = load(toys("mixtral"), prefetch=False)
    model(tokens(2, 5))
    model(tokens(1, 1))
    stats = stats_of(model)
    assert (stats.tokens, stats.passes) == (11, 2)
    assert sum(stats.uses[0]) <= 12


@pytest.mark.parametrize("prefetch", [True, False])
def test_no_history_of_a_pass_is_kept(toys: Toys, prefetch: bool) -> None:
    model = load(toys("mixtral"), prefetch=prefetch)
    model(tokens(1, 1))  # who follows whom has to be seen once
    kept: list[weakref.ref[torch.Tensor]] = []

    def stop(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        assert arguments[0].requires_grad
        kept.append(weakref.ref(arguments[0]))
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.gate.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(1, 1))
    hook.remove()
    gc.collect()
    assert kept[0]() is None


def test_a_copy_guesses_with_its_own_routers_and_the_original_may_go(toys: Toys) -> None:
    model = load(toys("mixtral"), prefetch=True)
    generate(model)
    twin = copy.deepcopy(model)
    router = weakref.ref(model.model.layers[1].mlp.gate)
    asked: list[nn.Module] = []

    def note(module: nn.Module, *others: Any) -> Any:
        asked.append(module)
        return type(module).forward(module, *others)

    for one in (model, twin):
        for layer in one.model.layers:
            layer.mlp.gate.forward = functools.partial(note, layer.mlp.gate)
    for one in (twin, model, twin):
        generate(one, 2)
        asked.clear()
        generate(one)
        gates = [layer.mlp.gate for layer in one.model.layers]
        assert len(asked) > 3 * 12, "more than the calls of the model itself"
        assert all(any(gate is found for gate in gates) for found in asked)
    asked.clear()
    del model, one, layer, gates
    gc.collect()
    assert router() is None


class MovingRouter(nn.Module):
    """A router that gets something new with each token."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden: torch.Tensor, state: torch.Tensor | None = None) -> Any:
        return self.router(hidden)


def test_a_router_that_gets_something_else_each_time_is_left_alone(toys: Toys) -> None:
    model = load(toys("mixtral"), prefetch=False)
    cache = model.model.layers[0].mlp.experts._loans._cache
    routers = {layer: MovingRouter(model.model.layers[layer].mlp.gate).eval() for layer in range(3)}
    predictor = _Predictor(cache)
    cache.on_asked = predictor.predict
    for layer, router in routers.items():
        router.register_forward_pre_hook(predictor.hook(layer), with_kwargs=True)
    for _ in range(2):
        for router in routers.values():
            router(torch.ones(1, 32), torch.ones(1))
    assert predictor._unfit == {0, 1, 2}
    routers[0](torch.ones(1, 32), torch.ones(1))
    assert not predictor.predict(0)
    cache.close()
