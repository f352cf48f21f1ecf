"""The tokens that are kept have the model's distribution, whatever the draft's is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm_plugins.speculation.choice import choose_greedy, choose_sampled

ROWS = 20_000
P = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0])
NEXT = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.5])


def logits() -> Tensor:
    return torch.stack((P, NEXT)).log().expand(ROWS, 2, 5)


def shares(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=5) / len(tokens)


@pytest.mark.parametrize(
    "q", [[0.2, 0.2, 0.2, 0.2, 0.2], [0.5, 0.2, 0.2, 0.1, 0.0], [0.0, 0.0, 0.0, 0.5, 0.5], [0.9, 0.05, 0.05, 0, 0]]
)
def test_sampled_tokens_have_the_distribution_of_the_model(q: list[float]) -> None:
    torch.manual_seed(0)
    of_draft = torch.tensor(q)
    drafts = torch.multinomial(of_draft, ROWS, replacement=True)[:, None]
    tokens, counts = choose_sampled(logits(), drafts, of_draft.expand(ROWS, 1, 5))
    assert (shares(tokens[:, 0]) - P).abs().max() < 0.02
    accepted = counts == 1
    if accepted.sum() > 1000:
        assert (shares(tokens[accepted, 1]) - NEXT).abs().max() < 0.04
    assert accepted.float().mean() == pytest.approx(float(torch.minimum(P, of_draft).sum()), abs=0.02)


@pytest.mark.parametrize("token", range(5))
def test_a_certain_draft_keeps_the_distribution(token: int) -> None:
    torch.manual_seed(0)
    tokens, counts = choose_sampled(logits(), torch.full((ROWS, 1), token), None)
    assert (shares(tokens[:, 0]) - P).abs().max() < 0.02
    assert counts.float().mean() == pytest.approx(float(P[token]), abs=0.02)


def test_without_drafts_the_next_token_is_drawn() -> None:
    torch.manual_seed(0)
    tokens, counts = choose_sampled(logits()[:, :1], torch.zeros(ROWS, 0, dtype=torch.long), None)
    assert (shares(tokens[:, 0]) - P).abs().max() < 0.02
    assert not counts.any()


def test_greedy_rows_keep_what_the_model_says_up_to_the_first_difference() -> None:
    said = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]), 5).float()
    tokens, counts = choose_greedy(said, torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]]))
    assert counts.tolist() == [3, 1, 0]
    assert tokens.tolist() == [[1, 2, 3, 4]] * 3
