"""The experts implementation: what a family's experts run instead of their own forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import ExpertDelta, Routing, combine
from swarm_plugins.offload.model.loans import ExpertLoans
from swarm_plugins.offload.model.training import adapters_of, out_of_autocast, run_with_gradients

__all__ = ["IMPLEMENTATION", "adapted", "run_adapted", "run_offloaded"]

IMPLEMENTATION = "swarm_offload"
"""Name in transformers' registry of experts implementations."""
# Not on the experts, which threads share: one's adapters would be seen, and left behind, by another's calls.
_deltas: ContextVar[tuple[tuple[Any, ExpertDelta], ...]] = ContextVar("swarm_offload_deltas", default=())


@contextmanager
def adapted(module: Any, deltas: Sequence[ExpertDelta]) -> Iterator[None]:
    """Adds adapters to offloaded experts while the context lasts, for calls of this thread (or task) alone.

    Args:
        module: Offloaded experts of a family.
        deltas: The adapters; contexts inside one another add up.
    """
    token = _deltas.set((*_deltas.get(), *((module, delta) for delta in deltas)))
    try:
        yield
    finally:
        _deltas.reset(token)


def run_offloaded(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs experts whose weights are borrowed; numerics are those of transformers' grouped implementation.

    Args:
        module: Offloaded experts of a family.
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, k]``; indices beyond the last expert contribute nothing.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, D]``.

    Raises:
        CheckpointError: If an expert cannot be read; names file and tensor.
        UnsupportedError: If the experts' own weights are to be trained.
    """
    deltas = [delta for owner, delta in _deltas.get() if owner is module]
    return run_adapted(module, deltas, hidden_states, top_k_index, top_k_weights)


def run_adapted(
    module: Any, deltas: Sequence[ExpertDelta], hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs experts whose weights are borrowed, with adapters on them; see `run_offloaded`.

    Args:
        module: Offloaded experts of a family.
        deltas: The adapters, each for all tokens or for some.
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, k]``.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, D]``.
    """
    with out_of_autocast(hidden_states.device):
        return _run(module, deltas, hidden_states, top_k_index, top_k_weights)


def _run(
    module: Any, deltas: Sequence[ExpertDelta], hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    loans: ExpertLoans = module._loans
    if torch.is_grad_enabled():
        _check_frozen(module)
        if hidden.requires_grad or any(d.factor_a.requires_grad or d.factor_b.requires_grad for d in deltas):
            routing = Routing(top_k_index, module.num_experts)
            down = run_with_gradients(loans, module, hidden, routing, deltas)
            return combine(module, down, top_k_weights, routing, hidden)
    if hidden.shape[0] == 1:
        found = _run_one(loans, module, hidden, top_k_index, deltas)
        if found is not None:
            return combine(module, found, top_k_weights, None, hidden)
    routing = Routing(top_k_index, module.num_experts)
    spans = routing.spans()
    adapters = adapters_of(deltas, routing.tokens, routing.num_tokens, spans)
    down = loans.run_all(module, hidden[routing.tokens], spans, adapters)
    return combine(module, down, top_k_weights, routing, hidden)


def _run_one(
    loans: ExpertLoans, module: Any, hidden: Tensor, top_k_index: Tensor, deltas: Sequence[ExpertDelta]
) -> Tensor | None:
    """Runs a single token, for which there is nothing to sort; None if it is routed out of the ordinary."""
    experts: list[int] = top_k_index[0].tolist()
    places = {expert: place for place, expert in enumerate(experts)}
    if len(places) != len(experts) or max(experts) >= module.num_experts:
        return None
    results: list[Tensor | None] = [None] * len(experts)
    whole = slice(0, 1)
    adapters = adapters_of(deltas, top_k_index.new_zeros(1), 1, dict.fromkeys(experts, whole))
    with closing(loans.borrow(experts)) as lent:
        for expert, tensors in lent:
            results[places[expert]] = loans.run(module, hidden, expert, tensors, adapters(expert))
    return torch.cat([result for result in results if result is not None])


def _check_frozen(module: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad:
            raise UnsupportedError(
                f"{name} of offloaded experts ({type(module).__name__}) is to be trained, but its weights stay in the "
                "checkpoint: freeze it (requires_grad_(False)) and train an adapter, also on experts, by "
                f"LoraConfig(target_parameters=['experts.{name}'])"
            )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_offloaded)
