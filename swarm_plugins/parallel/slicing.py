"""Slices of experts and of dense layers: what one rank cannot hold, or should not compute alone (section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.parallel.adapters import unwrapped

_BIAS_OF_SUM = "down_proj_bias"
# [E, 2 F, D] holds gate above up: both are cut, not the whole. [E, F, D], [E, D, F] and biases have one such dimension.
_CUTS: Mapping[str, Placement] = {
    "gate_up_proj": _StridedShard(1, split_factor=2),
    "up_proj": Shard(1),
    "down_proj": Shard(2),
}
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_IS_SUMMED = "swarm_gradient_is_summed"


def check_slices(experts: Any, name: str, expert_slices: int) -> None:
    """Raises unless the experts of a layer can be sliced.

    Raises:
        UnsupportedError: If their parameters have a layout that cannot.
        ConfigError: If the number of slices does not divide their intermediate dimension.
    """
    reasons = {
        "are stored transposed": getattr(experts, "is_transposed", True),
        "interleave gate and up": not getattr(experts, "is_concatenated", False),
        "normalize what each expert returns": getattr(experts, "has_post_expert_norm", False),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise UnsupportedError(f"{name}: {type(experts).__name__} {' and '.join(found)}: use expert_slices=1")
    neurons = experts.down_proj.shape[-1]
    if neurons % expert_slices:
        valid = [size for size in range(1, neurons + 1) if neurons % size == 0]
        raise ConfigError(
            f"{name}: expert_slices {expert_slices} does not divide the intermediate dimension {neurons}: "
            f"valid are {valid}"
        )


def slice_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Leaves this rank its slice of its experts, as parameters distributed over a mesh ``[ep, slice]``.

    The bias of the second product belongs to the sum of the slices: every rank has it, the first one adds it.
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        cut = _CUTS[name.removesuffix("_bias")] if name != _BIAS_OF_SUM else Replicate()
        part = distribute_tensor(parameter.data, mesh, [Shard(0), cut], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    experts.num_experts //= mesh["ep"].size()
    experts._is_expert_parallel = True
    if _BIAS_OF_SUM in experts._parameters and mesh["slice"].get_local_rank() > 0:
        experts.forward = partial(_without_bias, experts, experts.forward)


def _without_bias(experts: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    bias = experts._parameters[_BIAS_OF_SUM]
    experts._parameters[_BIAS_OF_SUM] = torch.zeros_like(bias, requires_grad=False)
    try:
        return forward(*args, **kwargs)
    finally:
        experts._parameters[_BIAS_OF_SUM] = bias


def check_shared_batch(experts: Any, name: str) -> None:
    """Raises unless divided experts can serve ranks that share a batch.

    Raises:
        UnsupportedError: If what all experts share would be trained with the gradient of a rank's own experts.
    """
    if getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"{name}: {type(experts).__name__} normalize what each expert returns by one weight for all of them: "
            "give the mesh no dimension named 'tp', or use ep_size=1"
        )


def check_dense_slices(model: PreTrainedModel, tp_size: int) -> None:
    """Raises unless the dense layers can be divided over the ranks that share a batch.

    Raises:
        UnsupportedError: If the family has no tensor-parallel plan, or a layer cannot be sliced by it.
        ConfigError: If the ranks do not divide the attention heads.
    """
    plan = _dense_plan(model)
    if not plan:
        raise UnsupportedError(
            f"{type(model).__name__} has no tensor-parallel plan: give the mesh no dimension named 'tp'"
        )
    for name, module in model.named_modules():
        if name in plan and unwrapped(module) is not module:
            raise UnsupportedError(
                f"{name} has an adapter ({type(module).__name__}), and tensor-parallel ranks would not slice what is "
                "inside: parallelize the model first, then wrap it; or give the mesh no dimension named 'tp'"
            )
    for name, module in model.named_modules():
        if name.endswith(".act_fn") and any(True for _ in module.parameters()):
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) has parameters, and each tensor-parallel rank would train them with "
                "the gradient of its slice: use another activation, or give the mesh no dimension named 'tp'"
            )
    config = model.config.get_text_config()
    heads = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    wrong = [f"{count} {name}" for name, count in heads.items() if count % tp_size]
    if wrong:
        common = math.gcd(*heads.values())
        valid = [size for size in range(1, common + 1) if common % size == 0]
        raise ConfigError(f"{tp_size} tensor-parallel ranks do not divide {' and '.join(wrong)}: valid are {valid}")


def slice_dense_layers(model: Any, mesh: DeviceMesh) -> None:
    """Divides attention, dense MLPs and embeddings by transformers' plan of the family."""
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    plan, modules = _dense_plan(model), dict(model.named_modules())
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if style != _PARTIAL_GRADIENT})

    # transformers 5.23 sums the accumulated gradient in every backward pass, so that earlier ones count twice:
    # tensor_parallel.py, ReplicatedWithGradAllReduce. Each pass's own gradient is summed here.
    def sum_gradients(module: nn.Module, _: Any) -> None:
        # Only in the forward pass: until then a loader may replace the parameters, and frozen ones may be unfrozen.
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not hasattr(parameter, _IS_SUMMED):
                parameter.register_hook(lambda grad: all_reduce(grad, "sum", mesh))
                setattr(parameter, _IS_SUMMED, True)

    for name, style in plan.items():
        if style == _PARTIAL_GRADIENT and name in modules:
            modules[name].register_forward_pre_hook(sum_gradients)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _dense_plan(model: PreTrainedModel) -> dict[str, str]:
    """Transformers' plan without the experts, one rule per module and parameter of this model."""
    experts = set(model.ep_plan or {})
    plan = {rule: style for rule, style in (model.tp_plan or {}).items() if rule not in experts}
    found: dict[str, str] = {}
    names = dict(model.named_parameters())  # a weight of two modules by its first name: it is cut once
    for name, module in model.named_modules():
        rule = replace_layer_number_by_wildcard(name)
        for own, _ in module.named_parameters(recurse=False):
            style = plan.get(f"{rule}.{own}") or plan.get(rule)
            if style and f"{name}.{own}" in names:
                found[f"{name}.{own}"] = style
        if rule in plan:
            found[name] = plan[rule]
    return found
