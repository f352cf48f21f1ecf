"""Reads the layers of PEFT's other methods, which servers build anew from their options.

A layer keeps few of its options; so an adapter's config is noted on its layers when PEFT injects them. DoRA starts from
norms of the base's weights: servers compute them, for all layers at once, when PEFT has injected the adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.tuners.vblora import VBLoRAModel
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterSpec, PeftLayer, PeftPart, PeftValue
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.checkpoint.hollow import is_hollow
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.peft_methods import PEFT_METHODS, shipped_tensors

_CONFIGS = "_swarm_configs"


@functools.cache
def follow_injection() -> None:
    """Makes PEFT's injection note each adapter's config on its layers, and ask servers for norms. Idempotent.

    It also makes PEFT's loading of VB-LoRA give finite values to logits that were not saved.
    """
    inject, start = BaseTuner.inject_adapter, DoraLinearLayer.update_layer
    remap: Any = VBLoRAModel._remap_adapter_state_dict_for_load

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        inject(self, model, adapter_name, *args, **kwargs)
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                vars(module).setdefault(_CONFIGS, {})[adapter_name] = self.peft_config[adapter_name]
        _fetch_norms(model, adapter_name)

    @functools.wraps(start)
    def update_layer(self: Any, *, base_layer: Any, lora_A: Tensor, **kwargs: Any) -> None:
        if not is_hollow(base_layer.weight):
            start(self, base_layer=base_layer, lora_A=lora_A, **kwargs)
        else:
            self.weight = nn.Parameter(torch.ones(base_layer.out_features, dtype=lora_A.dtype, device=lora_A.device))

    @functools.wraps(remap)
    def remap_logits(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = remap(model, *args, **kwargs)
        if any(map(_stack_of, model.modules())):
            # PEFT sets them to -inf, which servers refuse. In a softmax this value gives 0, too, and it fits float16.
            least = torch.finfo(torch.float16).min
            found |= {name: one.clamp(min=least) for name, one in found.items() if "vblora_logits" in name}
        return found

    BaseTuner.inject_adapter = inject_adapter  # type: ignore[method-assign]
    VBLoRAModel._remap_adapter_state_dict_for_load = staticmethod(remap_logits)  # type: ignore[method-assign]
    DoraLinearLayer.update_layer = update_layer  # type: ignore[method-assign]


@torch.no_grad()
def _fetch_norms(model: nn.Module, adapter: str) -> None:
    """Sets the magnitudes of DoRA on remote blocks to the norms of the weights, with the first update."""
    found = [_stack_of(module) for module in model.modules()]
    for stack in {id(one): one for one in found if one is not None}.values():
        items = [
            (block, plain_path(path), layer)
            for block, module in zip(stack.blocks, stack.layers, strict=True)
            for path, layer in module.named_modules()
            if isinstance(layer, LoraLinear) and layer.use_dora.get(adapter)
        ]
        # Loaded without memory: the values come from a file.
        items = [item for item in items if not item[2].lora_A[adapter].weight.is_meta]
        part, tensors = read_part(items, adapter)
        if part is None:
            continue
        whole = LoadedAdapter(
            spec=AdapterSpec(modules=(), peft=part), tensors=tuple(tensor.detach().cpu() for tensor in tensors)
        )
        norms = stack.remote.weight_norms(whole, stack.blocks)
        for block, path, layer in items:
            magnitudes: Any = layer.lora_magnitude_vector
            magnitudes[adapter].weight.copy_(norms[block, path])


def _stack_of(module: nn.Module) -> Any:
    return vars(module).get("swarm_stack")


def plain_path(path: str) -> str:
    """Returns the path of a module without PEFT's layers around it."""
    return ".".join(part for part in path.split(".") if part != "base_layer")


def method_of(layer: Any) -> str:
    """Returns the method whose layer servers build anew; empty for one that they apply themselves, and for others."""
    if type(layer) in (ParamWrapper, IA3Linear) or (type(layer) is LoraLinear and not is_changed_lora(layer)):
        return ""
    package, _, path = type(layer).__module__.partition("peft.tuners.")
    name = path.partition(".")[0].upper()
    is_linear = isinstance(layer, BaseTunerLayer) and isinstance(layer.get_base_layer(), nn.Linear)
    return name if not package and name in PEFT_METHODS and is_linear else ""


def is_changed_lora(layer: Any) -> bool:
    """Returns whether a LoRA layer does more than a low-rank product."""
    return any(layer.use_dora.values()) or any(layer.lora_bias.values())


def layer_state(layer: Any) -> list[object]:
    """Returns a cheap fingerprint of everything that the adapters of a layer depend on."""
    state: list[object] = [str(layer._active_adapter), *getattr(layer, "scaling", {}).values()]
    for name, child in layer._modules.items():
        if name != "base_layer":
            state.extend((id(tensor), tensor.requires_grad) for tensor in (*child.parameters(), *child.buffers()))
            state.extend((one.training, one.p) for one in child.modules() if isinstance(one, nn.Dropout))
    return state


def read_part(items: Iterable[tuple[int, str, Any]], name: str) -> tuple[PeftPart | None, list[Tensor]]:
    """Returns an adapter's structure and tensors on some layers (block, path, layer); None if they lack it."""
    methods: set[str] = set()
    layers: list[PeftLayer] = []
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    for block, path, layer in items:
        method = method_of(layer)
        found = shipped_tensors(layer, name, method)
        if not found:
            continue
        methods.add(method)
        for tensor in found.values():
            if id(tensor) not in places:
                places[id(tensor)] = len(tensors)
                tensors.append(tensor)
        scaling = getattr(layer, "scaling", {}).get(name)
        layers.append(
            PeftLayer(
                block=block,
                module=path,
                options=_options(layer, name, method),
                names=tuple(found),
                places=tuple(places[id(tensor)] for tensor in found.values()),
                scaling=None if scaling is None else float(scaling),
                dropout=_dropout(layer, name, method),
            )
        )
    if not layers:
        return None, []
    if len(methods) > 1:
        raise UnsupportedError(
            f"one adapter with layers of {' and '.join(sorted(methods))} cannot work on remote blocks"
        )
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return PeftPart(method=methods.pop(), shapes=shapes, layers=tuple(layers)), tensors


def _options(layer: Any, name: str, method: str) -> tuple[tuple[str, PeftValue], ...]:
    configs = vars(layer).get(_CONFIGS, {})
    if name not in configs:
        raise UnsupportedError(
            f"the config of adapter {name!r} is not known: inject it with PEFT after loading the model"
        )
    found = []
    for name_of_option, option in PEFT_METHODS[method].options.items():
        on_layer = getattr(layer, option.source) if option.source else {}
        found.append((name_of_option, on_layer.get(name, getattr(configs[name], name_of_option))))
    return tuple(found)


def _dropout(layer: Any, name: str, method: str) -> float:
    dropouts = getattr(layer, PEFT_METHODS[method].dropout or "", {})
    dropout = dropouts[name] if name in dropouts else None  # noqa: SIM401 - a ModuleDict has no get()
    return float(dropout.p) if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
