"""Hollow weights: true name, shape, dtype and device over one element of storage, for values that lie elsewhere.

PEFT, ``print(model)``, parameter counts and ``isinstance`` see the model they know. A plain meta tensor would not do:
PEFT moves a new adapter to the device of the layer it wraps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from swarm_plugins.errors import UnsupportedError

_METADATA = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "is_shared", "is_pinned", "get_device", "data_ptr", "untyped_storage",
    "requires_grad_", "__hash__", "__len__",
})  # fmt: skip
"""Functions that need no values; getters (shape, dtype, device, grad ...) come on top."""
_VALUE_GETTERS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag)
_SETTERS = (Tensor.grad, Tensor.requires_grad)


def hollow_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns zeros of a shape over one element of storage."""
    return torch.zeros((1,) * len(shape), dtype=dtype, device=device).expand(shape)


def is_hollow(tensor: Tensor) -> bool:
    """Returns whether a tensor has no more than one element of storage."""
    return tensor.numel() <= 1 or tensor.untyped_storage().nbytes() <= tensor.element_size()


class HollowWeight(nn.Parameter):
    """A parameter without values: tells its shape, dtype and device, and refuses to be computed with.

    Its one element of storage would otherwise be read as a matrix of zeros: an initialisation by the base weights, or
    a merge, would end in a wrong adapter or a torch error about overlapping memory.
    """

    refusal: ClassVar[str]
    """Error message; ``{what}`` is the function that needs values."""

    @classmethod
    def of(
        cls, shape: torch.Size, dtype: torch.dtype, device: torch.device | str, *, requires_grad: bool = False
    ) -> Self:
        """Returns a hollow weight, frozen unless stated otherwise."""
        weight = cls(hollow_tensor(shape, dtype, device), requires_grad=requires_grad)
        # transformers initialises what it thinks is missing from a checkpoint, unless it is marked.
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

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
        raise UnsupportedError(cls.refusal.format(what=getattr(attribute, "__name__", name)))

    def applied(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Returns the weight after a cast or move; itself if neither dtype nor device changes."""
        one = fn(torch.zeros((), dtype=self.dtype, device=self.device))
        if one.dtype == self.dtype and one.device == self.device:
            # The same object stays in place: optimizers and PEFT may hold it.
            return self
        return self.of(self.shape, one.dtype, one.device, requires_grad=self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # nn.Parameter would clone it to full size.
        memo[id(self)] = twin = self.of(self.shape, self.dtype, self.device, requires_grad=self.requires_grad)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _remade, (type(self), self.shape, self.dtype, str(self.device), self.requires_grad)


def _remade(
    cls: type[HollowWeight], shape: torch.Size, dtype: torch.dtype, device: str, requires_grad: bool
) -> HollowWeight:
    return cls.of(shape, dtype, device, requires_grad=requires_grad)


def keep_from_ddp(model: nn.Module) -> None:
    """Excludes frozen layers with hollow weights from DistributedDataParallel, in which a Trainer wraps the module.

    Models on a swarm and offloaded ones are ready, with PEFT's adapters too; a module around one has to be made so.
    """
    model._ddp_params_and_buffers_to_ignore = _HollowNames(model)  # type: ignore[assignment]  # DDP's own name


class _HollowNames:
    """Names that DDP should ignore, found when it asks: PEFT may have wrapped the model or put modules inside."""

    def __init__(self, model: nn.Module) -> None:
        # Not a cycle: models of gigabytes are freed without the garbage collector.
        self._model = weakref.ref(model)

    def __iter__(self) -> Iterator[str]:
        model = self._model()
        for path, module in () if model is None else model.named_modules():
            # Each process has read the codes and scales itself, and DDP cannot send all of their types.
            is_read = isinstance(module, HollowModule)
            tensors = (*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False))
            for name, one in tensors:
                if not one.requires_grad and (is_read or is_hollow(one)):
                    # PeftModel hands on the attributes of the model in it, for prompts and for tuners.
                    yield from (name, f"base_model.{name}", f"base_model.model.{name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _HollowNames, (self._model(),)


class HollowModule(nn.Module):
    """Mixed in before the class of a module with hollow weights: keeps them hollow through casts, moves and saving."""

    def _hollow(self) -> dict[str, Tensor]:
        """Returns the module's own tensors without values, by name."""
        return {name: one for name, one in self._parameters.items() if isinstance(one, HollowWeight)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies a cast or move to one element and expands it again: `.to()` would fill in the full weights."""
        hollow = self._hollow()
        # Before anything is taken out: a weight may refuse.
        changed = {name: _applied(fn, one) for name, one in hollow.items()}
        self._put(dict.fromkeys(hollow))
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._put(changed)
        return self

    def _put(self, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            own: dict[str, Any] = self._parameters if name in self._parameters else self._buffers
            own[name] = tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        left_out = self._hollow().keys() | self._non_persistent_buffers_set
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is not None and name not in left_out:
                destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(self, *args: Any) -> None:
        """Loads what is not hollow; values for hollow tensors are reported as unexpected."""
        hollow = self._hollow()
        self._put(dict.fromkeys(hollow))
        try:
            super()._load_from_state_dict(*args)
        finally:
            self._put(hollow)


def _applied(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    if isinstance(tensor, HollowWeight):
        return tensor.applied(fn)
    one = fn(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return hollow_tensor(tensor.shape, one.dtype, one.device)
