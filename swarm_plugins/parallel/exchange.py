"""The ways tokens take to the ranks of their experts and back: flat, hierarchical, coordinated.

Each way delivers the same rows in the same order, so what the experts compute is the same to the bit.
Letters: P ranks with distinct experts, numbered ``outer * I + inner`` with ``inner < I``; N rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from swarm_plugins.parallel.collectives import exchange_table, gather_rows, gather_table, send_rows, sum_rows


class Route(Protocol):
    """One exchange, with its numbers of rows settled."""

    def there(self, rows: Tensor) -> Tensor:
        """Takes rows sorted by the rank of their expert and returns those for this rank, by the rank they are from."""
        ...

    def back(self, rows: Tensor) -> Tensor:
        """Returns the results to where the rows came from, in the order in which they were sent."""
        ...


class Exchange(Protocol):
    """A way to exchange rows among ranks with distinct experts."""

    def open(self, table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        """Exchanges the numbers of rows.

        Args:
            table: For each rank, ``[P, X]``: rows for each of its experts, then words for that rank.
            num_experts: How many of the ``X`` columns are numbers of rows.

        Returns:
            The table of what comes from each rank, ``[P, X]``, on the CPU, and the route of the rows.
        """
        ...


class FlatExchange:
    """One all-to-all among all ranks: ``P - 1`` messages a rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def open(self, table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        """See `Exchange`."""
        received = exchange_table(table, self._group)
        both = torch.stack([table, received]).cpu()
        sent, got = both[..., :num_experts].sum(dim=-1).tolist()
        return both[1], _FlatRoute(self._group, sent, got)


class _FlatRoute:
    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self._group, self._sent, self._received = group, sent, received

    def there(self, rows: Tensor) -> Tensor:
        return send_rows(rows, self._sent, self._received, self._group)

    def back(self, rows: Tensor) -> Tensor:
        return send_rows(rows, self._received, self._sent, self._group)


class HierarchicalExchange:
    """An all-to-all inside each node, then one between ranks of the same place in their nodes (section 5.3).

    With ``G`` ranks on a node a rank sends ``(G - 1) + (P / G - 1)`` messages instead of ``P - 1``; rows for other
    nodes travel twice.

    Args:
        inner: The ranks of this node.
        outer: The ranks with this rank's place, one on each node.
    """

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        self._inner, self._outer = inner, outer

    def open(self, table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        """See `Exchange`."""
        num_inner, num_outer = self._inner.size(), self._outer.size()
        sent = table.view(num_outer, num_inner, -1)
        via = exchange_table(sent.transpose(0, 1), self._inner)  # [inner, outer, X]: from inner, for outer
        received = exchange_table(via.transpose(0, 1), self._outer)  # [outer, inner, X]: from both
        tables = torch.stack([sent.transpose(0, 1), via, received.transpose(0, 1)]).cpu()
        sizes = tables[..., :num_experts].sum(dim=-1)  # [3, inner, outer]
        route = _HierarchicalRoute(self._inner, self._outer, sizes[0], sizes[1], sizes[2])
        return tables[2].transpose(0, 1).reshape(table.shape), route


class _HierarchicalRoute:
    """Sizes are ``[inner, outer]``: of the rows sent, of those on their way, of those received."""

    def __init__(
        self, inner: dist.ProcessGroup, outer: dist.ProcessGroup, sent: Tensor, via: Tensor, received: Tensor
    ) -> None:
        self._inner, self._outer = inner, outer
        self._sent, self._via, self._received = sent, via, received

    def there(self, rows: Tensor) -> Tensor:
        rows = _transposed(rows, self._sent.T)
        rows = send_rows(rows, self._sent.sum(1).tolist(), self._via.sum(1).tolist(), self._inner)
        rows = _transposed(rows, self._via)
        return send_rows(rows, self._via.sum(0).tolist(), self._received.sum(0).tolist(), self._outer)

    def back(self, rows: Tensor) -> Tensor:
        rows = send_rows(rows, self._received.sum(0).tolist(), self._via.sum(0).tolist(), self._outer)
        rows = _transposed(rows, self._via.T)
        rows = send_rows(rows, self._via.sum(1).tolist(), self._sent.sum(1).tolist(), self._inner)
        return _transposed(rows, self._sent)


class CoordinatedExchange:
    """An all-to-all only among ranks of one tensor-parallel index, then an all-gather (section 5.3).

    ``P / T - 1`` messages and an all-gather among the ``T`` ranks that share a batch.

    Args:
        inner: The ranks that share a batch.
        outer: The ranks with this rank's tensor-parallel index.
    """

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        self._inner, self._outer = inner, outer

    def open(self, table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        """See `Exchange`."""
        num_inner, num_outer = self._inner.size(), self._outer.size()
        sent = table.view(num_outer, num_inner, -1)
        via = exchange_table(sent, self._outer)  # [outer, inner, X]: from outer, for inner
        everyone = gather_table(via, self._inner)  # [inner, outer, inner, X]: from both, for inner
        # One transfer to the host.
        both = torch.cat([sent.unsqueeze(0), everyone]).cpu()
        sizes = both[..., :num_experts].sum(dim=-1)
        received = both[1:, :, self._inner.rank()].transpose(0, 1).reshape(table.shape)
        return received, _CoordinatedRoute(self._inner, self._outer, sizes[0], sizes[1:])


class _CoordinatedRoute:
    """Sizes: of the rows sent, ``[outer, inner]``; of all rows, ``[inner, outer, inner]``: from both, for the last."""

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup, sent: Tensor, everyone: Tensor) -> None:
        self._inner, self._outer = inner, outer
        self._sent = sent.sum(1).tolist()
        self._via = everyone[inner.rank()].sum(1).tolist()
        self._gathered = everyone.sum((1, 2)).tolist()
        self._num_rows = sum(self._gathered)
        self._own = _own_rows(everyone, inner.rank())

    def there(self, rows: Tensor) -> Tensor:
        rows = send_rows(rows, self._sent, self._via, self._outer)
        rows = gather_rows(rows, self._gathered, self._inner)
        return rows[self._own.to(rows.device)]

    def back(self, rows: Tensor) -> Tensor:
        # Rows of experts elsewhere are zero here: the sum is a choice.
        everyone = rows.new_zeros(self._num_rows, *rows.shape[1:]).index_copy(0, self._own.to(rows.device), rows)
        rows = sum_rows(everyone, self._gathered, self._inner)
        return send_rows(rows, self._via, self._sent, self._outer)


def _own_rows(sizes: Tensor, own: int) -> Tensor:
    """Indices of the gathered rows ``[inner, outer, inner]`` that are for one rank, by the rank they are from."""
    ends = sizes.flatten().cumsum(0).view(sizes.shape)
    num_inner, num_outer, _ = sizes.shape
    spans = [
        torch.arange(int(ends[inner, outer, own] - sizes[inner, outer, own]), int(ends[inner, outer, own]))
        for outer in range(num_outer)
        for inner in range(num_inner)
    ]
    return torch.cat(spans)


def _transposed(rows: Tensor, sizes: Tensor) -> Tensor:
    """Blocks of rows in the order ``[a, b]``, brought into the order ``[b, a]``."""
    blocks: Sequence[Tensor] = rows.split(sizes.flatten().tolist())
    num_a, num_b = sizes.shape
    return torch.cat([blocks[a * num_b + b] for b in range(num_b) for a in range(num_a)])
