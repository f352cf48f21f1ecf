"""LoRA on divided experts: PEFT's factors are divided like the weights, and added where the experts run.

PEFT's wrapper of a parameter (``target_parameters``) would add ``B A`` of all experts to the parameter, around the
exchange of tokens. Here it hands over this rank's part of the factors, and the experts add it to their own weights.
Which adapters are active, their scaling, saving and loading stay PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import ExpertDelta

_ACTIVE = "swarm_active_adapters"


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside PEFT's wrappers."""
    inner: nn.Module = _chain(module)[-1]
    return inner


def check_wrappers(module: nn.Module, name: str) -> None:
    """Raises unless every adapter on an experts module is a LoRA on a parameter that has a dimension for the experts.

    Args:
        module: The experts, perhaps inside wrappers.
        name: Dotted name of the experts.

    Raises:
        UnsupportedError: If another adapter is there.
    """
    *wrappers, experts = _chain(module)
    for wrapper in wrappers:
        parameter = getattr(wrapper, "parameter_name", None)
        if not hasattr(wrapper, "_activate_lora") or getattr(experts, str(parameter)).ndim != 3:
            what = type(wrapper).__name__ + (f" on {parameter!r}" if parameter else "")
            raise UnsupportedError(
                f"{name}: {what} cannot be divided with the experts: use LoraConfig(target_parameters=[...]) on "
                "weights of three dimensions, such as 'mlp.experts.gate_up_proj' and 'mlp.experts.down_proj'"
            )


def check_divided(module: nn.Module, experts: nn.Module, name: str) -> None:
    """Raises unless what stands in a block is its divided experts, with no adapter that is not divided.

    Args:
        module: What the block calls.
        experts: The experts that :func:`swarm_plugins.parallelize` has divided.
        name: Dotted name of the experts.

    Raises:
        UnsupportedError: If not.
    """
    *wrappers, found = _chain(module)
    if found is not experts:
        raise UnsupportedError(
            f"{name} has been replaced by a {type(found).__name__} since it was divided: on divided experts only LoRA "
            "by LoraConfig(target_parameters=[...]) is possible"
        )
    for wrapper in wrappers:
        if not all(isinstance(factor.weight, DTensor) for factor in _factors(wrapper)):
            raise UnsupportedError(
                f"{name} has an adapter ({type(wrapper).__name__}) that is not divided over the ranks: call "
                "swarm_plugins.parallel.broadcast_parameters(model) on every rank after get_peft_model, add_adapter "
                "or load_adapter, before the optimizer is made"
            )


def divide_adapters(module: nn.Module, name: str) -> None:
    """Leaves each rank the factors of its experts, as parameters distributed over the mesh of the weights.

    Args:
        module: Divided experts, perhaps inside wrappers whose factors are the same on every rank.
        name: Dotted name of the experts.

    Raises:
        UnsupportedError: If another adapter than LoRA is there.
    """
    check_wrappers(module, name)
    *wrappers, experts = _chain(module)
    for wrapper in wrappers:
        weight: Any = getattr(experts, wrapper.parameter_name)
        for adapter, rank in wrapper.r.items():
            placements = zip(*(_of_factors(one, rank) for one in weight.placements), strict=True)
            factors = (wrapper.lora_A[adapter], wrapper.lora_B[adapter])
            for factor, placed in zip(factors, placements, strict=True):
                if not isinstance(factor.weight, DTensor):
                    part = distribute_tensor(factor.weight.data, weight.device_mesh, placed, src_data_rank=None)
                    factor.weight = nn.Parameter(part, requires_grad=factor.weight.requires_grad)
        wrapper._activate_lora = partial(_lent, wrapper)
        wrapper.get_delta_weight = partial(_delta_weight, wrapper)


def take_adapters(experts: Any) -> None:
    """Lets an experts module add the adapters lent to it; call it before an exchange is built on its forward."""
    forward = experts.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        deltas = vars(experts).get(_ACTIVE, ())
        # The exchange has put this rank's parts in the place of the parameters.
        plain = {delta.parameter: experts._parameters[delta.parameter] for delta in deltas}
        try:
            for delta in deltas:
                experts._parameters[delta.parameter] = _added(experts, experts._parameters[delta.parameter], delta)
            return forward(*args, **kwargs)
        finally:
            experts._parameters.update(plain)

    experts.forward = run


def _chain(module: Any) -> list[Any]:
    """A module inside PEFT's wrappers, the outermost first."""
    chain = [module]
    while (inner := chain[-1]._modules.get("base_layer")) is not None:
        chain.append(inner)
    return chain


def _factors(wrapper: Any) -> Iterator[Any]:
    for name in ("lora_A", "lora_B"):
        yield from getattr(wrapper, name, {}).values()


def _of_factors(placement: Placement, rank: int) -> tuple[Placement, Placement]:
    """How the factors ``A [rank * E, in]`` and ``B [out, rank * E]`` lie where a weight ``[E, out, in]`` is placed."""
    if not isinstance(placement, (Shard, _StridedShard)):
        return Replicate(), Replicate()
    if placement.dim == 0:
        # The expert is the outer index in A, and the inner one in B.
        return Shard(0), _StridedShard(1, split_factor=rank)
    if placement.dim == 2:
        return Shard(1), Replicate()
    if isinstance(placement, _StridedShard):
        return Replicate(), _StridedShard(0, split_factor=placement.split_factor)
    return Replicate(), Shard(0)


def _delta(wrapper: Any, adapter: str) -> ExpertDelta:
    factor_a, factor_b = (getattr(wrapper, name)[adapter].weight.to_local() for name in ("lora_A", "lora_B"))
    num_experts = factor_a.shape[0] // wrapper.r[adapter]
    scaling = wrapper.scaling[adapter]
    return ExpertDelta(wrapper.parameter_name, num_experts, factor_a, factor_b, scaling, lambda num_tokens: None)


def _added(experts: Any, weight: Tensor, delta: ExpertDelta) -> Tensor:
    """Adds the product of the factors to a weight ``[E, out, in]``, or ``[E, in, out]`` where that is how it lies."""
    factor_a, factor_b = (factor.to(weight.dtype) for factor in delta.factors())
    left, right = factor_b.permute(2, 0, 1), factor_a  # [E, out, rank], [E, rank, in]
    if getattr(experts, "is_transposed", False):
        left, right = factor_a.transpose(1, 2), factor_b.permute(2, 1, 0)
    with torch.autocast(weight.device.type, enabled=False):
        return torch.baddbmm(weight, left, right, alpha=delta.scaling)


@contextmanager
def _lent(wrapper: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Takes the place of PEFT's ``ParamWrapper._activate_lora``."""
    experts = wrapper.get_base_layer()
    before = vars(experts).get(_ACTIVE, ())
    own = [_delta(wrapper, name) for name in active_adapters if name in wrapper.lora_A]
    setattr(experts, _ACTIVE, (*before, *own))
    try:
        yield
    finally:
        setattr(experts, _ACTIVE, before)


def _delta_weight(wrapper: Any, adapter: str) -> Tensor:
    """Takes the place of PEFT's ``ParamWrapper.get_delta_weight``, for merging."""
    weight = wrapper.get_param()
    part = _added(wrapper.get_base_layer(), torch.zeros_like(weight.to_local()), _delta(wrapper, adapter))
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
