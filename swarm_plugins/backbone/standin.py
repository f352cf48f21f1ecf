"""Stand-ins: modules that look like HF's own, with true shapes and names, but hold no weights.

Every parameter keeps its shape, dtype and device over ONE element of storage (expanded zeros); every module keeps
its class (through a dynamic subclass). So PEFT, `print(model)`, parameter counts and `isinstance` see the model
they know, while the weights stay on the servers. A plain meta tensor would not do: PEFT moves a new adapter to the
device of the layer it wraps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from swarm_plugins.backbone.refusals import WHAT_WORKS, check_inserted
from swarm_plugins.errors import UnsupportedError

__all__ = [
    "RemoteWeight",
    "StandIn",
    "is_hollow",
    "stand_in_class",
    "stand_in_tensor",
    "structure_version",
    "turn_into_stand_ins",
]

T = TypeVar("T", bound=nn.Module)

_structure_changes = 0


def structure_version() -> int:
    """Returns a number that changes whenever a module is put into a stand-in (as PEFT does with adapters)."""
    return _structure_changes


_METADATA = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "is_shared", "is_pinned", "get_device", "data_ptr", "untyped_storage",
    "requires_grad_", "__hash__", "__len__",
})  # fmt: skip
"""Functions that need no values; getters (shape, dtype, device, grad ...) come on top."""
_VALUE_GETTERS = (
    torch.Tensor.T,
    torch.Tensor.mT,
    torch.Tensor.H,
    torch.Tensor.mH,
    torch.Tensor.real,
    torch.Tensor.imag,
)
_SETTERS = (torch.Tensor.grad, torch.Tensor.requires_grad)


class RemoteWeight(nn.Parameter):
    """A parameter whose values are on servers: it tells its shape, dtype and device, and refuses to be computed with.

    Its one element of storage would otherwise be read as a matrix of zeros: an initialisation by the base weights, or
    a merge, would end in a wrong adapter or a torch error about overlapping memory.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what needs no values.

        Raises:
            UnsupportedError: If values are read or written.
        """
        name = getattr(func, "__name__", str(func))
        attribute = getattr(func, "__self__", None)
        if name == "__get__" and attribute is torch.Tensor.data:
            return args[0]
        is_getter = name == "__get__" and attribute not in _VALUE_GETTERS
        if name in _METADATA or is_getter or (name == "__set__" and attribute in _SETTERS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = getattr(attribute, "__name__", name)
        raise UnsupportedError(
            f"a weight of a remote block was read or written here ({what}); it is on servers. Merging, DoRA and "
            "initialisations by the base weights (pissa, olora, loftq, corda, lora_ga, mica) cannot work: keep the "
            f"adapter apart, with init_lora_weights=True; {WHAT_WORKS}"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RemoteWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteWeight:
        memo[id(self)] = twin = _hollow_parameter(self, self.dtype, self.device)
        twin.requires_grad_(self.requires_grad)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _remade, (tuple(self.shape), self.dtype, str(self.device), self.requires_grad)


def stand_in_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns zeros of a shape over one element of storage."""
    return torch.zeros((1,) * len(shape), dtype=dtype, device=device).expand(shape)


def is_hollow(tensor: Tensor) -> bool:
    """Returns whether a tensor is (still) a stand-in of one element."""
    return tensor.numel() <= 1 or tensor.untyped_storage().nbytes() <= tensor.element_size()


def _hollow_parameter(like: Tensor, dtype: torch.dtype, device: torch.device | str) -> RemoteWeight:
    parameter = RemoteWeight(stand_in_tensor(like.shape, dtype, device), requires_grad=False)
    # transformers initialises what it thinks is missing from a checkpoint, unless it is marked.
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _remade(shape: tuple[int, ...], dtype: torch.dtype, device: str, requires_grad: bool) -> RemoteWeight:
    weight = _hollow_parameter(torch.empty(shape, device="meta"), dtype, device)
    weight.requires_grad_(requires_grad)
    return weight


class StandIn(nn.Module):
    """Mixed in before the class of every module of a remote block."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StandIn:
        """Applies a cast or move to one element and expands it again: `.to()` would fill in the full weights."""
        own, buffers = self._parameters, self._buffers
        hollow = {name: p for name, p in own.items() if p is not None and is_hollow(p)}
        shadows = {name: b for name, b in buffers.items() if b is not None and is_hollow(b)}
        for name in hollow:
            own[name] = None
        for name in shadows:
            buffers[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, parameter in hollow.items():
                own[name] = _moved(fn, parameter)
            for name, buffer in shadows.items():
                one = fn(torch.zeros((), dtype=buffer.dtype, device=buffer.device))
                buffers[name] = stand_in_tensor(buffer.shape, one.dtype, one.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves nothing: the weights are not here."""

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
        """Loads nothing: the weights are not here. Weights for a remote block are reported as unexpected."""
        names = (*self._parameters, *self._buffers)
        unexpected_keys.extend(prefix + name for name in names if prefix + name in state_dict)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            if not isinstance(value, StandIn):
                check_inserted(name, value)
            global _structure_changes
            _structure_changes += 1
        elif isinstance(value, nn.Parameter) and not isinstance(value, RemoteWeight):
            raise UnsupportedError(
                f"the parameter {name!r} of a remote block cannot be replaced here: its weights are on servers, which "
                f"never change them; {WHAT_WORKS}"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        """Copies adapters and structure; the clone of an expanded parameter would be full-sized."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None and is_hollow(tensor):
                memo[id(tensor)] = _copy_of(tensor)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles by the original class: a dynamic subclass cannot be found by name."""
        mixins, original = self._stand_in_of
        return _rebuilt, (mixins, original), self.__dict__

    _stand_in_of: tuple[tuple[type[nn.Module], ...], type[nn.Module]]


def _moved(fn: Callable[[Tensor], Tensor], parameter: nn.Parameter) -> nn.Parameter:
    one = fn(torch.zeros((), dtype=parameter.dtype, device=parameter.device))
    if one.dtype == parameter.dtype and one.device == parameter.device:
        # The same object stays in place: optimizers and PEFT may hold it.
        return parameter
    moved = _hollow_parameter(parameter, one.dtype, one.device)
    moved.requires_grad_(parameter.requires_grad)
    return moved


def _copy_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return _hollow_parameter(tensor, tensor.dtype, tensor.device).requires_grad_(tensor.requires_grad)
    return stand_in_tensor(tensor.shape, tensor.dtype, tensor.device)


def _rebuilt(mixins: tuple[type[nn.Module], ...], original: type[nn.Module]) -> nn.Module:
    cls: type[nn.Module] = stand_in_class(original, *mixins)  # type: ignore[arg-type]  # classes are hashable
    return cls.__new__(cls)


@functools.cache
def stand_in_class(original: type[nn.Module], *mixins: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of ``original`` whose modules are stand-ins, with ``mixins`` before it."""
    cls = type(f"Remote{original.__name__}", (*mixins, StandIn, original), {"__doc__": original.__doc__})
    for mixin in mixins:
        if "forward" in vars(mixin):
            # transformers wraps the forward of every subclass of a decoder layer for gradient checkpointing, which
            # would send each request twice: servers keep or recompute what they need by themselves.
            cls.forward = mixin.forward  # type: ignore[attr-defined]
    cls._stand_in_of = (mixins, original)  # type: ignore[attr-defined]
    return cls


def turn_into_stand_ins(module: nn.Module, device: torch.device | str) -> None:
    """Converts a module and all below it, in place; parameters become hollow and frozen on ``device``."""
    for part in list(module.modules()):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = _hollow_parameter(parameter, parameter.dtype, device)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = stand_in_tensor(buffer.shape, buffer.dtype, device)
        part.__class__ = stand_in_class(type(part))  # type: ignore[arg-type]
        part._is_hf_initialized = True  # type: ignore[assignment]
