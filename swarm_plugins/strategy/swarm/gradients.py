"""Collectives on what is trained: one set of weights at the start, averaged gradients after that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from swarm_plugins.strategy.swarm.state import trained_state

_BUCKET_BYTES = 64 << 20


def send_from_first(module: nn.Module) -> None:
    """Overwrites the trainable parameters of a module, and buffers outside of its base, with those of rank 0."""
    for tensor in trained_state(module).values():
        if isinstance(tensor, Tensor):
            dist.broadcast(tensor, src=0)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replaces the gradient of each parameter by its mean over all ranks; one without gradient counts as zeros.

    A parameter that has a gradient on no rank keeps none, so that an optimizer leaves it out as in one process. Done
    after each of several backward passes it gives the same as once at the end, since a mean is linear.

    Args:
        parameters: The same on every rank, in the same order.
    """
    if not parameters:
        return
    device = parameters[0].device
    used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    kept = [one for one, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
    for bucket in _buckets(kept):
        sums = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        # Gradients in bfloat16 are added up in float32.
        flat = _flatten_dense_tensors([one.to(torch.promote_types(one.dtype, torch.float32)) for one in sums])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for one, mine, mean in zip(bucket, sums, _unflatten_dense_tensors(flat, sums), strict=True):
            mine.copy_(mean)
            one.grad = mine


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields parameters in order, those of one dtype and at most a bucket's bytes together."""
    bucket: list[nn.Parameter] = []
    for one in parameters:
        size = sum(other.numel() * other.element_size() for other in (*bucket, one))
        if bucket and (size > _BUCKET_BYTES or one.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket
