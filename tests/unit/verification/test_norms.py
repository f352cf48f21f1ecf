"""Answers of an odd length are checked whatever the rate."""

from __future__ import annotations

from pathlib import Path

import torch
from lies_kit import CHECKED, IDS, verifier_of, with_liar

from kits.liars import Liar
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.norms import NormRanges, norm_ratio


def test_ranges_are_learnt_before_anything_is_odd() -> None:
    ranges = NormRanges()
    for ratio in (1.0, 1.2, 1.1):
        ranges.learn("a", ratio)
        assert not ranges.is_odd("a", 9.0)
    ranges.learn("a", 1.3)
    assert [ranges.is_odd("a", ratio) for ratio in (0.6, 0.7, 1.9, 2.0, float("nan"))] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert not ranges.is_odd("b", 9.0)
    assert norm_ratio(torch.full((1, 2, 3), 2.0), torch.ones(1, 2, 3)) == 2.0


def test_ratios_of_half_precision_neither_overflow_nor_vanish() -> None:
    for size in (6e3, 1e-7):  # the norm is above the largest number of float16; that of 1e-30 is zero
        given = torch.full((1, 64, 64), size).half()
        assert norm_ratio(given * 2, given) == 2.0
    assert norm_ratio(given, torch.zeros_like(given)) > 1e6
    assert norm_ratio(torch.zeros_like(given), torch.zeros_like(given)) == 0.0


def test_a_sleeper_with_an_odd_answer_is_checked_before_it_is_used(llama: Path, cache: Path) -> None:
    liar = Liar("scaled", factor=3.0, honest_calls=12)
    with with_liar(llama, liar, config=CHECKED) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(llama, connection=swarm.connection)
        verifier_of(model).checker.chance = lambda: 0.999  # nothing is checked after the first calls
        with torch.no_grad():
            outputs = [model(input_ids=IDS, use_cache=False).logits for _ in range(14)]
        assert all(one.equal(outputs[0]) for one in outputs)
        assert liar.calls == 13
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[1]]
