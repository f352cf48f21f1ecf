"""Reads PEFT's adapters from the stand-ins; refuses what servers could not apply.

PEFT injects real tensors under their real names; servers get structure and tensors. A trainable tensor that is not
shipped would silently get no gradient, so anything unknown raises before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.lora.variants import ALoraLinearVariant, DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.backbone.peft_parts import layer_state, method_of, plain_path, read_part
from swarm_plugins.backbone.refusals import WHAT_WORKS, check_inserted
from swarm_plugins.backbone.standin import StandIn
from swarm_plugins.block_io import WHOLE_ROW, AdapterUse, LoadedAdapter
from swarm_plugins.errors import UnsupportedError


class _Tuned(NamedTuple):
    """One of PEFT's layers inside a remote block."""

    block: int
    path: str
    layer: BaseTunerLayer


class _Found(NamedTuple):
    """What a search of the blocks has found."""

    structure: int
    tuned: list[_Tuned]
    weights: list[tuple[int, str, dict[str, nn.Parameter | None]]]
    """Modules with parameters of their own: block, path, live dict of the parameters."""


class _Reading(threading.local):
    """A thread's last reading: others that use the same model at once have other rows and adapters."""

    state: list[object] | None = None
    use = AdapterUse()
    row_names: Sequence[str] | None = None
    offsets: tuple[int, ...] | None = None
    is_checked = False


class AdapterReader:
    """Finds the adapters of a model's remote blocks, for several threads.

    A full reading takes milliseconds, too long for every generated token; a cheap check (active adapters, identity of
    tensors, scaling) shows whether a thread's last reading is still valid.

    Args:
        blocks: The remote decoder layers.
        first: Index of the first of them.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, first: int = 0) -> None:
        self.blocks = dict(enumerate(blocks, start=first))
        self._found = _Found(-1, [], [])
        """Replaced as a whole: other threads may read it."""
        self._reading = _Reading()

    @property
    def offsets(self) -> tuple[int, ...] | None:
        """How many last tokens the adapter of each row applies to, of this thread's last selection; None: all."""
        return self._reading.offsets

    def select(self, structure: int, indices: range, batch_size: int) -> AdapterUse:
        """Returns the active adapters of some blocks; a new number ``structure`` makes it search the modules again.

        Raises:
            UnsupportedError: If something is injected that servers cannot apply.
        """
        found, reading = self._found, self._reading
        if structure != found.structure:
            found = self._found = self._search(structure)
        names, offsets = (
            hooked((item.layer for item in found.tuned), name) for name in ("adapter_names", "alora_offsets")
        )
        state: list[object] = [structure, indices, batch_size, names, offsets]
        for item in found.tuned:
            state.extend(_state(item.layer))
        if state != reading.state:
            tuned = [item for item in found.tuned if item.block in indices]
            use = _selection(tuned, names, batch_size)
            reading.use, reading.offsets = _with_offsets(tuned, use, names, offsets, batch_size)
            reading.state, reading.row_names, reading.is_checked = state, names, False
        if torch.is_grad_enabled():
            self._refuse_forgotten(indices, found)
        if any(layer.dropout for adapter in reading.use.adapters for layer in adapter.spec.layers):
            # Drawn from the global generator, so that a seeded run is reproducible.
            return dataclasses.replace(reading.use, dropout_seed=int(torch.randint(2**62, (1,)).item()))
        return reading.use

    def _search(self, structure: int) -> _Found:
        found = _Found(structure, [], [])
        for index, block in self.blocks.items():
            for path, module in block.named_modules():
                plain = plain_path(path)
                if isinstance(module, BaseTunerLayer):
                    check_inserted(path, cast(nn.Module, module))
                    found.tuned.append(_Tuned(index, plain, module))
                elif isinstance(module, StandIn) and module._parameters:
                    found.weights.append((index, plain, module._parameters))
        return found

    def _refuse_forgotten(self, indices: range, found: _Found) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for index, path, parameters in found.weights:
                for name, parameter in parameters.items():
                    if parameter is not None and parameter.requires_grad and index in indices:
                        raise _forgotten(index, f"{path}.{name}" if path else name)
        if self._reading.is_checked:
            return
        known = {id(tensor) for tensor in self._reading.use.tensors} | self._inactive(found)
        for index in indices:
            for name, parameter in self.blocks[index].named_parameters():
                if parameter.requires_grad and id(parameter) not in known:
                    raise _forgotten(index, name)
        self._reading.is_checked = True

    def _inactive(self, found: _Found) -> set[int]:
        """Returns the tensors of adapters that are not in use: PEFT leaves them trainable."""
        inactive: set[int] = set()
        for item in found.tuned:
            used = _active(item) if self._reading.row_names is None else self._reading.row_names
            for kind in item.layer.adapter_layer_names:
                for name, part in getattr(item.layer, kind, {}).items():
                    if name not in used:
                        inactive.update(map(id, part.parameters() if isinstance(part, nn.Module) else [part]))
        return inactive


def _forgotten(index: int, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} in remote block {index} is trainable but would get no gradient: servers never change their weights. "
        f"Freeze it (requires_grad_(False)) or train an adapter; {WHAT_WORKS}"
    )


def _state(layer: Any) -> list[object]:
    """Returns a cheap fingerprint of everything a layer's adapters depend on."""
    if layer._disable_adapters:
        return [None]
    # Bypasses PEFT's properties and torch's attribute hooks: this runs for every layer and generated token.
    modules = layer._modules
    if method_of(layer):
        return layer_state(layer)
    if "ia3_l" in modules:
        vectors = modules["ia3_l"]._parameters
        return [str(layer._active_adapter), *map(id, vectors.values())]
    state: list[object] = [str(layer._active_adapter), *layer.scaling.values()]
    for factors in (modules["lora_A"], modules["lora_B"]):
        for name, factor in factors._modules.items():
            state += (name, id(factor._parameters["weight"]))
    for dropout in modules["lora_dropout"]._modules.values():
        state += (dropout.training, dropout.__dict__.get("p"))
    return state


def _check_options(item: _Tuned, name: str) -> None:
    layer: Any = item.layer
    variant = layer.lora_variant.get(name) if isinstance(layer, LoraLayer) else None
    if variant is not None and not isinstance(variant, (ALoraLinearVariant, DoraLinearVariant)):
        raise UnsupportedError(
            f"{type(variant).__name__} on {item.path!r} in remote block {item.block} is not supported; "
            f"use plain LoRA or DoRA; {WHAT_WORKS}"
        )


def _selection(tuned: Sequence[_Tuned], names: Sequence[str] | None, batch_size: int) -> AdapterUse:
    if names is None:
        # One per name: PEFT applies several adapters of a layer one by one, and a frozen one is not sent again.
        distinct = list(dict.fromkeys(name for item in tuned for name in _active(item)))
        found = [_collect([item for item in tuned if name in _active(item)], name) for name in distinct]
        return AdapterUse(adapters=tuple(adapter for adapter in found if adapter.tensors))
    if len(names) != batch_size:
        raise UnsupportedError(
            f"adapter_names has {len(names)} names for a batch of {batch_size} rows; give one for each"
        )
    distinct = [name for name in dict.fromkeys(names) if name != "__base__"]
    rows = tuple(-1 if name == "__base__" else distinct.index(name) for name in names)
    return AdapterUse(adapters=tuple(_collect(tuned, name) for name in distinct), rows=rows)


def _with_offsets(
    tuned: Sequence[_Tuned],
    use: AdapterUse,
    names: Sequence[str] | None,
    offsets: Sequence[int | None] | None,
    batch_size: int,
) -> tuple[AdapterUse, tuple[int, ...] | None]:
    """Returns which rows use an adapter that begins at its invocation tokens (aLoRA), and how many last tokens."""
    late = {name for item in tuned for name, one in _variants(item).items() if isinstance(one, ALoraLinearVariant)}
    used = set(names) if names is not None else {name for item in tuned for name in _active(item)}
    if not late & used:
        return use, None
    if len(used) > 1 and names is None:
        raise UnsupportedError(
            f"aLoRA together with other adapters ({', '.join(sorted(used))}) does not work on remote blocks: activate "
            "one, or name one for each row by adapter_names"
        )
    if offsets is not None and len(offsets) != batch_size:
        raise UnsupportedError(
            f"there are {len(offsets)} aLoRA offsets for a batch of {batch_size} rows; give one each"
        )
    each = list(names or sorted(used) * batch_size)
    # PEFT leaves an adapter out whose invocation tokens it has not found.
    counts = [one or 0 for one in offsets or (0,) * batch_size]
    rows = use.rows or (0,) * batch_size
    kept = tuple(
        -1 if name in late and count <= 0 else row for name, count, row in zip(each, counts, rows, strict=True)
    )
    return dataclasses.replace(use, rows=kept), tuple(
        count if name in late else WHOLE_ROW for name, count in zip(each, counts, strict=True)
    )


def _variants(item: _Tuned) -> dict[str, Any]:
    return item.layer.lora_variant if isinstance(item.layer, LoraLayer) else {}


def begins_late(model: nn.Module) -> bool:
    """Returns whether an adapter in use applies from its invocation tokens on only (aLoRA)."""
    layers = [one for one in model.modules() if isinstance(one, LoraLayer)]
    names = hooked(layers, "adapter_names")
    return any(hooked(layers, "alora_offsets") or ()) and any(
        isinstance(layer.lora_variant.get(name), ALoraLinearVariant)
        for layer in layers
        if not layer.disable_adapters
        for name in names or layer.active_adapters
    )


def hooked(layers: Iterable[object], name: str) -> tuple[Any, ...] | None:
    """Reads what PEFT passes to its layers for each row, in hooks: adapter names, aLoRA's offsets.

    The newest counts, as for PEFT's own layers: a forward that raises leaves its hooks behind.
    """
    for layer in layers:
        hooks: dict[int, Any] = vars(layer)["_forward_pre_hooks"]
        for hook in reversed(hooks.values()):
            if isinstance(hook, functools.partial) and hook.keywords.get(name) is not None:
                return tuple(hook.keywords[name])
    return None


def _active(item: _Tuned) -> list[str]:
    return [] if item.layer.disable_adapters else list(item.layer.active_adapters)


def _collect(tuned: Sequence[_Tuned], name: str) -> LoadedAdapter:
    modules: list[AdapterModule] = []
    tensors: list[Tensor] = []
    for item in tuned:
        _check_options(item, name)
        found = None if method_of(item.layer) else _read(item, name)
        if found is not None:
            modules.append(found[0])
            tensors.extend(found[1])
    part, others = read_part([item for item in tuned if method_of(item.layer)], name)
    return LoadedAdapter(spec=AdapterSpec(modules=tuple(modules), peft=part), tensors=(*tensors, *others))


def _dropout(item: _Tuned, name: str) -> float:
    layer: Any = item.layer
    if not isinstance(layer, LoraLayer) or name not in layer.lora_dropout:
        return 0.0
    dropout = layer.lora_dropout[name]
    return float(dropout.p) if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _read(item: _Tuned, name: str) -> tuple[AdapterModule, tuple[Tensor, ...]] | None:
    """Returns an adapter's structure and tensors on one layer; None if the layer lacks it."""
    layer: Any = item.layer
    if isinstance(layer, IA3Layer):
        if name not in layer.ia3_l:
            return None
        vector = layer.ia3_l[name]
        module = AdapterModule(
            block=item.block,
            module=item.path,
            kind="ia3",
            shapes=(tuple(vector.shape),),
            is_feedforward=bool(layer.is_feedforward),
        )
        return module, (vector,)
    if name not in layer.lora_A:
        return None
    tensors = (layer.lora_A[name].weight, layer.lora_B[name].weight)
    is_parameter = isinstance(layer, ParamWrapper)
    module = AdapterModule(
        block=item.block,
        module=item.path,
        kind="lora_parameter" if is_parameter else "lora",
        parameter=layer.parameter_name if is_parameter else None,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        scaling=float(layer.scaling[name]),
        dropout=_dropout(item, name),
        num_experts=int(layer.num_experts) if is_parameter else 1,
        # PEFT swaps its notion of in and out for experts stored [experts, out, in], the usual layout.
        transposed=is_parameter and layer.num_experts > 1 and not layer._did_swap_in_out_features,
    )
    return module, tensors
