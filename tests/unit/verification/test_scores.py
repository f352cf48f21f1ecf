"""Scores: honest differences pass, lies do not."""

from __future__ import annotations

import math

import pytest
import torch

from swarm_plugins.verification.scores import FORWARD, Comparison, coarsest

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
Y = X + 0.5 * torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


def how(precision: str = "float32", **options: object) -> Comparison:
    return Comparison(precision=precision, **{"is_mixture": False, **options})  # type: ignore[arg-type]


def wrong(output: torch.Tensor, precision: str = "float32", **options: object) -> bool:
    verdict = how(precision, **options).outputs(X, output, Y)
    assert verdict is not None
    return verdict.is_wrong


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


@pytest.mark.parametrize("answer", [X, 1.5 * Y, 0 * Y, Y.flip(0)], ids=["echo", "scaled", "zeros", "of another row"])
def test_a_rough_comparison_tells_what_has_little_to_do_with_the_answer(answer: torch.Tensor) -> None:
    assert wrong(answer, "bfloat16", is_mixture=True, is_rough=True)
    off = Y + 0.2 * (Y - X).flip(1)
    assert wrong(off, "bfloat16", is_mixture=True)
    assert not wrong(off, "bfloat16", is_mixture=True, is_rough=True)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.05])
def test_wrong_gradients_do_not_pass(factor: float) -> None:
    for is_mixture in (False, factor != 1.05):
        found = how(is_mixture=is_mixture)
        for verdict in (found.gradients(factor * Y, Y), found.parameters([factor * Y, X], [Y, X], hidden=Y)):
            assert verdict is not None
            assert verdict.is_wrong
    honest = how().parameters([Y, torch.zeros(3)], [Y, torch.zeros(3)], hidden=Y)
    assert honest is not None
    assert not honest.is_wrong


def test_a_gradient_of_nothing_but_rounding_errors_passes() -> None:
    noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    for here in (torch.zeros(4, 8), 1e-9 * noise.flip(0)):
        verdict = how().parameters([1e-7 * noise], [here], hidden=Y)
        assert verdict is not None
        assert not verdict.is_wrong


def test_what_a_rounding_of_the_inputs_changes_is_forgiven() -> None:
    output = Y.clone()
    output[0, 3] = X[0, 3]
    nudged = Y.clone()
    nudged[0, 3] += 0.5 * (output[0, 3] - Y[0, 3])
    for found, moved, expected in (
        (output, [], True),
        (output, [nudged], False),
        (output, [Y, nudged], False),
        (1.01 * Y, [nudged], True),
        (torch.full_like(Y, math.nan), [nudged], True),
    ):
        verdict = how().outputs(X, found, Y, moved)
        assert verdict is not None
        assert verdict.is_wrong == expected


def test_the_coarsest_type_decides() -> None:
    assert coarsest(["float32", "bfloat16", "none"]) == "bfloat16"
    assert coarsest(["float32", "float16", "rotated8"]) == "rotated8"
    assert coarsest(["float32", "none"]) == "float32"


def test_a_small_gain_shows_in_sixteen_bits() -> None:
    x = torch.randn(2, 24, 576, generator=torch.Generator().manual_seed(0))
    y = x + torch.randn(2, 24, 576, generator=torch.Generator().manual_seed(1))
    for precision, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        honest = y.to(dtype).float()
        assert not how(precision).outputs(x, honest, y).is_wrong  # type: ignore[union-attr]
        for factor in (1.01, 1.05):
            scaled = (y * factor).to(dtype).float()
            assert how(precision).outputs(x, scaled, y).is_wrong  # type: ignore[union-attr]


def test_over_many_blocks_more_tokens_of_a_mixture_may_be_off() -> None:
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))
    y = x + torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))
    output = y.clone()
    output[0, :30] = 0.0  # of 256 tokens
    for precision, num_blocks, expected in (("bfloat16", 8, False), ("bfloat16", 1, True), ("float32", 8, True)):
        verdict = how(precision, is_mixture=True, num_blocks=num_blocks).outputs(x, output, y)
        assert verdict is not None
        assert verdict.is_wrong == expected
    for deep in (8, 80, 800):
        assert how("bfloat16", is_mixture=True, num_blocks=deep).outputs(x, x, y).is_wrong  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("precision", "is_mixture", "needed"),
    [("bfloat16", True, 16), ("float32", True, 2), ("bfloat16", False, 1), ("float32", False, 1)],
)
def test_too_few_tokens_say_nothing_and_padding_does_not_count(precision: str, is_mixture: bool, needed: int) -> None:
    for count in (needed - 1, needed):
        mask = torch.arange(16).view(2, 8) < count
        found = how(precision, is_mixture=is_mixture, mask=mask)
        verdicts = (found.outputs(X, X, Y), found.gradients(X, Y), found.parameters([X], [Y], hidden=Y))
        assert [verdict is not None for verdict in verdicts] == [count == needed] * 3
        assert found.can_tell(X) == (count == needed)
