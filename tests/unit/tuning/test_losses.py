"""Losses of training calls against formulas written out, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError
from swarm_plugins.tuning.losses import LOSSES, Scores, find_loss, settings_of

LOGPROBS = [-1.0, -0.5, -3.0]
OLD = [-1.2, -1.5, -1.0]
ADVANTAGES = [1.0, -0.5, 2.0]


def clipped(ratio: float, advantage: float, low: float = 0.8, high: float = 1.2) -> tuple[float, float]:
    """PPO's loss at one position, and its derivative by the ratio."""
    bounded = min(max(ratio, low), high)
    if ratio * advantage <= bounded * advantage:
        return -ratio * advantage, -advantage
    return -bounded * advantage, 0.0


def by_hand(name: str) -> list[tuple[float, float]]:
    """Loss and gradient by the log probability, at each position."""
    of_text = math.exp(sum(new - old for new, old in zip(LOGPROBS, OLD, strict=True)) / 3)
    found = []
    for new, old, advantage in zip(LOGPROBS, OLD, ADVANTAGES, strict=True):
        ratio = math.exp(new - old)
        if name == "cross_entropy":
            found.append((-new, -1.0))
        elif name == "importance_sampling":
            found.append((-ratio * advantage, -ratio * advantage))
        elif name == "ppo":
            value, slope = clipped(ratio, advantage)
            found.append((value, slope * ratio))
        elif name == "cispo":
            weight = min(max(ratio, 0.0), 4.0) * advantage
            found.append((-weight * new, -weight))
        elif name == "dro":
            found.append((-(new * advantage - 0.025 * (new - old) ** 2), -(advantage - 0.05 * (new - old))))
        else:
            value, slope = clipped(of_text, advantage)
            found.append((value, slope * of_text))
    return found


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_values_and_gradients(name: str) -> None:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    inputs = {"logprobs": torch.tensor(OLD).double(), "advantages": torch.tensor(ADVANTAGES).double()}
    losses = LOSSES[name].compute(Scores(logprobs, torch.empty(0)), inputs, settings_of(name, {}))
    losses.sum().backward()
    wanted, slopes = zip(*by_hand(name), strict=True)
    torch.testing.assert_close(losses.detach(), torch.tensor(wanted).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.tensor(slopes).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_bounds_of_a_position_win_over_the_settings(name: str) -> None:
    loss, ratio = find_loss(name), torch.tensor([0.5, 0.5, 2.0, 2.0])
    inputs = {"logprobs": torch.zeros(4), "advantages": torch.tensor([-1.0, -1.0, 1.0, 1.0])}
    inputs |= {"clip_low_threshold": torch.tensor([0.25, 0.75, 0.0, 0.0])}
    inputs |= {"clip_high_threshold": torch.tensor([3.0, 3.0, 1.5, 3.0])}
    if name == "gspo":
        ratio = torch.full((4,), 1.0)  # of the text, the mean of the logarithms
        inputs["clip_low_threshold"][1], inputs["clip_high_threshold"][2] = 1.5, 0.5
    assert {"clip_low_threshold", "clip_high_threshold"} <= {*loss.optional}
    logprobs = torch.tensor([0.5, 0.5, 2.0, 2.0]).log()
    found = loss.compute(Scores(logprobs, torch.empty(0)), inputs, settings_of(name, {}))
    weight = ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    torch.testing.assert_close(found, -weight * inputs["advantages"] * (logprobs if name == "cispo" else 1))


def test_weights_may_be_negative_or_for_several_targets() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -4.0]])
    weights = torch.tensor([[1.0, 0.5], [-2.0, 0.0]])
    losses = LOSSES["cross_entropy"].compute(Scores(logprobs, torch.empty(0)), {"weights": weights}, {})
    assert losses.tolist() == [[1.0, 1.0], [-1.0, 0.0]]


def test_only_masked_positions_make_the_ratio_of_a_text() -> None:
    inputs: dict[str, Tensor] = {
        "logprobs": torch.tensor([-1.0, -1.0, -9.0]),
        "advantages": torch.ones(3),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    losses = LOSSES["gspo"].compute(
        Scores(torch.tensor([-1.0, -0.9, 0.0]), torch.empty(0)), inputs, settings_of("gspo", {})
    )
    torch.testing.assert_close(losses, torch.full((3,), -math.exp(0.05)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("stable_reinforce", {}, "use loss_fn=importance_sampling"),
        ("huber", {}, "unknown loss_fn 'huber': known are cross_entropy"),
        ("importance_sampling", {"clip": 1.0}, "has no setting 'clip': it has entropy_bonus"),
        ("dro", {"beta": float("nan")}, "beta of dro must be a finite number"),
        ("dro", {"beta": "much"}, "beta of dro must be a finite number"),
        ("cross_entropy", {"beta": 1.0}, "it has none"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(name, settings)
    assert name not in LOSSES or find_loss(name)
