"""What is drawn from logits."""

from __future__ import annotations

import torch

from swarm_plugins.web.engine.processors import Sampler

LOGITS = torch.tensor([[0.0, float("-inf"), 2.0, -1.0, float("-inf"), 1.0, float("-inf")]])
NONE = torch.zeros(1, 0, dtype=torch.long)


def test_samples_follow_the_softmax() -> None:
    num = 20_000
    drawn = Sampler(seed=0)(NONE.expand(num, 0), LOGITS.expand(num, -1)).argmax(dim=1)
    shares = drawn.bincount(minlength=LOGITS.shape[1]) / num
    torch.testing.assert_close(shares, LOGITS[0].softmax(dim=0), rtol=0, atol=0.01)
    assert set(drawn.tolist()) == {0, 2, 3, 5}


def test_a_seed_repeats_its_draws() -> None:
    rows = LOGITS.expand(50, -1)
    first, again, other = (Sampler(seed)(NONE, rows).argmax(dim=1).tolist() for seed in (1, 1, 2))
    assert first == again != other
