"""What a parallel model knows about itself, and its state dict: gathered from all ranks, scattered to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.parallel.agreement import agree, translated
from swarm_plugins.parallel.layout import LayerLayout
from swarm_plugins.parallel.meshes import own_device

_ATTRIBUTE = "swarm_parallelism"


@dataclass(frozen=True)
class Parallelism:
    """Process groups and expert layouts of a parallel model."""

    world: dist.ProcessGroup
    """All ranks, with the same deadline as the meshes."""
    batch_mesh: DeviceMesh
    """``[data, tp]``: ranks along "data" have batches of their own, ranks along "tp" share one."""
    layouts: Sequence[LayerLayout]
    """One entry per layer with experts."""
    expert_meshes: Mapping[tuple[int, int], DeviceMesh]
    """``[replica, ep, slice]`` by sizes of "ep" and "slice"."""
    ep_implementation: str

    @property
    def divided(self) -> list[LayerLayout]:
        """Layers whose experts are divided over ranks."""
        return [layout for layout in self.layouts if layout.is_distributed]

    @property
    def num_batches(self) -> int:
        """Number of ranks with a batch of their own, not counting tensor-parallel ones twice."""
        return self.batch_mesh["data"].size()

    def groups_of(self, parameter: Tensor) -> list[dist.ProcessGroup]:
        """Returns the groups whose ranks, one group after the other, add up the gradients of a parameter.

        They hold the same part of it and have seen other tokens; or, for an adapter's factor that is whole where the
        expert is sliced, each has the gradient through its slice.
        """
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placements = dict(zip(names, parameter.placements, strict=True))
            if "ep" in names:
                sizes = dict(zip(names, parameter.device_mesh.shape, strict=True))
                mesh = self.expert_meshes[sizes["ep"], sizes.get("slice", 1)]
                is_whole = "slice" in names and placements["slice"].is_replicate()
                return [mesh[name].get_group() for name in ("replica", *(["slice"] if is_whole else []))]
        return [self.batch_mesh["data"].get_group()]


def remember(model: nn.Module, parallelism: Parallelism) -> None:
    """Attaches the description to the model."""
    setattr(model, _ATTRIBUTE, parallelism)


def is_parallel(model: nn.Module) -> bool:
    """Returns whether the module or one inside it has been parallelized."""
    return any(_ATTRIBUTE in vars(module) for module in model.modules())


def parallelism_of(model: nn.Module) -> Parallelism:
    """Returns the groups and layouts that `parallelize` gave a model.

    Args:
        model: A model given to :func:`parallelize`, or a module around it (PEFT, Lightning).

    Raises:
        ConfigError: If there is no such model.
    """
    return parallel_model(model)[1]


def parallel_model(module: nn.Module) -> tuple[nn.Module, Parallelism]:
    """Returns the model inside a module that has been parallelized, and how it lies on the ranks.

    Raises:
        ConfigError: If there is no such model.
    """
    for one in module.modules():
        if found := vars(one).get(_ATTRIBUTE):
            return one, found
    raise ConfigError(f"{type(module).__name__} is not expert-parallel: call swarm_plugins.parallelize first")


def gather_state_dict(model: nn.Module, *, trained_only: bool = False) -> dict[str, Any]:
    """Returns the state dict of the whole model on rank 0, and an empty one elsewhere; call it on every rank.

    The tensors are on the CPU and have the names and shapes of the model before it was parallelized.

    Args:
        model: A parallel model, or a module around it.
        trained_only: Leave out frozen parameters: an adapter without its base model.

    Raises:
        TransportError: If another rank is lost.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
    with translated("gathering the state dict"):
        return get_model_state_dict(model, options=options)


def scatter_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Loads a whole state dict into a parallel model, each rank its part; call it on every rank.

    Args:
        model: A parallel model, or a module around it, with groups of any size.
        state_dict: Whole tensors on rank 0, as :func:`gather_state_dict` returns them; ignored elsewhere.

    Raises:
        CheckpointError: On rank 0, if names or shapes are not those of the model.
        ConfigError: On the other ranks, with rank 0's reason.
        TransportError: If another rank is lost.
    """
    refusal = _mismatch(model, state_dict) if dist.get_rank() == 0 else None
    parallelism = parallelism_of(model)
    device = own_device(parallelism.batch_mesh.device_type)
    agree("scatter", refusal, device, parallelism.world)
    with translated("scattering the state dict"):
        # torch's set_model_state_dict(broadcast_from_rank0=True) assumes that every part is contiguous; the parts of a
        # _StridedShard are not (torch 2.13).
        for name, own in model.state_dict().items():
            whole = torch.empty(own.shape, dtype=own.dtype, device=device)
            if dist.get_rank() == 0:
                whole.copy_(state_dict[name])
            dist.broadcast(whole, group=parallelism.world, group_src=0)
            if isinstance(own, DTensor):
                whole = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
            own.copy_(whole)


def _mismatch(model: nn.Module, state_dict: Mapping[str, Any]) -> CheckpointError | None:
    own = {name: getattr(one, "shape", None) for name, one in model.state_dict().items()}
    given = {name: getattr(one, "shape", None) for name, one in state_dict.items()}
    if own == given:
        return None
    kinds = {
        "missing": own.keys() - given.keys(),
        "unknown": given.keys() - own.keys(),
        "of another shape": {name for name in own.keys() & given.keys() if own[name] != given[name]},
    }
    found = "; ".join(f"{len(names)} {kind}, such as {min(names)}" for kind, names in kinds.items() if names)
    return CheckpointError(f"the state dict does not fit {type(model).__name__}: {found}; load that of the same model")
