"""What stands in a model for fused experts that are elsewhere."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_plugins.checkpoint.hollow import HollowModule, HollowWeight
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe.activation import trained_activation
from swarm_plugins.remote_experts.experts import RemoteExperts

IMPLEMENTATION = "swarm_remote"
"""Name in transformers' registry of experts implementations."""


class RemoteWeight(HollowWeight):
    """A parameter whose values are at holders."""

    refusal = (
        "the weights of remote experts were read or written here ({what}); they are at other peers, frozen. Adapters "
        "on them, merging and training them cannot work: adapt other modules, such as the attention's projections, or "
        "load the model with load_offloaded, which has the experts here"
    )


class RemoteExpertsModule(HollowModule):
    """Mixed in before a family's experts class: has no weights, its rows are computed at holders."""

    adapter_refusal: ClassVar[str] = (
        "these experts are at other peers, which apply no adapters; adapt other modules, or use a server that has the "
        "experts itself (swarm serve without --experts)"
    )
    """Why no adapter is accepted on the experts."""
    _remote: RemoteExperts
    _block: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts, whatever experts implementation the config names: no other has the weights."""
        return run_remote(self, hidden_states, top_k_index, top_k_weights)


@functools.cache
def _remote_class(original: type[nn.Module]) -> type[nn.Module]:
    # transformers finds out by a class's module what it is capable of.
    return type(f"Remote{original.__name__}", (RemoteExpertsModule, original), {"__module__": original.__module__})


def turn_into_remote(
    module: nn.Module, outline: nn.Module, device: torch.device, block: int, experts: RemoteExperts
) -> None:
    """Converts a family's experts without weights, in place; ``outline`` has the shapes."""
    for name, parameter in outline.named_parameters(recurse=False):
        module.register_parameter(name, RemoteWeight.of(parameter.shape, parameter.dtype, device))
    module.__class__ = _remote_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    for parameter in trained_activation(module):
        parameter.requires_grad_(False)
    module._remote, module._block = experts, block  # type: ignore[assignment]


def run_remote(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs experts that are elsewhere; an experts implementation of transformers. See `RemoteExperts.run`."""
    if torch.is_grad_enabled():
        _check_frozen(module)
    experts: RemoteExperts = module._remote
    return experts.run(module._block, module, hidden_states, top_k_index, top_k_weights)


def _check_frozen(module: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.requires_grad:
            raise UnsupportedError(
                f"{name} of remote experts ({type(module).__name__}) is to be trained, but its weights are at other "
                "peers: freeze it (requires_grad_(False)) and train other weights, or adapters on them"
            )
    if trained_activation(module):
        raise UnsupportedError(
            f"the activation of remote experts ({type(module).__name__}) is to be trained, but gets no gradient: "
            "freeze it (act_fn.requires_grad_(False)), or load the whole model with transformers"
        )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_remote)
