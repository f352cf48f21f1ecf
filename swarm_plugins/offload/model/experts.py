"""Offloaded experts: what stands in a model for a family's fused experts, and runs instead of their own forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_plugins.checkpoint.hollow import HollowModule, HollowWeight
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import ExpertDelta, Routing, combine
from swarm_plugins.moe.activation import trained_activation
from swarm_plugins.moe.dispatch import out_of_autocast
from swarm_plugins.moe.low_rank import adapters_of
from swarm_plugins.offload.model.gradients import run_weighed, run_with_gradients
from swarm_plugins.offload.model.loans import ExpertLoans

IMPLEMENTATION = "swarm_offload"
"""Name in transformers' registry of experts implementations."""
# Not on the experts, which threads share: one's adapters would be seen, and left behind, by another's calls.
_deltas: ContextVar[tuple[tuple[Any, ExpertDelta], ...]] = ContextVar("swarm_offload_deltas", default=())


class OffloadedWeight(HollowWeight):
    """A parameter whose values are in the checkpoint."""

    refusal = (
        "the weights of offloaded experts were read or written here ({what}); they stay in the checkpoint. "
        "Merging an adapter into them, training them, and DoRA or initialisations by the base weights (pissa, "
        "olora, loftq) on them cannot work: keep the adapter apart, with init_lora_weights=True"
    )

    def applied(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Returns the weight after a cast.

        Raises:
            UnsupportedError: If it is moved to another device.
        """
        changed = super().applied(fn)
        if changed.device != self.device:
            raise UnsupportedError(
                f"offloaded experts compute on {self.device} and cannot move to {changed.device}: load the model there "
                f"with load_offloaded(..., device={str(changed.device)!r})"
            )
        return changed


class OffloadedExperts(HollowModule):
    """Mixed in before a family's experts class: has no weights of its own, borrows an expert when it is needed."""

    _loans: ExpertLoans

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts, whatever experts implementation the config names: no other has the weights."""
        return run_offloaded(self, hidden_states, top_k_index, top_k_weights)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"offloaded experts ({type(self).__name__}) have no 'weight' to read: initialisations by the base "
                "weights (pissa, olora, loftq, corda, lora_ga, orthogonal) cannot work on them, use "
                "init_lora_weights=True or 'gaussian'"
            )
        return super().__getattr__(name)


@functools.cache
def _offloaded_class(original: type[nn.Module]) -> type[nn.Module]:
    # transformers finds out by a class's module what it is capable of.
    return type(f"Offloaded{original.__name__}", (OffloadedExperts, original), {"__module__": original.__module__})


def turn_into_offloaded(module: nn.Module, outline: nn.Module, device: torch.device, loans: ExpertLoans) -> None:
    """Converts a family's experts, in place."""
    for name, parameter in outline.named_parameters(recurse=False):
        module.register_parameter(name, OffloadedWeight.of(parameter.shape, parameter.dtype, device))
    module.__class__ = _offloaded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    for parameter in trained_activation(module):
        parameter.requires_grad_(False)
    module._loans = loans  # type: ignore[assignment]


@contextmanager
def adapted(module: Any, deltas: Sequence[ExpertDelta]) -> Iterator[None]:
    """Adds adapters to offloaded experts inside the context, for this thread (or task) alone; nested ones add up."""
    token = _deltas.set((*_deltas.get(), *((module, delta) for delta in deltas)))
    try:
        yield
    finally:
        _deltas.reset(token)


def run_offloaded(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs experts whose weights are borrowed, with the adapters of `adapted`; see `run_adapted`."""
    deltas = [delta for owner, delta in _deltas.get() if owner is module]
    return run_adapted(module, deltas, hidden_states, top_k_index, top_k_weights)


def run_adapted(
    module: Any, deltas: Sequence[ExpertDelta], hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs experts whose weights are borrowed; same numerics as transformers' grouped implementation.

    Args:
        module: The experts.
        deltas: Adapters on them, each for all tokens or for some.
        hidden: ``[T, D]``.
        top_k_index: ``[T, k]``; indices beyond the last expert contribute nothing.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, D]``.

    Raises:
        CheckpointError: If an expert cannot be read; names file and tensor.
        UnsupportedError: If the experts' own weights are to be trained.
    """
    loans: ExpertLoans = module._loans
    if torch.is_grad_enabled():
        _check_frozen(module)
    needs_grad = torch.is_grad_enabled() and (
        hidden.requires_grad or any(d.factor_a.requires_grad or d.factor_b.requires_grad for d in deltas)
    )
    with out_of_autocast(hidden.device):
        if hidden.shape[0] == 1 and not needs_grad:
            found = _run_one(loans, module, hidden, top_k_index, deltas)
            if found is not None:
                return combine(module, found, top_k_weights, None, hidden)
        routing = Routing(top_k_index, module.num_experts)
        if needs_grad and not deltas and not module.has_post_expert_norm:
            return run_weighed(loans, module, hidden, routing, top_k_weights)
        run = run_with_gradients if needs_grad else ExpertLoans.run_all
        return combine(module, run(loans, module, hidden, routing, deltas), top_k_weights, routing, hidden)


def _run_one(
    loans: ExpertLoans, module: Any, hidden: Tensor, top_k_index: Tensor, deltas: Sequence[ExpertDelta]
) -> Tensor | None:
    """Runs a single token without sorting; None if an expert is chosen twice or does not exist."""
    experts: list[int] = top_k_index[0].tolist()
    places = {expert: place for place, expert in enumerate(experts)}
    if len(places) != len(experts) or max(experts) >= module.num_experts:
        return None
    results: list[Tensor | None] = [None] * len(experts)
    adapters = adapters_of(deltas, top_k_index.new_zeros(1), 1, dict.fromkeys(experts, slice(0, 1)))
    with closing(loans.borrow(experts)) as lent:
        for expert, tensors in lent:
            results[places[expert]] = loans.run(module, hidden, tensors, adapters(expert))
    return torch.cat([result for result in results if result is not None])


def _check_frozen(module: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad:
            raise UnsupportedError(
                f"{name} of offloaded experts ({type(module).__name__}) is to be trained, but its weights stay in the "
                "checkpoint: freeze it (requires_grad_(False)) and train an adapter, also on experts, by "
                f"LoraConfig(target_parameters=['experts.{name}'])"
            )
    if trained_activation(module):
        raise UnsupportedError(
            f"the activation of offloaded experts ({type(module).__name__}) is to be trained, but gets no gradient: "
            "freeze it (act_fn.requires_grad_(False)), or load the whole model with transformers"
        )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_offloaded)
