"""What autograd keeps of a batch, and for how long."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.client.training.autograd import run_batch
from swarm_plugins.client.training.batch import BatchCall


class Doubler:
    """A call whose blocks double what they get; like `BatchCall` it keeps what it has returned."""

    keep = True

    def __init__(self, hidden: torch.Tensor) -> None:
        self.inputs = SpanInputs(blocks=range(2), hidden=hidden)
        self.kept: list[SpanOutputs] = []

    def forward(self) -> SpanOutputs:
        hidden = self.inputs.hidden.detach()
        self.kept.append(SpanOutputs(hidden=hidden * 4, hidden_states=(hidden * 2,)))
        return self.kept[0]

    def backward(self, grads: SpanOutputs, *, needs_hidden: bool, needs: Any) -> list[torch.Tensor]:
        return [grads.hidden * 4 + grads.hidden_states[0] * 2]


def step() -> weakref.ref[Doubler]:
    """A forward with two outputs, and its backward; returns the call that both were made by."""
    hidden = torch.ones(1, 2, 4, requires_grad=True)
    call = Doubler(hidden)
    loop = cast(Any, SimpleNamespace(run=lambda work: work))
    outputs = run_batch(loop, cast(BatchCall, call))
    (outputs.hidden + outputs.hidden_states[0]).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.eq(6).all()
    return weakref.ref(call)


def test_a_step_with_several_outputs_is_freed() -> None:
    call = step()
    gc.collect()
    assert call() is None


@pytest.mark.parametrize("retains", [False, True])
def test_a_loss_that_is_held_after_the_backward_keeps_the_call_only_if_the_graph_is_kept(retains: bool) -> None:
    hidden = torch.ones(1, 2, 4, requires_grad=True)
    call = Doubler(hidden)
    known = weakref.ref(call)
    loop = cast(Any, SimpleNamespace(run=lambda work: work))
    loss = run_batch(loop, cast(BatchCall, call)).hidden.sum()
    del call
    loss.backward(retain_graph=retains)
    gc.collect()
    assert (known() is not None) == retains
    if retains:
        loss.backward()
        assert hidden.grad is not None
        assert hidden.grad.eq(8).all()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert known() is None


def test_what_a_loss_scaler_made_too_large_asks_no_server() -> None:
    hidden = torch.ones(1, 2, 4, requires_grad=True)
    call = Doubler(hidden)
    call.backward = pytest.fail  # type: ignore[assignment]
    loop = cast(Any, SimpleNamespace(run=lambda work: work))
    with torch.autocast("cpu", torch.float16):
        outputs = run_batch(loop, cast(BatchCall, call))
    (outputs.hidden * torch.inf).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()
