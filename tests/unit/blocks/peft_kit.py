"""Local PEFT models, and their adapters in the form in which they are shipped."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from blocks_kit import Pair, base
from peft import PeftModel, get_peft_model
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.blocks import LoadedAdapter
from swarm_plugins.blocks.adapters.checks import check_adapter


@dataclass
class Tuned:
    """A local PEFT model and its adapters as they are shipped."""

    model: PeftModel
    pair: Pair
    spec: dict[str, AdapterSpec]
    parameters: dict[str, list[nn.Parameter]]

    def loaded(self, name: str = "default", requires_grad: bool = False) -> LoadedAdapter:
        tensors = [parameter.detach().clone() for parameter in self.parameters[name]]
        loaded = check_adapter(self.spec[name], tensors, self.pair.span)
        for tensor in loaded.tensors:
            tensor.requires_grad_(requires_grad)
        return loaded


def tune(pair: Pair, config: Any, others: dict[str, Any] | None = None) -> Tuned:
    model = get_peft_model(pair.local, copy.deepcopy(config))
    for name, other in (others or {}).items():
        model.add_adapter(name, other)
    generator = torch.Generator().manual_seed(7)
    names = ["default", *(others or {})]
    spec: dict[str, AdapterSpec] = {}
    parameters: dict[str, list[nn.Parameter]] = {}
    for name in names:
        modules: list[AdapterModule] = []
        parameters[name] = []
        for block, layer in enumerate(base(model).layers):
            for path, module in layer.named_modules():
                found = shipped(block, path, module, name)
                if found is not None:
                    entry, tensors = found
                    modules.append(entry)
                    for tensor in tensors:
                        # PEFT starts with a product of zero: then nothing would be seen.
                        tensor.data.add_(0.15 * torch.randn(tensor.shape, generator=generator))
                    parameters[name].extend(tensors)
        spec[name] = AdapterSpec(modules=tuple(modules))
    return Tuned(model, pair, spec, parameters)


def shipped(block: int, path: str, module: nn.Module, name: str) -> tuple[AdapterModule, list[nn.Parameter]] | None:
    clean = ".".join(part for part in path.split(".") if part != "base_layer")
    if isinstance(module, IA3Layer) and name in module.ia3_l:
        vector = module.ia3_l[name]
        entry = AdapterModule(
            block=block,
            module=clean,
            kind="ia3",
            shapes=(tuple(vector.shape),),
            is_feedforward=module.is_feedforward,
        )
        return entry, [vector]
    if not isinstance(module, LoraLayer) or name not in module.lora_A:
        return None
    tensors = [module.lora_A[name].weight, module.lora_B[name].weight]
    is_parameter = isinstance(module, ParamWrapper)
    dropout = module.lora_dropout[name]
    entry = AdapterModule(
        block=block,
        module=clean,
        kind="lora_parameter" if is_parameter else "lora",
        parameter=module.parameter_name if is_parameter else None,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        scaling=module.scaling[name],
        dropout=dropout.p if isinstance(dropout, nn.Dropout) else 0.0,
        num_experts=module.num_experts if is_parameter else 1,
        transposed=is_parameter and module.num_experts > 1 and not module._did_swap_in_out_features,
    )
    return entry, tensors
