"""Losses of the whole distribution, value and gradient, against sums that are written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError
from swarm_plugins.tuning.datums import Datum, LossCall, TextBounds, check_datums
from swarm_plugins.tuning.losses import LOSSES, Scores, settings_of

VOCABULARY = 7
TARGETS = torch.tensor([[2, 5], [0, 6], [1, 3]])
REFERENCE = torch.tensor([[0.5, 0.3], [0.2, 0.7], [0.25, 0.25]]).log()
WEIGHTS = torch.tensor([1.0, -0.5, 0.0])


def logits() -> Tensor:
    return torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def losses_of(name: str, values: Tensor, inputs: dict[str, Tensor], **settings: float) -> Tensor:
    everything = values.log_softmax(dim=1)
    targets = inputs["target_tokens"]
    logprobs = everything.gather(1, targets.view(len(targets), -1)).view(targets.shape)
    return LOSSES[name].compute(Scores(logprobs, everything), inputs, settings_of(name, settings))


def by_hand(name: str, row: list[float], tokens: list[int], reference: list[float]) -> float:
    total = sum(math.exp(one) for one in row)
    model = [math.exp(one) / total for one in row]
    if name == "entropy":
        return sum(one * math.log(one) for one in model)
    ours = [model[token] for token in tokens]
    theirs = [math.exp(one) for one in reference]
    ours, theirs = [*ours, 1 - sum(ours)], [*theirs, 1 - sum(theirs)]
    pairs = list(zip(theirs, ours, strict=True)) if name == "forward_kl" else list(zip(ours, theirs, strict=True))
    return sum(one * math.log(one / other) for one, other in pairs)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "entropy"])
def test_values_and_gradients(name: str) -> None:
    inputs = {"target_tokens": TARGETS, "logprobs": REFERENCE.double(), "weights": WEIGHTS}
    values = logits().requires_grad_()
    losses = losses_of(name, values, inputs)
    rows = zip(values.tolist(), TARGETS.tolist(), REFERENCE.tolist(), WEIGHTS.tolist(), strict=True)
    wanted = [weight * by_hand(name, row, tokens, known) for row, tokens, known, weight in rows]
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert torch.autograd.gradcheck(lambda one: losses_of(name, one, inputs), values)


def test_distances_are_zero_at_the_reference() -> None:
    everything = logits().log_softmax(dim=1)
    inputs = {"target_tokens": TARGETS, "logprobs": everything.gather(1, TARGETS)}
    for name in ("forward_kl", "reverse_kl"):
        values = logits().requires_grad_()
        losses = losses_of(name, values, inputs)
        losses.sum().backward()
        assert losses.abs().max() < 1e-12
        assert values.grad is not None
        assert values.grad.abs().max() < 1e-12


def test_a_reference_that_names_everything_stays_finite() -> None:
    inputs = {"target_tokens": TARGETS, "logprobs": torch.tensor([[0.5, 0.5]] * 3).log().double()}
    for name in ("forward_kl", "reverse_kl"):
        values = logits().requires_grad_()
        losses_of(name, values, inputs).sum().backward()
        assert values.grad is not None
        assert bool(values.grad.isfinite().all())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_entropy_is_rewarded_where_there_is_an_advantage(name: str) -> None:
    inputs = {
        "target_tokens": TARGETS[:, 0],
        "logprobs": REFERENCE[:, 0].double(),
        "advantages": torch.tensor([1.0, 0.0, -2.0]).double(),
    }
    values = logits()
    plain, rewarded = losses_of(name, values, inputs), losses_of(name, values, inputs, entropy_bonus=0.1)
    entropies = [-by_hand("entropy", row, [], []) for row in values.tolist()]
    wanted = [0.1 * entropies[0], 0.0, 0.1 * entropies[2]]
    assert (plain - rewarded).tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_tokens": torch.tensor([[2, 2], [0, 6], [1, 3]])}, "names a token twice"),
        ({"logprobs": torch.zeros(3, 2)}, "exponentials add up to 2, not to 1"),
        ({"logprobs": torch.full((3, 2), float("-inf"))}, "logprobs is NaN or infinite"),
        ({"weights": torch.ones(3, 2)}, r"weights must have \(3,\)"),
    ],
)
def test_references_that_are_refused(changed: dict[str, Any], message: str) -> None:
    inputs = {"target_tokens": TARGETS, "logprobs": REFERENCE, "weights": WEIGHTS, **changed}
    datum = Datum(torch.tensor([1, 2, 3]), inputs)
    with pytest.raises(ConfigError, match=message):
        check_datums([datum], LossCall.of("reverse_kl", {}), TextBounds(16, VOCABULARY))
