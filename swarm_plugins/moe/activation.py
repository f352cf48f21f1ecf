"""Gate and activation of fused experts, and their gradient from the input alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.integrations.moe import use_experts_implementation

from swarm_plugins.moe.dispatch import activate


@use_experts_implementation
class _Default(nn.Module):
    """Gets transformers' own gate."""

    _apply_gate: Any


class Activation:
    """An activation that has been computed once more, to take its gradient.

    Args:
        module: A family's experts.
        up: Results of the first product, ``[n, 2 F]`` (``[n, F]`` without a gate).
        trained: The activation's own parameters that get a gradient.
    """

    def __init__(self, module: Any, up: Tensor, trained: Sequence[Tensor] = ()) -> None:
        self._up = up
        self._trained = trained
        self._is_silu = _is_gated_silu(module)
        if self._is_silu:
            self._gate, self._factor = up.chunk(2, dim=-1)
            self._silu = functional.silu(self._gate)
            self.inner = self._silu * self._factor
            return
        self._up = up.detach().requires_grad_()
        with torch.enable_grad():
            self._graph = activate(module, self._up)
        self.inner = self._graph.detach()

    def gradient(self, grad: Tensor) -> list[Tensor]:
        """Returns the gradients of ``up`` and of the trained parameters; overwrites the one of the result."""
        if not self._is_silu:
            return list(torch.autograd.grad(self._graph, (self._up, *self._trained), grad))
        # As autograd does it, but written straight to the halves of the result: half the time.
        result = torch.empty_like(self._up)
        gate_grad, factor_grad = result.chunk(2, dim=-1)
        torch.mul(grad, self._silu, out=factor_grad)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(self._factor), self._gate, grad_input=gate_grad)
        return [result]


def trained_activation(module: Any) -> Sequence[nn.Parameter]:
    """Returns the activation's own trainable parameters; hardly any activation has some."""
    activation = getattr(module, "act_fn", None)
    return [one for one in activation.parameters() if one.requires_grad] if isinstance(activation, nn.Module) else ()


def gated_silu(gate: Tensor, factor: Tensor) -> Tensor:
    """Returns ``silu(gate) * factor``; keeps nothing but these two for the backward pass."""
    if torch.is_grad_enabled() and (gate.requires_grad or factor.requires_grad):
        result: Tensor = _GatedSilu.apply(gate, factor)  # type: ignore[no-untyped-call]
        return result
    return functional.silu(gate).mul_(factor)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(gate, factor)
        return functional.silu(gate).mul_(factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, factor = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * factor, gate), functional.silu(gate).mul_(grad)


def _is_gated_silu(module: Any) -> bool:
    return (
        module.has_gate
        and type(module)._apply_gate is _Default._apply_gate
        and isinstance(module.act_fn, nn.SiLU | SiLUActivation)
    )
