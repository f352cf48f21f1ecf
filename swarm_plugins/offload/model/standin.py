"""Fused experts without weights: what stands in a model for experts that lie elsewhere.

A parameter keeps its name, shape, type and device over one element of storage. A meta tensor would not do: PEFT moves
an adapter to the device of the parameter that it is for.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.model.experts import run_offloaded
from swarm_plugins.offload.model.loans import ExpertLoans

__all__ = ["OffloadedExperts", "OffloadedWeight", "turn_into_offloaded"]

_METADATA = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "is_shared", "is_pinned", "get_device", "data_ptr", "untyped_storage",
    "requires_grad_", "__hash__", "__len__",
})  # fmt: skip
"""Functions that need no values; getters (shape, dtype, device, grad ...) come on top."""
_VALUE_GETTERS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag)
_SETTERS = (Tensor.grad, Tensor.requires_grad)


class OffloadedWeight(nn.Parameter):
    """A parameter whose values are in the checkpoint: tells its shape, type and device, refuses to be computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what needs no values.

        Raises:
            UnsupportedError: If values are read or written.
        """
        name = getattr(func, "__name__", str(func))
        attribute = getattr(func, "__self__", None)
        if name == "__get__" and attribute is Tensor.data:
            return args[0]
        is_getter = name == "__get__" and attribute not in _VALUE_GETTERS
        if name in _METADATA or is_getter or (name == "__set__" and attribute in _SETTERS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = getattr(attribute, "__name__", name)
        raise UnsupportedError(
            f"the weights of offloaded experts were read or written here ({what}); they stay in the checkpoint. "
            "Merging an adapter into them, training them, and DoRA or initialisations by the base weights (pissa, "
            "olora, loftq) on them cannot work: keep the adapter apart, with init_lora_weights=True"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


def _hollow(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> OffloadedWeight:
    one = torch.zeros((1,) * len(shape), dtype=dtype, device=device)
    return OffloadedWeight(one.expand(shape), requires_grad=False)


def _applied(fn: Callable[[Tensor], Tensor], weight: OffloadedWeight) -> OffloadedWeight:
    one = fn(torch.zeros((), dtype=weight.dtype, device=weight.device))
    if one.device != weight.device:
        raise UnsupportedError(
            f"offloaded experts compute on {weight.device} and cannot move to {one.device}: load the model there with "
            f"load_offloaded(..., device={str(one.device)!r})"
        )
    # The same object stays in place: optimizers and PEFT may hold it.
    return weight if one.dtype == weight.dtype else _hollow(weight.shape, one.dtype, one.device)


class OffloadedExperts(nn.Module):
    """Mixed in before a family's experts class: has no weights of its own, borrows an expert when it is needed."""

    _loans: ExpertLoans

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts. Whatever experts implementation the config names: no other has the weights."""
        return run_offloaded(self, hidden_states, top_k_index, top_k_weights)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"offloaded experts ({type(self).__name__}) have no 'weight' to read: initialisations by the base "
                "weights (pissa, olora, loftq, corda, lora_ga, orthogonal) cannot work on them, use "
                "init_lora_weights=True or 'gaussian'"
            )
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadedExperts:
        """Applies a cast to one element and expands it again: `.to()` would fill in the full weights.

        Raises:
            UnsupportedError: If the experts are to move to another device.
        """
        hollow = {name: one for name, one in self._parameters.items() if isinstance(one, OffloadedWeight)}
        changed = {name: _applied(fn, one) for name, one in hollow.items()}
        for name in hollow:
            self._parameters[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters.update(changed)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves all but the experts, which the checkpoint has."""
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is not None and not isinstance(tensor, OffloadedWeight):
                destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: list[str],
        error_msgs: Any,
    ) -> None:
        """Loads nothing: weights for offloaded experts are reported as unexpected."""
        unexpected_keys.extend(prefix + name for name in self._parameters if prefix + name in state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedExperts:
        """Copies structure and adapters; the weights are read-only and stay shared."""
        for parameter in self._parameters.values():
            if isinstance(parameter, OffloadedWeight):
                memo[id(parameter)] = _hollow(parameter.shape, parameter.dtype, parameter.device)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


@functools.cache
def _offloaded_class(original: type[nn.Module]) -> type[nn.Module]:
    # transformers finds out by a class's module what it is capable of.
    return type(f"Offloaded{original.__name__}", (OffloadedExperts, original), {"__module__": original.__module__})


def turn_into_offloaded(module: nn.Module, outline: nn.Module, device: torch.device, loans: ExpertLoans) -> None:
    """Converts a family's experts, in place.

    Args:
        module: The experts, without their weights.
        outline: The same with its weights, on the meta device.
        device: Where they are computed.
        loans: Where the weights come from.
    """
    for name, parameter in outline.named_parameters(recurse=False):
        module.register_parameter(name, _hollow(parameter.shape, parameter.dtype, device))
    module.__class__ = _offloaded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
    module._loans = loans  # type: ignore[assignment]
