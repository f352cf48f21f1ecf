"""One output layer for many threads: each gets the logits of its own rows."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from swarm_plugins.web.engine.heads import SharedHead


class Held(nn.Linear):
    """Stops in its first product until it is let go; notes how many rows each had."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__(8, 32, bias=bias)
        self.rows: list[int] = []
        self.entered = threading.Event()
        self.go = threading.Event()

    def forward(self, input: Tensor) -> Tensor:
        self.rows.append(len(input))
        self.entered.set()
        assert self.go.wait(30)
        if input.isnan().any():
            raise ValueError("not a number")
        return super().forward(input)


def logits(head: SharedHead, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        found = head(hidden)
    assert isinstance(found, Tensor)
    return found


def together(head: SharedHead, inner: Held, inputs: list[Tensor], threads: ThreadPoolExecutor) -> list[object]:
    """Computes the first input, and the others while it is held."""
    first = threads.submit(logits, head, inputs[0])
    assert inner.entered.wait(30)
    others = [threads.submit(logits, head, one) for one in inputs[1:]]
    deadline = time.monotonic() + 30
    while len(head._waiting) < len(others):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    inner.go.set()
    return [one.exception(30) or one.result() for one in (first, *others)]


def test_those_that_wait_are_computed_together() -> None:
    inner = Held()
    inputs = [torch.randn(1, 1, 8), *torch.randn(6, 2, 1, 8)]
    with ThreadPoolExecutor(len(inputs)) as threads:
        found = together(SharedHead(inner), inner, inputs, threads)
    assert inner.rows == [1, 12]
    for hidden, one in zip(inputs, found, strict=True):
        assert isinstance(one, Tensor)
        torch.testing.assert_close(one, nn.functional.linear(hidden, inner.weight, inner.bias).detach())


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9])
def test_a_layer_without_bias_computes_the_same(rows: int) -> None:
    inner = Held(bias=False)
    inner.go.set()
    hidden = torch.randn(rows, 1, 8)
    found = logits(SharedHead(inner), hidden)
    assert found.is_contiguous()
    torch.testing.assert_close(found, nn.functional.linear(hidden, inner.weight).detach())


def test_a_failure_reaches_all_that_were_computed_together_and_nobody_later() -> None:
    inner = Held()
    head = SharedHead(inner)
    good, bad = torch.zeros(1, 1, 8), torch.full((1, 1, 8), float("nan"))
    with ThreadPoolExecutor(3) as threads:
        first, *others = together(head, inner, [good, bad, good], threads)
        assert isinstance(first, Tensor)
        assert [type(one) for one in others] == [ValueError, ValueError]
        assert logits(head, good).shape == (1, 1, 32)


@pytest.mark.parametrize(("rows", "with_gradients"), [(65, False), (2, True)])
def test_long_inputs_and_gradients_are_not_shared(rows: int, with_gradients: bool) -> None:
    inner = Held()
    inner.go.set()
    hidden = torch.randn(1, rows, 8, requires_grad=with_gradients)
    with torch.set_grad_enabled(with_gradients):
        found = SharedHead(inner)(hidden)
    assert found.requires_grad == with_gradients
    assert inner.rows == [1]
