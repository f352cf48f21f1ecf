"""The experts implementation ``swarm_table``: tokens sorted by expert, products only for experts that have tokens.

Usable by every mixture of experts of transformers: ``experts_implementation="swarm_table"``. The sorted rows are
processed in chunks of consecutive experts: all products of one weight, then the activation, then the products of the
other. The activations of many rows would not fit a processor's caches between these steps; few rows would pay for an
activation per expert. The backward pass computes the activations again, from the one intermediate result that is kept.

Letters: ``T`` tokens, ``k`` experts for each, ``E`` experts, ``N = T k`` rows, ``n`` rows of a chunk, ``D`` width,
``F`` inner width, ``U`` outputs of the first product (``2 F`` with a gate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.moe.activation import Activation, trained_activation
from swarm_plugins.moe.dispatch import activate, combine, out_of_autocast
from swarm_plugins.moe.routing import Chunk, Routing
from swarm_plugins.weights.kernels.plain import are_few, product_of_few

FEW_APART = "few_rows_apart"
"""Attribute of experts that multiply few rows so."""
_CHUNK_ROWS = 256
"""At usual widths the activations of these rows stay in a core's cache, and products take longer than their calls."""


def run_table(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs fused experts on the tokens that are routed to them.

    The same inputs give the same bits. Gradients flow to hidden states, routing weights and parameters; a frozen
    parameter costs nothing, the others get one gradient each, written expert by expert. Under autocast products are
    formed in its type, as by a linear layer.

    Args:
        module: A family's experts; the flags of transformers' experts registry are honored.
        hidden_states: ``[T, D]``.
        top_k_index: Chosen experts, ``[T, k]``; indices beyond the last expert contribute nothing.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, D]``.
    """
    # Read once: PEFT computes a parameter with an adapter on it at each access.
    weights = _Weights.of(module)
    job = _Job(module, Routing(top_k_index, module.num_experts), hidden_states.dtype, _product_dtype(weights.up))
    scales = None if module.has_post_expert_norm else top_k_weights
    with out_of_autocast(hidden_states.device):
        if torch.is_grad_enabled():
            trained = trained_activation(module)
            result: Tensor = _Experts.apply(job, hidden_states, scales, *weights, *trained)  # type: ignore[no-untyped-call]
        else:
            result, _ = _run(job, hidden_states, job.sort(scales), weights, keep=False)
    if scales is None:
        # Rows of experts elsewhere are zero, but a norm may add to them.
        kept_weights = top_k_weights.masked_fill(top_k_index >= module.num_experts, 0.0)
        return combine(module, result, kept_weights, job.routing, hidden_states)
    return result


class _Weights(NamedTuple):
    """The parameters of fused experts, as stored."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> _Weights:
        """Reads them off a module."""
        up = "gate_up_proj" if module.has_gate else "up_proj"
        biases = (getattr(module, f"{up}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
        return cls(getattr(module, up), module.down_proj, *biases)


class _Job(NamedTuple):
    """What a pass needs besides tensors."""

    module: Any
    routing: Routing
    dtype: torch.dtype
    """Of hidden states."""
    product_dtype: torch.dtype

    @property
    def has_few_apart(self) -> bool:
        """Whether products of few rows are formed in another way; see `FewRowsKernel`."""
        return getattr(self.module, FEW_APART, False) and not self.module.is_transposed

    def columns(self, weight: Tensor) -> Tensor:
        """Returns a view of a weight, or of its gradient, as ``[E, in, out]``."""
        return weight if self.module.is_transposed else weight.transpose(1, 2)

    def sort(self, scales: Tensor | None) -> Tensor | None:
        """Returns the routing weights ``[T, k]`` of the sorted rows, ``[N, 1]``."""
        return None if scales is None else scales.reshape(-1, 1).index_select(0, self.routing.order)

    def room(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Returns ``[N, width]`` for sorted rows: zero where they belong to experts elsewhere, otherwise undefined."""
        num_all = self.routing.order.shape[0]
        make = like.new_empty if self.routing.num_rows == num_all else like.new_zeros
        return make(num_all, width, dtype=dtype)


def _product_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    # Autocast leaves double precision alone.
    is_cast = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else weight.dtype


def _run(
    job: _Job, hidden: Tensor, sorted_scales: Tensor | None, weights: _Weights, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the result, and the first product's sorted results ``[N, U]`` if they are to be kept.

    The result is ``[T, D]``; without scales ``[N, D]``, sorted and neither weighted nor summed.
    """
    routing, dtype = job.routing, job.product_dtype
    up_columns, down_columns = job.columns(weights.up), job.columns(weights.down)
    kept = hidden.new_empty(routing.num_rows, up_columns.shape[2], dtype=dtype) if keep else None
    wide = dtype if sorted_scales is None else torch.promote_types(dtype, sorted_scales.dtype)
    results = job.room(hidden, down_columns.shape[2], wide)
    for chunk in routing.chunks(_CHUNK_ROWS):
        rows = hidden.index_select(0, routing.tokens[chunk.rows]).to(dtype)
        up = rows.new_empty(rows.shape[0], up_columns.shape[2]) if kept is None else kept[chunk.rows]
        _multiply(chunk, rows, up_columns, weights.up_bias, up, job.has_few_apart)
        place = results[chunk.rows]
        down = place if wide == dtype else rows.new_empty(place.shape)
        _multiply(chunk, activate(job.module, up), down_columns, weights.down_bias, down, job.has_few_apart)
        if sorted_scales is not None:
            torch.mul(down, sorted_scales[chunk.rows], out=place)
    return results if sorted_scales is None else routing.sum_tokens(results).to(job.dtype), kept


def _multiply(
    chunk: Chunk, rows: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor, has_few_apart: bool = False
) -> None:
    """Multiplies each expert's rows, ``[n, in]``, by its weight; columns are ``[E, in, out]``."""
    is_same = columns.dtype == rows.dtype
    for expert, span in chunk.parts:
        weight = columns[expert] if is_same else columns[expert].to(rows.dtype)
        if has_few_apart and are_few(rows[span], weight.t()):
            out[span] = product_of_few(rows[span], weight.t(), None)
        else:
            torch.mm(rows[span], weight, out=out[span])
        if bias is not None:  # apart, for the bits of transformers' grouped implementation
            out[span].add_(bias[expert])


def _weight_gradients(chunk: Chunk, rows: Tensor, grads: Tensor, columns: Tensor) -> None:
    """Writes the gradient of each expert's weight, given the product's input and the gradient of its output."""
    is_same = columns.dtype == rows.dtype
    for expert, span in chunk.parts:
        if is_same:
            torch.mm(rows[span].T, grads[span], out=columns[expert])
        else:
            columns[expert] = torch.mm(rows[span].T, grads[span])


def _bias_gradients(chunk: Chunk, grads: Tensor, bias: Tensor) -> None:
    for expert, span in chunk.parts:
        bias[expert] = grads[span].sum(dim=0)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, hidden: Tensor, scales: Tensor | None, *tensors: Tensor) -> Tensor:
        sorted_scales = job.sort(scales)
        weights = _Weights(*tensors[:4])
        result, kept = _run(job, hidden, sorted_scales, weights, keep=any(ctx.needs_input_grad))
        ctx.job = job
        needs = _Weights(*ctx.needs_input_grad[3:7])
        # Their other gradients follow from the first product alone.
        ctx.save_for_backward(kept, hidden if needs.up else None, sorted_scales, *tensors)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with out_of_autocast(grad.device):
            return None, *_Backward(ctx, grad).run()


class _Backward:
    """One backward pass."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        self._job: _Job = ctx.job
        self._kept, self._hidden, self._scales, *tensors = ctx.saved_tensors  # scales sorted, [N, 1]
        self._weights = _Weights(*tensors[:4])
        self._trained: list[Tensor] = tensors[4:]
        self._grad = grad
        needs_hidden, needs_scales, *needs_weights = ctx.needs_input_grad[1:7]
        job = self._job
        width = job.columns(self._weights.up).shape[1]
        self._row_grads = job.room(grad, width, job.product_dtype) if needs_hidden else None
        self._scale_grads = torch.zeros_like(self._scales) if needs_scales else None
        self._weight_grads = _Weights(*map(self._room, self._weights, needs_weights))
        self._trained_grads = [torch.zeros_like(one) for one in self._trained]

    def _room(self, parameter: Any, is_needed: bool) -> Any:
        """Returns a gradient in which the experts without rows are zero, the others not yet written."""
        if not is_needed:
            return None
        grad = torch.empty_like(parameter)
        for expert in self._job.routing.empty_experts():
            grad[expert].zero_()
        return grad

    def run(self) -> Sequence[Tensor | None]:
        """Returns the gradients of hidden states, scales, weights and the activation's parameters."""
        job, routing = self._job, self._job.routing
        for chunk in routing.chunks(_CHUNK_ROWS):
            self._run_chunk(chunk)
        hidden = None if self._row_grads is None else routing.sum_tokens(self._row_grads).to(job.dtype)
        scales = None if self._scale_grads is None else routing.unsort(self._scale_grads).view(-1, routing.num_chosen)
        return hidden, scales, *self._weight_grads, *self._trained_grads

    def _run_chunk(self, chunk: Chunk) -> None:
        job = self._job
        tokens = job.routing.tokens[chunk.rows]
        source = self._grad[chunk.rows] if self._scales is None else self._grad.index_select(0, tokens)
        source = source.to(job.product_dtype)  # [n, D]
        passed = Activation(job.module, self._kept[chunk.rows], self._trained)
        inner_grad = torch.empty_like(passed.inner)  # [n, F]
        _multiply(chunk, source, job.columns(self._weights.down).transpose(1, 2), None, inner_grad)
        if self._scales is None:
            self._train_down(chunk, source, passed.inner, None)
        else:
            scale = self._scales[chunk.rows].to(job.product_dtype)  # [n, 1]
            if self._scale_grads is not None:
                self._scale_grads[chunk.rows] = self._scale_gradient(chunk, source, inner_grad, passed.inner)
            self._train_down(chunk, source, passed.inner, scale)
            inner_grad.mul_(scale)
        up_grad, *trained = passed.gradient(inner_grad)
        for total, part in zip(self._trained_grads, trained, strict=True):
            total += part
        self._train_up(chunk, tokens, up_grad)
        if self._row_grads is not None:
            up_rows = job.columns(self._weights.up).transpose(1, 2)
            _multiply(chunk, up_grad, up_rows, None, self._row_grads[chunk.rows])

    def _scale_gradient(self, chunk: Chunk, source: Tensor, inner_grad: Tensor, inner: Tensor) -> Tensor:
        # It is the product of `source` and the unscaled result, read off the other side of the weight: so the result
        # need not be kept.
        found = (inner_grad * inner).sum(dim=1, keepdim=True)
        if self._weights.down_bias is not None:
            found += (source * self._weights.down_bias[chunk.expert_of_row(source.device)]).sum(dim=1, keepdim=True)
        return found

    def _train_down(self, chunk: Chunk, source: Tensor, inner: Tensor, scale: Tensor | None) -> None:
        grads = self._weight_grads
        if grads.down is not None:
            scaled = inner if scale is None else inner * scale
            _weight_gradients(chunk, scaled, source, self._job.columns(grads.down))
        if grads.down_bias is not None:
            _bias_gradients(chunk, source if scale is None else source * scale, grads.down_bias)

    def _train_up(self, chunk: Chunk, tokens: Tensor, up_grad: Tensor) -> None:
        grads = self._weight_grads
        if grads.up is not None:
            rows = self._hidden.index_select(0, tokens).to(self._job.product_dtype)
            _weight_gradients(chunk, rows, up_grad, self._job.columns(grads.up))
        if grads.up_bias is not None:
            _bias_gradients(chunk, up_grad, grads.up_bias)
