"""Eager attention: memory is bounded whatever the length, results are those of the whole matrix of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, states
from torch import Tensor

from swarm_plugins.blocks import Span, SpanInputs, StepInputs
from swarm_plugins.blocks import eager as eager_module
from swarm_plugins.blocks.eager import EAGER
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError
from swarm_plugins.testing.models import save_tiny

LENGTH = 40


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> Span:
    return load_span(Checkpoint.open(str(save_tiny("gpt_oss", tmp_path_factory.mktemp("model")))), BLOCKS)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each matrix of scores that is made."""
    made: list[int] = []
    plain = eager_module.eager_attention

    def watched(kind: type[torch.nn.Module]) -> Callable[..., Any]:
        def attend(module: Any, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Any:
            made.append(query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4)
            return plain(kind)(module, query, key, *rest, **kwargs)

        return attend

    monkeypatch.setattr(eager_module, "eager_attention", watched)
    return made


def mask() -> Tensor:
    padding = torch.ones(3, LENGTH, dtype=torch.bool)
    padding[1, :7] = False
    return padding


def forward(span: Span) -> Tensor:
    return span.forward(SpanInputs(blocks=BLOCKS, hidden=states(3, LENGTH, WIDTH), attention_mask=mask())).hidden


def gradient(span: Span) -> Tensor:
    hidden = states(3, LENGTH, WIDTH).requires_grad_()
    output = span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden, attention_mask=mask())).hidden
    [found] = torch.autograd.grad(output.square().mean(), [hidden])
    return found


def packed_steps(span: Span) -> Tensor:
    sessions = [span.new_cache(rows, BLOCKS) for rows in (3, 1)]
    outputs = []
    for length in (LENGTH, 1):
        steps = [
            StepInputs(cache=session, blocks=BLOCKS, hidden=states(session.batch_size, length, WIDTH))
            for session in sessions
        ]
        outputs += [output.hidden.flatten() for output in span.step(steps)]
    for session in sessions:
        session.close()
    return torch.cat(outputs)


@pytest.mark.parametrize("run", [forward, gradient, packed_steps])
def test_cuts_give_what_the_whole_gives(
    span: Span, scores: list[int], monkeypatch: pytest.MonkeyPatch, run: Callable[[Span], Tensor]
) -> None:
    assert span._cut.attention == EAGER
    whole = run(span).detach()
    largest = max(scores)
    for limit in (largest // 4, largest // 50):
        scores.clear()
        monkeypatch.setattr(eager_module, "MAX_SCORE_BYTES", limit)
        # Products of other shapes round in another order.
        torch.testing.assert_close(run(span).detach(), whole, rtol=1e-4, atol=1e-5)
        assert max(scores) <= limit


def test_a_graph_keeps_no_more_scores_than_one_cut(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved_bytes() -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hidden = states(1, 200, WIDTH).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden)).hidden
        del output
        return sum(sizes.values())

    whole = saved_bytes()
    heads = int(span.model.config.num_attention_heads)
    matrix = heads * 200 * 200 * 4
    monkeypatch.setattr(eager_module, "MAX_SCORE_BYTES", matrix // 10)
    assert saved_bytes() < whole - len(BLOCKS) * matrix


def test_scores_of_one_token_over_the_budget_are_refused(span: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_module, "MAX_SCORE_BYTES", 100)
    with pytest.raises(
        CapacityError, match=rf"attention of one token to {LENGTH} tokens takes \d+ bytes .* limit is 100"
    ):
        forward(span)
