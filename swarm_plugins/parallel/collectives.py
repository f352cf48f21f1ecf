"""Rows of tensors between ranks, with gradients, on torch.distributed's collectives.

Row counts differ from rank to rank and nothing is padded on the wire, except by the all-gather to its largest part.
Each function is linear in its rows, so its backward is the adjoint exchange. Letters: N rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from swarm_plugins.parallel.agreement import translated


@dataclass
class Traffic:
    """Messages and bytes that this rank sent inside `count_traffic`.

    An all-to-all or all-gather among ``n`` ranks counts as ``n - 1`` messages: gloo sends each pair one, empty or not.
    """

    messages: int = 0
    row_bytes: int = 0
    """Bytes of rows for other ranks, without the tables of counts."""


_TRAFFIC: ContextVar[Traffic | None] = ContextVar("swarm_parallel_traffic", default=None)


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts what this rank's exchanges send inside the block; of backward passes only those on a CPU.

    On other devices autograd runs them in threads of its own.
    """
    traffic = Traffic()
    token = _TRAFFIC.set(traffic)
    try:
        yield traffic
    finally:
        _TRAFFIC.reset(token)


def exchange_table(table: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends row ``i`` of a table to rank ``i`` of the group; returns what each rank sent here, ``[ranks, ...]``."""
    table = table.contiguous()
    received = torch.empty_like(table)
    _count(group, 0)
    with translated("an exchange of counts"):
        dist.all_to_all_single(received, table, group=group)
    return received


def gather_table(table: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tables of all ranks of the group, ``[ranks, ...]``."""
    received = table.new_empty(group.size() * table.numel())
    _count(group, 0)
    with translated("an exchange of counts"):
        dist.all_gather_single(received, table.flatten(), group=group)
    return received.view(group.size(), *table.shape)


def send_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends each rank of the group its rows.

    Args:
        rows: ``[N, D]``, in the order of the ranks.
        sent: Rows for each rank.
        received: Rows from each rank.
        group: The ranks.

    Returns:
        The received rows in the order of the ranks.
    """
    if group.size() == 1:
        return rows
    there = partial(_all_to_all, sent=sent, received=received, group=group)
    back = partial(_all_to_all, sent=received, received=sent, group=group)
    return _both_ways(rows, there, back)


def gather_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gives every rank the rows of all, in the order of the ranks, each to compute something else with them."""
    return _both_ways(rows, partial(_all_gather, sizes=sizes, group=group), partial(_sum, sizes=sizes, group=group))


def sum_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sums what every rank computed for the gathered rows and returns this rank's part: a reduce-scatter."""
    return _both_ways(rows, partial(_sum, sizes=sizes, group=group), partial(_all_gather, sizes=sizes, group=group))


def keep_own_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part of rows that every rank has; in the backward pass everyone gets all gradients."""
    return _both_ways(rows, partial(_own, sizes=sizes, group=group), partial(_all_gather, sizes=sizes, group=group))


def share_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Gives every rank the rows of all, to go on with the same computation everywhere."""
    return _both_ways(rows, partial(_all_gather, sizes=sizes, group=group), partial(_own, sizes=sizes, group=group))


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def _both_ways(rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _BothWays.apply(rows, there, back)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(rows: Tensor, *, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    _count(group, (sum(sent) - sent[group.rank()]) * _row_bytes(rows))
    with translated("an exchange of tokens"):
        dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
    return result


def _all_gather(rows: Tensor, *, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    largest = max(sizes)
    padded = functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, largest - rows.shape[0]))
    result = rows.new_empty(group.size() * largest, *rows.shape[1:])
    _count(group, largest * _row_bytes(padded) * (group.size() - 1))
    with translated("a gathering of tokens"):
        dist.all_gather_single(result, padded.contiguous(), group=group)
    parts = result.view(group.size(), largest, *rows.shape[1:])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sum(rows: Tensor, *, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    own = sizes[group.rank()]
    parts = _all_to_all(rows, sent=sizes, received=[own] * group.size(), group=group)
    # Added in the order of the ranks, so that the sum does not depend on the order of arrival.
    return parts.view(group.size(), own, *rows.shape[1:]).sum(dim=0)


def _own(rows: Tensor, *, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    start = sum(sizes[: group.rank()])
    return rows[start : start + sizes[group.rank()]].clone()


def _row_bytes(rows: Tensor) -> int:
    return rows.element_size() * rows[:1].numel() if rows.shape[0] else 0


def _count(group: dist.ProcessGroup, row_bytes: int) -> None:
    if traffic := _TRAFFIC.get():
        traffic.messages += group.size() - 1
        traffic.row_bytes += row_bytes
