"""Refusals of a layer's group: a rank that refused on its own would leave the others waiting for its tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from swarm_plugins.errors import ConfigError, NumericError, SwarmError, TransportError
from swarm_plugins.parallel.adapters import check_divided
from swarm_plugins.parallel.agreement import translated
from swarm_plugins.parallel.collectives import gather_table
from swarm_plugins.parallel.meshes import own_device

NUM_WORDS = 5


class CanRefuse(Protocol):
    """An implementation whose ranks tell each other whether they can go on."""

    ranks: frozenset[int]
    """Those that hear of a refusal."""
    is_open: bool
    """Whether its exchange has begun in the current forward."""
    is_refused: bool
    """Whether that exchange ended in an error on every rank."""

    def refuse(self) -> None:
        """Takes part in an exchange only to say that this rank cannot go on."""
        ...


def complaints(top_k_index: Tensor, top_k_weights: Tensor, num_experts: int) -> Tensor:
    """Returns what is wrong with this rank's routing, as words that travel with its numbers of tokens.

    Args:
        top_k_index: ``[T, k]``; ``num_experts`` stands for no expert.
        top_k_weights: ``[T, k]``.
        num_experts: Experts of the whole layer.

    Returns:
        This rank, 0, tokens whose weights are not finite, indices that name no expert, tokens in all: ``[5]``.
    """
    not_finite = (~torch.isfinite(top_k_weights)).any(dim=1).sum()
    unknown = ((top_k_index < 0) | (top_k_index > num_experts)).sum()
    own, failed, total = (torch.full_like(unknown, value) for value in (dist.get_rank(), 0, top_k_index.shape[0]))
    return torch.stack([own, failed, not_finite, unknown, total])


def failure(device: torch.device) -> Tensor:
    """Returns the words of a rank that failed before it could route its tokens, ``[5]``."""
    return torch.tensor([dist.get_rank(), 1, 0, 0, 0], device=device)


def check(layer: CanRefuse, words: Tensor, name: str) -> None:
    """Raises on every rank if one complained.

    Args:
        layer: The implementation, which then counts as refused.
        words: Those of each rank of the group, ``[ranks, 5]``.
        name: Name of the experts module.

    Raises:
        NumericError: If a rank has routing weights that are not finite.
        ConfigError: If a rank has indices that name no expert.
        TransportError: If a rank failed.
    """
    layer.is_refused = bool(words[:, 1:4].any())
    for rank, failed, not_finite, unknown, total in words.tolist():
        if failed and rank != dist.get_rank():
            raise TransportError(f"{name}: rank {rank} raised an error before this layer's experts: read it there")
        if not_finite:
            raise NumericError(
                f"{name}: on rank {rank}, {not_finite} of {total} tokens have routing weights that are NaN or "
                "infinite: lower the learning rate, clip gradients, or compute in a wider dtype"
            )
        if unknown:
            raise ConfigError(
                f"{name}: on rank {rank}, the router chose {unknown} experts that do not exist: give every rank the "
                "same configuration"
            )


@dataclass(frozen=True)
class WatchedLayer:
    """The divided experts of a layer, and where they belong."""

    name: str
    """Dotted name of the experts module."""
    experts: nn.Module
    block: nn.Module
    """The module whose child the experts are."""
    implementation: CanRefuse

    def check(self) -> None:
        """Raises if something has taken the place of the experts, or adapts them without being divided.

        Raises:
            UnsupportedError: If so.
        """
        check_divided(getattr(self.block, self.name.rpartition(".")[2]), self.experts, self.name)


def watch(model: nn.Module, watched: Sequence[WatchedLayer]) -> None:
    """Lets the other ranks know if a forward fails on this one, before they wait for its tokens.

    Args:
        model: The module that runs all layers.
        watched: Its layers with divided experts, in their order.
    """
    forward = model.forward
    layers = [one.implementation for one in watched]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        for layer in layers:
            layer.is_open = layer.is_refused = False
        try:
            _check_batch(args, kwargs)
            for one in watched:
                one.check()
            return forward(*args, **kwargs)
        except Exception as exc:
            with contextlib.suppress(SwarmError):
                _tell_others(layers, exc)
            raise

    model.forward = run


def _check_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    inputs = [one for one in (*args, *(kwargs.get(name) for name in ("input_ids", "inputs_embeds"))) if one is not None]
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].numel() == 0:
        raise ConfigError(
            f"the batch of rank {dist.get_rank()} is empty, its shape is {list(inputs[0].shape)}: give the rank a row "
            "of its own, or stop all ranks at the same step"
        )


def _tell_others(layers: Sequence[CanRefuse], exc: Exception) -> None:
    heard = list[frozenset[int]]()
    for layer in layers:
        if layer.is_refused:
            heard = [layer.ranks]
        elif layer.is_open and isinstance(exc, TransportError):
            # The group is lost: no rank can be told.
            return
    # Groups of later layers may be others: ranks that have heard tell the rest, unless all of them heard in one group.
    for layer in layers:
        if not layer.is_open and not any(layer.ranks <= group for group in heard):
            layer.refuse()
            heard.append(layer.ranks)


class Agreed:
    """The forward of an implementation from elsewhere, after its group agrees that it can run.

    Args:
        forward: The forward.
        num_experts: Experts of the whole layer.
        ep_mesh: The group.
        name: Name of the experts module.
    """

    def __init__(self, forward: Callable[..., Tensor], num_experts: int, ep_mesh: DeviceMesh, name: str) -> None:
        self.is_open = self.is_refused = False
        self.ranks = frozenset(dist.get_process_group_ranks(ep_mesh.get_group()))
        self._forward, self._num_experts, self._ep_mesh, self._name = forward, num_experts, ep_mesh, name

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Takes and returns what the forward does.

        Raises:
            SwarmError: On every rank of the group, as `check` says.
        """
        words = complaints(top_k_index, top_k_weights, self._num_experts)
        self.is_open = True
        check(self, gather_table(words, self._ep_mesh.get_group()), self._name)
        with translated(f"the exchange of {self._name}"):
            return self._forward(hidden_states, top_k_index, top_k_weights)

    def refuse(self) -> None:
        """See `CanRefuse`."""
        gather_table(failure(own_device(self._ep_mesh.device_type)), self._ep_mesh.get_group())
