"""Gradients of a model whose experts and dense layers lie on different groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel.agreement import translated
from swarm_plugins.parallel.state import Parallelism, parallelism_of

_BUCKET_BYTES = 32 * 2**20


def synchronize_gradients(model: nn.Module, *, average: bool = True) -> None:
    """Makes the gradients those of the batches of all ranks; call it after ``backward``, before the optimizer.

    An expert has seen the tokens of every rank in its group, a dense weight those of its own rank. Each gradient is
    summed over the ranks that hold the same weight and divided by the number of batches, as data parallelism does.

    Args:
        model: The parallel model, or a module that contains it; parameters around it are treated as dense.
        average: Divide by the number of batches: right if each rank's loss is a mean over as many tokens. With
            batches of different sizes, divide the summed loss by the tokens of all ranks and pass False.

    Raises:
        ConfigError: If the module contains no parallel model.
        TransportError: If another rank is lost.
    """
    parallelism = parallelism_of(model)
    factor = 1.0 / parallelism.num_batches if average else 1.0
    for group, parameters in _by_group(model, parallelism):
        with translated("the synchronization of gradients"):
            _sum_over(group, parameters, factor)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients down so that their norm, over all parameters of all ranks, is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` counts only this rank's experts. Call it after :func:`synchronize_gradients`, on
    every rank.

    Args:
        model: The parallel model, or a module that contains it.
        max_norm: The largest norm allowed; ``inf`` only measures.

    Returns:
        The norm before, the same on every rank.

    Raises:
        TransportError: If another rank is lost.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    squares = []
    with translated("measuring the norm of gradients"):
        for parameters in by_mesh.values():
            norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
    total = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _by_group(model: nn.Module, parallelism: Parallelism) -> Iterator[tuple[dist.ProcessGroup, list[nn.Parameter]]]:
    """The trainable parameters, by the group of ranks that hold the same of them."""
    buckets: dict[str, list[nn.Parameter]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            group = parallelism.group_of(parameter)
            groups[group.group_name] = group
            buckets.setdefault(group.group_name, []).append(parameter)
    for name, parameters in buckets.items():
        yield groups[name], parameters


def _sum_over(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], factor: float) -> None:
    device = parameters[0].device
    # A rank whose experts got no token has no gradient for them; the other copies may have one.
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device=device)
    if group.size() > 1:
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    present = [parameter for parameter, flag in zip(parameters, has.tolist(), strict=True) if flag]
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([local(parameter.grad) for parameter in present]):
        if group.size() > 1:
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat, group=group)
            for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(summed.view_as(grad))
        for grad in bucket:
            grad.mul_(factor)


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one type, at most as many bytes as are sent at once; a larger one goes alone."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (grad.dtype != bucket[0].dtype or size + grad.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket


def local(tensor: Tensor | None) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory."""
    if tensor is None:
        raise ConfigError("a parameter has no gradient")
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
