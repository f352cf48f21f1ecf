"""States of fixed size, of convolutions and recurrences, follow a session's changes as keys and values do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from type_models import save_type

from swarm_plugins.block_io import PAGE_TOKENS
from swarm_plugins.blocks import KVCache, Span, StepInputs, load_span
from swarm_plugins.blocks.kv import RewindError
from swarm_plugins.blocks.own_layers import OwnState
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError, ConfigError

BLOCKS = range(2)
WIDTH = 32


@pytest.fixture(scope="module", params=["mamba", "mamba2", "minimax_m3_vl_text"])
def span(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Span]:
    """Mamba of transformers takes several tokens behind cached ones wrongly: they run one by one.

    Sparse attention of MiniMax M3 has cache layers of its own kind, whose states grow with the tokens.
    """
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param.startswith("mamba"):
        _save_mamba(request.param, directory)
    else:
        save_type(request.param, directory)
    span = load_span(Checkpoint.open(str(directory)), BLOCKS)
    yield span
    span.close()


def _save_mamba(model_type: str, directory: Path) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 1} if model_type == "mamba2" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **heads))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(directory)


def hidden(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(span: Span, cache: KVCache, new: Tensor) -> Tensor:
    (outputs,) = span.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=new)])
    return outputs.hidden


def opened(span: Span, tokens: Tensor) -> KVCache:
    cache = span.new_cache(tokens.shape[0], BLOCKS)
    step(span, cache, tokens)
    return cache


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5), (2, 1, 1, 3)])
def test_steps_of_any_size_equal_the_whole(span: Span, sizes: tuple[int, ...]) -> None:
    whole = hidden(2, 7)
    cache = span.new_cache(2, BLOCKS)
    found = torch.cat([step(span, cache, part) for part in whole.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(found, step(span, span.new_cache(2, BLOCKS), whole), rtol=1e-4, atol=1e-5)
    assert cache.length == 7


def test_rows_are_selected_and_forks_go_their_own_way(span: Span) -> None:
    tokens, new = hidden(3, 4), hidden(2, 1, seed=1)
    cache = opened(span, tokens)
    fork = cache.fork()
    cache.select([2, 0])
    torch.testing.assert_close(step(span, cache, new), step(span, opened(span, tokens[[2, 0]]), new))
    again = hidden(3, 1, seed=2)
    torch.testing.assert_close(step(span, fork, again), step(span, opened(span, tokens), again))


def test_a_session_goes_back_by_one_step_and_no_further(span: Span) -> None:
    tokens, new = hidden(1, 4), hidden(1, 1, seed=1)
    cache = opened(span, tokens)
    first = step(span, cache, new)
    cache.crop(4)
    assert torch.equal(step(span, cache, new), first)
    with pytest.raises(RewindError, match=r"cannot crop to 3 tokens of 5: .* at 4 tokens"):
        cache.crop(3)
    cache.crop(0)
    assert torch.equal(step(span, cache, tokens), step(span, span.new_cache(1, BLOCKS), tokens))


def test_parts_of_a_step_are_taken_back_together(span: Span) -> None:
    tokens, new = hidden(1, 4), hidden(1, 5, seed=1)
    cache = opened(span, tokens)
    for part, goes_on in ((new[:, :2], False), (new[:, 2:3], True), (new[:, 3:], True)):
        span.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=part, goes_on=goes_on)])
    assert cache.length == 9
    cache.crop(4)
    torch.testing.assert_close(step(span, cache, new), step(span, opened(span, tokens), new))


def test_no_more_than_two_of_each_state_are_kept(span: Span) -> None:
    """As the budget counts them."""
    cache = opened(span, hidden(1, 4))
    step(span, cache, hidden(1, 1))
    cache.reserve(1)
    _, before = cache._before
    assert before is cache.states


def test_a_step_that_fails_leaves_the_states_as_they_were(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, new = hidden(1, 4), hidden(1, 2, seed=1)
    cache = opened(span, tokens)
    run, calls = span._cut.step, []

    def fails(*args: object, **kwargs: object) -> object:
        calls.append(args)
        run(*args, **kwargs)  # type: ignore[arg-type]
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(span._cut, "step", fails)
        with pytest.raises(ZeroDivisionError):
            step(span, cache, new)
    assert calls
    assert cache.length == 4
    torch.testing.assert_close(step(span, cache, new), step(span, opened(span, tokens), new))


def test_padding_behind_cached_tokens_is_refused(span: Span) -> None:
    cache = opened(span, hidden(1, 4))
    mask = torch.tensor([[True] * 4 + [False, True]])
    with pytest.raises(ConfigError, match="send the whole prompt with that"):
        span.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden(1, 2), attention_mask=mask)])


def test_states_do_not_hold_the_prompt_that_they_are_cut_out_of() -> None:
    layer = SimpleNamespace(kept={"buffer": torch.zeros(1, 100, 4)[:, 98:]}, whole=torch.ones(2))
    state = OwnState(layer)
    state.compact()
    assert layer.kept["buffer"].untyped_storage().nbytes() == 2 * 4 * 4
    assert state.nbytes == 2 * 4 * 4 + 2 * 4


def test_states_are_counted_in_the_budget(span: Span) -> None:
    used = span.pool.used_bytes
    cache = span.new_cache(1, BLOCKS)
    assert cache.num_bytes == 0, "before its first tokens"
    step(span, cache, hidden(1, 40))
    step(span, cache, hidden(1, 2))
    one = PAGE_TOKENS * span.spec.kv_token_bytes + span.spec.kv_row_bytes
    assert cache.num_bytes == span.pool.used_bytes - used == one > 0
    # The last step's are kept beside them.
    assert 0 < 2 * sum(state.nbytes for state in cache.states.values()) <= one
    cache.select([0, 0, 0])
    assert cache.num_bytes == 3 * one
    free, span.pool.budget_bytes = span.pool.budget_bytes, span.pool.used_bytes
    try:
        with pytest.raises(CapacityError):
            cache.fork()
    finally:
        span.pool.budget_bytes = free
    cache.close()
    assert span.pool.used_bytes == used
