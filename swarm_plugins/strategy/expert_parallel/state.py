"""Whole tensors of a distributed module or optimizer, and back: checkpoints that load at any group size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from swarm_plugins.parallel.agreement import translated


def whole_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """Returns an optimizer's state dict with whole tensors on the CPU, as one process would have it.

    Call it on every rank.

    Args:
        optimizer: One whose parameters have had gradients on all ranks or on none.
        keep: Whether this rank wants it; the others get an empty dict.

    Raises:
        TransportError: If another rank is lost.
    """
    state = optimizer.state_dict()
    whole = {}
    with translated("gathering the optimizer state"):
        for index, values in state["state"].items():
            # One parameter at a time: only its own state is whole on every rank.
            gathered = {name: _whole(value) for name, value in values.items()}
            if keep:
                whole[index] = {name: _on_cpu(value) for name, value in gathered.items()}
    return {**state, "state": whole} if keep else {}


def distribute_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's part of a state dict, for ``optimizer.load_state_dict``.

    Fits ``Optimizer.register_load_state_dict_pre_hook``.

    Args:
        optimizer: The optimizer that will load it.
        state_dict: Whole tensors, or what the optimizer's own ``state_dict()`` returned.
    """
    parameters = dict(_parameters_by_index(optimizer, state_dict))
    placed = {
        index: {name: _part(value, parameters.get(index)) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": placed}


def load_whole_state(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Loads whole tensors, present on every rank, into a module whose experts lie on different ranks."""
    here = module.state_dict()
    placed = {name: _part(value, here.get(name)) for name, value in state_dict.items()}
    module.load_state_dict(placed, strict=strict)


def _parameters_by_index(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """A state dict numbers the parameters in the order of the groups."""
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(saved["params"], group["params"], strict=False)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _part(value: Any, like: Any) -> Any:
    """This rank's part of a tensor that belongs to a distributed parameter; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    # A factored state, as Adafactor's, has other dimensions than its parameter.
    placements = like.placements if value.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    return distribute_tensor(value.to(like.device), like.device_mesh, placements, src_data_rank=None)
