"""Device meshes of an expert-parallel model, with deadlines: one for the batch, one per distinct layout of experts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel.agreement import translated

BATCH_DIMS = ("data", "tp")
EXPERT_DIMS = ("replica", "ep", "slice")
DEFAULT_TIMEOUT_S = 600.0

_GROUPS: dict[tuple[dist.ProcessGroup | None, tuple[int, ...], float], dist.ProcessGroup] = {}


def start_torch_distributed(device_type: str, timeout_s: float) -> None:
    """Joins the process group that torchrun describes, unless there is one.

    Raises:
        ConfigError: If this process was not started by torchrun.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"torch.distributed is not initialized and {', '.join(missing)} are not set: "
            "start the program with `torchrun --nproc-per-node N program.py`, or call init_process_group first"
        )
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    backend = dist.get_default_backend_for_device(device_type)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def default_device_type() -> str:
    """Returns the type of this machine's accelerator; "cpu" without one, or if the process group is for CPUs only."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def own_device(device_type: str) -> torch.device:
    """Returns the device whose tensors this rank's collectives take."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def batch_ranks(mesh: DeviceMesh | None) -> torch.Tensor:
    """Returns the ranks by batch: ``[data, tp]``; the ranks of a row share one batch.

    Args:
        mesh: A mesh of the whole world. A dimension named "tp" must be its last; the others hold distinct batches.
            None: every rank has a batch of its own.

    Raises:
        ConfigError: If the mesh leaves out a rank, has them in another order, or "tp" is not its last dimension.
    """
    world_size = dist.get_world_size()
    if mesh is None:
        return torch.arange(world_size).unsqueeze(1)
    names = mesh.mesh_dim_names or ()
    if mesh.size() != world_size:
        raise ConfigError(f"the mesh has {mesh.size()} of {world_size} ranks: make it of all of them")
    order = mesh.mesh.flatten().tolist()
    if order != sorted(order):
        # A group of torch.distributed has its ranks in ascending order, whatever a mesh says: rows would go astray.
        raise ConfigError(f"the mesh has the ranks in the order {order}: make it of {sorted(order)}, in this order")
    if "tp" not in names:
        return mesh.mesh.reshape(-1, 1).cpu()
    if names[-1] != "tp":
        raise ConfigError(f"the dimensions of the mesh are {names}: 'tp' must be the last one")
    return mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).cpu()


def build_mesh(
    ranks: torch.Tensor, shape: Sequence[int], names: tuple[str, ...], device_type: str, timeout_s: float
) -> DeviceMesh:
    """Returns a mesh of all ranks whose collectives end after ``timeout_s`` seconds at the latest.

    Args:
        ranks: All ranks, in an order in which neighbors are close.
        shape: Sizes of the dimensions.
        names: Their names.
        device_type: For example "cpu".
        timeout_s: Deadline of each collective.
    """
    # DeviceMesh would create its groups with torch's default deadline, half an hour for gloo.
    grid = ranks.reshape(*shape)
    groups = []
    for dim in range(grid.ndim):
        members = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
        groups.append(group_of(next(row for row in members if dist.get_rank() in row), timeout_s))
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)


def group_of(ranks: Iterable[int], timeout_s: float) -> dist.ProcessGroup:
    """Returns the group of some ranks, the same one each time; its members call it in the same order.

    Raises:
        TransportError: If another rank does not come.
    """
    key = (dist.group.WORLD, tuple(ranks), timeout_s)
    for old in [one for one in _GROUPS if one[0] is not dist.group.WORLD]:
        # Of a process group that has been destroyed since.
        del _GROUPS[old]
    if key not in _GROUPS:
        with translated("building the groups"):
            # Only members take part, since transformers tells a rank only about its own group.
            group = dist.new_group(list(key[1]), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
        _GROUPS[key] = group
    return _GROUPS[key]
