"""Stand-ins: modules of a remote block with the shapes and names of HF's own, but without weights.

Every module keeps its class (through a dynamic subclass); every parameter and buffer is hollow, see
`checkpoint/hollow.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.backbone.refusals import WHAT_WORKS, check_inserted
from swarm_plugins.checkpoint.hollow import HollowModule, HollowWeight, hollow_tensor, is_hollow
from swarm_plugins.errors import UnsupportedError

_structure_changes = 0


def structure_version() -> int:
    """Returns a number that changes whenever a module is set on a stand-in (as PEFT does with adapters)."""
    return _structure_changes


class RemoteWeight(HollowWeight):
    """A parameter whose values live on servers."""

    refusal = (
        "a weight of a remote block was read or written here ({what}); it is on servers. Merging and "
        "initialisations from base weights (pissa, olora, loftq, corda, lora_ga, mica) cannot work: keep the "
        f"adapter unmerged, with init_lora_weights=True, and in trl sync_ref_model=False; {WHAT_WORKS}"
    )


class StandIn(HollowModule):
    """Mixin placed before the class of every module of a remote block."""

    _stand_in_of: tuple[tuple[type[nn.Module], ...], type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises UnsupportedError: modules become stand-ins, and libraries make new ones only for what cannot work."""
        raise UnsupportedError(
            f"{type(self).__name__} cannot be made here, its weights are on servers: leave convolutions out of an "
            "adapter's target_modules, and use_mtp out of generate(), where swarm_plugins.Speculation drafts"
        )

    def _hollow(self) -> dict[str, Tensor]:
        buffers = {name: one for name, one in self._buffers.items() if one is not None and is_hollow(one)}
        return super()._hollow() | buffers

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            if not isinstance(value, StandIn):
                check_inserted(name, value)
            global _structure_changes
            _structure_changes += 1
        elif isinstance(value, nn.Parameter) and not isinstance(value, RemoteWeight):
            raise UnsupportedError(
                f"cannot replace the parameter {name!r} of a remote block: its weights are on servers, which never "
                f"change them; {WHAT_WORKS}"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles by the original class: a dynamic subclass cannot be found by name."""
        mixins, original = self._stand_in_of
        return _rebuilt, (mixins, original), self.__dict__


def _rebuilt(mixins: tuple[type[nn.Module], ...], original: type[nn.Module]) -> nn.Module:
    cls: type[nn.Module] = stand_in_class(original, *mixins)  # type: ignore[arg-type]  # classes are hashable
    return cls.__new__(cls)


@functools.cache
def stand_in_class(original: type[nn.Module], *mixins: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass of ``original`` whose modules are stand-ins, with ``mixins`` before it."""
    cls = type(f"Remote{original.__name__}", (*mixins, StandIn, original), {"__doc__": original.__doc__})
    cls._stand_in_of = (mixins, original)  # type: ignore[attr-defined]
    return cls


def turn_into_stand_ins(module: nn.Module, device: torch.device | str) -> None:
    """Converts a module and all below it, in place; parameters become hollow and frozen on ``device``."""
    for part in list(module.modules()):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = RemoteWeight.of(parameter.shape, parameter.dtype, device)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = hollow_tensor(buffer.shape, buffer.dtype, device)
        if not isinstance(part, StandIn):  # layers may share a module
            part.__class__ = stand_in_class(type(part))  # type: ignore[arg-type]  # classes are hashable
        part._is_hf_initialized = True  # type: ignore[assignment]
