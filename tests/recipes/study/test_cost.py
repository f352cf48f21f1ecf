from __future__ import annotations

import pytest

from recipes.study.cost import dense_at_equal_loss

COSTS = ("parameters", "latency_s", "latency_cpu_s", "tokens_per_s", "tokens_per_cpu_s")


def test_a_dense_model_of_equal_loss_lies_between_two_that_were_trained() -> None:
    losses = {"dense": 1.4, "dense-1.25x": 1.3, "dense-1.5x": 1.2, "pr-moe": 1.25, "standard": 1.1}
    sizes = {"dense": 1e6, "dense-1.25x": 2e6, "dense-1.5x": 8e6, "pr-moe": 3e6, "standard": 9e6}
    costs = {arm: dict.fromkeys(COSTS, size) for arm, size in sizes.items()}
    found = dense_at_equal_loss(losses, costs)
    assert found["pr-moe"]["loss"] == 1.25
    assert found["pr-moe"]["parameters"] == pytest.approx(4e6)  # halfway in the logarithm
    assert found["pr-moe"]["latency_s"] == pytest.approx(4e6)
    # Nothing is extrapolated.
    assert found["standard"]["parameters"] == 0
    assert "student-staged" not in found


def test_a_larger_model_that_is_worse_is_not_used() -> None:
    losses = {"dense": 1.4, "dense-1.25x": 1.2, "dense-1.5x": 1.25, "pr-moe": 1.3}
    sizes = {"dense": 1e6, "dense-1.25x": 4e6, "dense-1.5x": 9e6, "pr-moe": 3e6}
    costs = {arm: dict.fromkeys(COSTS, size) for arm, size in sizes.items()}
    assert dense_at_equal_loss(losses, costs)["pr-moe"]["parameters"] == pytest.approx(2e6)
