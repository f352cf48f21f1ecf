"""Scores: honest differences pass, lies do not."""

from __future__ import annotations

import math

import pytest
import torch

from swarm_plugins.verification.scores import (
    FORWARD,
    coarsest,
    compare_gradients,
    compare_outputs,
    compare_parameters,
    is_conclusive,
)

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
Y = X + 0.5 * torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


def wrong(output: torch.Tensor, precision: str = "float32", **options: object) -> bool:
    return compare_outputs(X, output, Y, precision, **{"is_mixture": False, **options}).is_wrong  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", FORWARD)
def test_rounding_passes(precision: str) -> None:
    types = {"float32": torch.float32, "float16": torch.float16}
    assert not wrong(Y.to(types.get(precision, torch.bfloat16)).float(), precision)


def test_lies_do_not_pass() -> None:
    assert wrong(1.01 * Y)
    assert wrong(X)
    assert wrong(X, "bfloat16")
    assert wrong(torch.full_like(Y, math.nan))


def test_padding_does_not_count() -> None:
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 2:5] = False  # two cached tokens, then the new ones
    output = Y.clone()
    output[1, 0:3] = 7.0
    assert wrong(output)
    assert not wrong(output, mask=mask)


def test_one_token_of_a_mixture_may_have_gone_to_another_expert() -> None:
    output = Y.clone()
    output[0, 3] = 0.0
    assert wrong(output)
    assert not wrong(output, is_mixture=True)
    output[0, 4] = 0.0
    assert wrong(output, is_mixture=True)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.05])
def test_wrong_gradients_do_not_pass(factor: float) -> None:
    assert compare_gradients(factor * Y, Y, "float32", is_mixture=False).is_wrong
    assert compare_parameters([factor * Y, X], [Y, X], "float32").is_wrong
    assert not compare_parameters([Y, torch.zeros(3)], [Y, torch.zeros(3)], "float32").is_wrong


def test_the_coarsest_type_decides() -> None:
    assert coarsest(["float32", "bfloat16", "none"]) == "bfloat16"
    assert coarsest(["float32", "float16", "int8"]) == "int8"
    assert coarsest(["float32", "none"]) == "float32"


def test_a_small_gain_shows_in_sixteen_bits() -> None:
    x = torch.randn(2, 24, 576, generator=torch.Generator().manual_seed(0))
    y = x + torch.randn(2, 24, 576, generator=torch.Generator().manual_seed(1))
    for precision, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        honest = y.to(dtype).float()
        assert not compare_outputs(x, honest, y, precision, is_mixture=False).is_wrong
        for factor in (1.01, 1.05):
            scaled = (y * factor).to(dtype).float()
            assert compare_outputs(x, scaled, y, precision, is_mixture=False).is_wrong


def test_over_many_blocks_more_tokens_of_a_mixture_may_be_off() -> None:
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))
    y = x + torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))
    output = y.clone()
    output[0, :30] = 0.0  # of 256 tokens
    for precision, num_blocks, expected in (("bfloat16", 8, False), ("bfloat16", 1, True), ("float32", 8, True)):
        verdict = compare_outputs(x, output, y, precision, is_mixture=True, num_blocks=num_blocks)
        assert verdict.is_wrong == expected
    for deep in (8, 80, 800):
        assert compare_outputs(x, x, y, "bfloat16", is_mixture=True, num_blocks=deep).is_wrong


def test_few_tokens_of_a_mixture_say_nothing_in_16_bits() -> None:
    assert not is_conclusive("bfloat16", 15, is_mixture=True)
    assert is_conclusive("bfloat16", 16, is_mixture=True)
    assert is_conclusive("float32", 1, is_mixture=True)
    assert is_conclusive("bfloat16", 1, is_mixture=False)
