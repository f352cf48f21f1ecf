"""Reads PEFT's adapters off the stand-ins, and refuses what servers could not apply.

PEFT has injected real tensors under the real names; servers get structure and tensors. A trainable tensor that
would not be shipped would silently get no gradient, so anything unknown raises before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.backbone.standin import is_hollow
from swarm_plugins.client.adapters import AdapterSelection, ClientAdapter
from swarm_plugins.errors import UnsupportedError

__all__ = ["AdapterReader"]

_WHAT_WORKS = (
    "on remote blocks work: LoRA (also rslora, target_parameters, dropout), IA3, prompt tuning, p-tuning, prefix tuning"
)


class _Tuned(NamedTuple):
    """One of PEFT's layers inside a remote block."""

    block: int
    path: str
    layer: BaseTunerLayer


class AdapterReader:
    """Finds the adapters of a model's remote blocks.

    Args:
        blocks: The remote blocks, in order.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self._tuned: list[_Tuned] = []
        self._seen = -1

    def select(self, structure: int, indices: range, batch_size: int) -> AdapterSelection:
        """Returns the adapters that are active now on some blocks.

        Args:
            structure: Changes when modules were injected or removed; the search is done again then.
            indices: Which blocks.
            batch_size: Rows of the batch.

        Raises:
            UnsupportedError: If something is injected that servers cannot apply.
        """
        if structure != self._seen:
            self._tuned = list(_find_tuned(self.blocks))
            self._seen = structure
        tuned = [item for item in self._tuned if item.block in indices]
        selection = _selection(tuned, batch_size) if tuned else AdapterSelection()
        if torch.is_grad_enabled():
            self._refuse_forgotten(selection, indices)
        return selection

    def _refuse_forgotten(self, selection: AdapterSelection, indices: range) -> None:
        shipped = {id(tensor) for tensor in selection.tensors}
        for index in indices:
            for name, parameter in self.blocks[index].named_parameters():
                if parameter.requires_grad and id(parameter) not in shipped and not _is_inactive(name, parameter):
                    raise UnsupportedError(
                        f"{name!r} in remote block {index} is trainable but would get no gradient: servers never "
                        f"change their weights. Freeze it (requires_grad_(False)) or train an adapter; {_WHAT_WORKS}"
                    )


def _is_inactive(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a LoRA or IA3 tensor of an adapter that is switched off: PEFT leaves those trainable too."""
    known = (".lora_A.", ".lora_B.", ".ia3_l.")
    return not is_hollow(parameter) and any(part in f".{name}" for part in known)


def _find_tuned(blocks: Sequence[nn.Module]) -> Iterator[_Tuned]:
    for index, block in enumerate(blocks):
        for path, module in block.named_modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                raise UnsupportedError(
                    f"{path!r} in remote block {index} is wrapped by {type(module).__name__} (modules_to_save or "
                    f"trainable_token_indices): its weights are on servers and cannot be trained; {_WHAT_WORKS}"
                )
            if isinstance(module, BaseTunerLayer):
                _check_kind(index, path, module)
                plain = ".".join(part for part in path.split(".") if part != "base_layer")
                yield _Tuned(index, plain, module)
        for path, parameter in block.named_parameters():
            is_adapter = any(part in f".{path}" for part in (".lora_", ".ia3_l"))
            if not is_adapter and not is_hollow(parameter):
                raise UnsupportedError(
                    f"the weights {path!r} of remote block {index} were replaced here; initialisations that read or "
                    "change base weights (pissa, olora, loftq, corda, eva, lora_ga) and merging cannot work: use "
                    f"init_lora_weights=True and keep the adapter apart; {_WHAT_WORKS}"
                )


def _check_kind(index: int, path: str, layer: BaseTunerLayer) -> None:
    if type(layer) not in (LoraLinear, ParamWrapper, IA3Linear):
        raise UnsupportedError(
            f"{type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__name__} on {path!r} in remote "
            f"block {index} is not supported; {_WHAT_WORKS}"
        )
    if getattr(layer, "fan_in_fan_out", False) is True:
        raise UnsupportedError(f"fan_in_fan_out on {path!r} in remote block {index} is not supported; {_WHAT_WORKS}")


def _check_options(item: _Tuned, name: str) -> None:
    layer: Any = item.layer
    if layer.merged:
        raise UnsupportedError(
            f"an adapter is merged into {item.path!r} of remote block {item.block}; its weights are on servers: "
            "call unmerge_adapter() or load the adapter again"
        )
    if not isinstance(layer, LoraLayer):
        return
    if layer.use_dora.get(name) or name in layer.lora_variant:
        raise UnsupportedError(
            f"DoRA or another LoRA variant on {item.path!r} in remote block {item.block} needs the base weights, "
            f"which are on servers; use plain LoRA; {_WHAT_WORKS}"
        )
    if layer.lora_bias.get(name):
        raise UnsupportedError(f"lora_bias=True on {item.path!r} in remote block {item.block} is not supported; use False")


def _selection(tuned: Sequence[_Tuned], batch_size: int) -> AdapterSelection:
    names = _per_row_names(tuned)
    seed = None
    if any(_dropout(item, name) for item in tuned for name in _active(item)):
        # Drawn from the global generator, so that a seeded run is reproducible.
        seed = int(torch.randint(2**62, (1,)).item())
    if names is None:
        adapter = _collect(tuned, None)
        return AdapterSelection(adapters=(adapter,) if adapter.tensors else (), dropout_seed=seed)
    if len(names) != batch_size:
        raise UnsupportedError(f"adapter_names has {len(names)} names for a batch of {batch_size} rows; give one for each")
    distinct = [name for name in dict.fromkeys(names) if name != "__base__"]
    rows = tuple(-1 if name == "__base__" else distinct.index(name) for name in names)
    return AdapterSelection(adapters=tuple(_collect(tuned, name) for name in distinct), rows=rows)


def _per_row_names(tuned: Sequence[_Tuned]) -> list[str] | None:
    """Reads the names of a mixed batch from the hooks by which PEFT hands them to its layers."""
    for item in tuned:
        for hook in item.layer._forward_pre_hooks.values():  # type: ignore[attr-defined]
            if isinstance(hook, functools.partial) and "alora_offsets" in hook.keywords:
                raise UnsupportedError(f"aLoRA is not supported on remote blocks; {_WHAT_WORKS}")
            if isinstance(hook, functools.partial) and hook.keywords.get("adapter_names") is not None:
                return list(hook.keywords["adapter_names"])
    return None


def _active(item: _Tuned) -> list[str]:
    return [] if item.layer.disable_adapters else list(item.layer.active_adapters)


def _collect(tuned: Sequence[_Tuned], only: str | None) -> ClientAdapter:
    modules: list[AdapterModule] = []
    tensors: list[Tensor] = []
    for item in tuned:
        names = _active(item) if only is None else [only]
        for name in names:
            found = _read(item, name)
            if found is not None:
                _check_options(item, name)
                modules.append(found[0])
                tensors.extend(found[1])
    return ClientAdapter(AdapterSpec(modules=tuple(modules)), tuple(tensors))


def _dropout(item: _Tuned, name: str) -> float:
    layer: Any = item.layer
    if not isinstance(layer, LoraLayer) or name not in layer.lora_dropout:
        return 0.0
    dropout = layer.lora_dropout[name]
    return float(dropout.p) if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _read(item: _Tuned, name: str) -> tuple[AdapterModule, tuple[Tensor, ...]] | None:
    """Returns structure and tensors of one adapter on one layer, or None if the layer does not have it."""
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
    base = layer.get_base_layer()
    module = AdapterModule(
        block=item.block,
        module=item.path,
        kind="lora_parameter" if is_parameter else "lora",
        parameter=layer.parameter_name if is_parameter else None,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        scaling=float(layer.scaling[name]),
        dropout=_dropout(item, name),
        num_experts=int(layer.num_experts) if is_parameter else 1,
        transposed=bool(getattr(base, "is_transposed", False)) if is_parameter else False,
    )
    return module, tensors
