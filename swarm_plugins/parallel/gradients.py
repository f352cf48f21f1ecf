"""Gradients of a model whose experts and dense layers lie on different groups of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.parallel.adapters import check_wrappers, divide_adapters
from swarm_plugins.parallel.agreement import agree, translated
from swarm_plugins.parallel.meshes import own_device
from swarm_plugins.parallel.state import Parallelism, parallel_model, parallelism_of

_BUCKET_BYTES = 32 * 2**20


def synchronize_gradients(
    model: nn.Module, *, average: bool = True, parameters: Iterable[nn.Parameter] | None = None
) -> None:
    """Reduces gradients over the batches of all ranks; call it once after all ``backward`` of an optimizer step.

    An expert has seen the tokens of every rank in its group, a dense weight those of its own rank. Each gradient is
    summed over the ranks that hold the same weight and divided by the number of batches, as data parallelism does.
    A parameter that has a gradient on any rank has one on every rank afterwards.

    Args:
        model: The parallel model, or a module that contains it; parameters around it are treated as dense.
        average: Divide by the number of batches: right if each rank's loss is a mean over as many tokens. With
            batches of different sizes, divide the summed loss by the tokens of all ranks and pass False.
        parameters: Only these, the same ones on every rank. None: all of the model.

    Raises:
        ConfigError: If the module contains no parallel model.
        TransportError: If another rank is lost.
    """
    parallelism = parallelism_of(model)
    factor = 1.0 / parallelism.num_batches if average else 1.0
    with translated("the synchronization of gradients"):
        present = _with_gradient_anywhere(model.parameters() if parameters is None else parameters, parallelism.world)
        for groups, members in _by_groups(present, parallelism):
            _sum_over(groups, members, factor)


def broadcast_parameters(model: nn.Module) -> None:
    """Copies each parameter from the first rank that holds it to the others; call it on every rank.

    Call it after adding an adapter to a parallel model, before making its optimizer: each rank has drawn its own
    initial values. The factors of a LoRA on divided experts are divided like the experts.

    Args:
        model: The parallel model, or a module that contains it.

    Raises:
        ConfigError: If the module contains no parallel model.
        UnsupportedError: If there is an adapter on divided experts that cannot be divided.
        TransportError: If another rank is lost.
    """
    mixture, parallelism = parallel_model(model)
    divided = {layout.layer.name: mixture.get_submodule(layout.layer.name) for layout in parallelism.divided}
    refusal = None
    try:
        for name, module in divided.items():
            check_wrappers(module, name)
    except SwarmError as exc:
        refusal = exc
    send_parameters(parallelism, dict(model.named_parameters()), refusal)
    for name, module in divided.items():
        divide_adapters(module, name)


def send_parameters(
    parallelism: Parallelism, parameters: Mapping[str, nn.Parameter], refusal: SwarmError | None = None
) -> None:
    """Copies parameters from the first rank that holds each to the others; see `broadcast_parameters`.

    Args:
        parallelism: Which ranks hold what.
        parameters: By name, the same ones on every rank.
        refusal: Why this rank cannot go on.

    Raises:
        ConfigError: If ranks differ in the parameters, or one refuses.
        TransportError: If another rank is lost.
    """
    shapes = [(name, one.dtype, one.shape) for name, one in parameters.items()]
    agree(repr(shapes), refusal, own_device(parallelism.batch_mesh.device_type), parallelism.world)
    for parameter in parameters.values():
        with translated("the broadcast of parameters"):
            if not isinstance(parameter, DTensor):
                dist.broadcast(local(parameter), group=parallelism.batch_mesh["tp"].get_group(), group_src=0)
            for group in parallelism.groups_of(parameter):
                dist.broadcast(local(parameter), group=group, group_src=0)


def clip_gradients(
    model: nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    parameters: Iterable[nn.Parameter] | None = None,
) -> Tensor:
    """Clips gradients by their norm over all parameters of all ranks; call it on every rank.

    ``torch.nn.utils.clip_grad_norm_`` counts only this rank's experts. Call it after :func:`synchronize_gradients`.

    Args:
        model: The parallel model, or a module that contains it.
        max_norm: The largest norm allowed; ``inf`` only measures.
        norm_type: The exponent; ``inf`` for the largest gradient.
        parameters: Only these, the same ones on every rank. None: all of the model.

    Returns:
        The norm before, the same on every rank.

    Raises:
        ConfigError: If the module contains no parallel model.
        TransportError: If another rank is lost.
    """
    parameters = list(model.parameters() if parameters is None else parameters)
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    total = _norm_of_all_ranks(parameters, norm_type, parallelism_of(model).world)
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total)
    return total


def _norm_of_all_ranks(parameters: Sequence[nn.Parameter], norm_type: float, world: dist.ProcessGroup) -> Tensor:
    """The norm of all gradients; one reduction, so that every rank gets the same bits."""
    is_largest = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
            # Several ranks hold the same gradient, and each adds its share of it.
            total = total.maximum(norm) if is_largest else total + norm.double() ** norm_type / _copies(parameter.grad)
    if is_largest:
        total = total.nan_to_num(nan=math.inf, posinf=math.inf)  # gloo's maximum would lose it
    with translated("measuring the norm of gradients"):
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=world)
    return (total if is_largest else total ** (1 / norm_type)).float()


def _copies(tensor: Tensor) -> int:
    """Number of ranks that hold the same part of a tensor."""
    parts = 1
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        parts = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return dist.get_world_size() // parts


def _with_gradient_anywhere(parameters: Iterable[nn.Parameter], world: dist.ProcessGroup) -> list[nn.Parameter]:
    """The trainable parameters that have a gradient on some rank; it is zero where there was none."""
    # An expert without tokens has none, but as part of a whole layer it would: its optimizer makes a step too.
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return []
    flags = [parameter.grad is not None for parameter in trainable]
    has = torch.tensor(flags, dtype=torch.uint8, device=trainable[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=world)
    present = [parameter for parameter, flag in zip(trainable, has.tolist(), strict=True) if flag]
    for parameter in present:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return present


def _by_groups(
    parameters: Iterable[nn.Parameter], parallelism: Parallelism
) -> Iterator[tuple[list[dist.ProcessGroup], list[nn.Parameter]]]:
    """Parameters by the groups of ranks that add up their gradients."""
    buckets: dict[tuple[str, ...], list[nn.Parameter]] = {}
    groups: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    for parameter in parameters:
        own = [group for group in parallelism.groups_of(parameter) if group.size() > 1]
        name = tuple(str(group.group_name) for group in own)
        groups[name] = own
        buckets.setdefault(name, []).append(parameter)
    for name, members in buckets.items():
        yield groups[name], members


def _sum_over(groups: Sequence[dist.ProcessGroup], parameters: Sequence[nn.Parameter], factor: float) -> None:
    for bucket in _buckets([local(parameter.grad) for parameter in parameters]):
        if groups:
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            for group in groups:
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
