"""The ways tokens take to the ranks of their experts and back: flat, hierarchical, coordinated.

Each way delivers the same rows in the same order, so what the experts compute is the same to the bit.
Letters: P ranks with distinct experts, numbered ``outer * I + inner`` with ``inner < I``; N rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from swarm_plugins.parallel.collectives import exchange_table, gather_rows, gather_table, send_rows, sum_rows


class Route(NamedTuple):
    """One exchange, with its numbers of rows settled."""

    there: Callable[[Tensor], Tensor]
    """Takes rows sorted by the rank of their expert and returns those for this rank, by the rank they are from."""
    back: Callable[[Tensor], Tensor]
    """Returns the results to where the rows came from, in the order in which they were sent."""


Exchange = Callable[[Tensor, int], tuple[Tensor, Route]]
"""A way to exchange rows among ranks with distinct experts; exchanges their numbers when called.

Takes a table for each rank, ``[P, X]``: rows for each of its experts, then words for that rank; and how many of the
``X`` columns are numbers of rows. Returns the table of what comes from each rank, ``[P, X]``, on the CPU, and the
route of the rows.
"""


def flat_exchange(group: dist.ProcessGroup) -> Exchange:
    """Returns an all-to-all among all ranks: ``P - 1`` messages a rank."""

    def begin(table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        both = torch.stack([table, exchange_table(table, group)]).cpu()
        sent, received = both[..., :num_experts].sum(dim=-1).tolist()
        return both[1], Route(
            there=lambda rows: send_rows(rows, sent, received, group),
            back=lambda rows: send_rows(rows, received, sent, group),
        )

    return begin


def hierarchical_exchange(inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> Exchange:
    """Returns an all-to-all inside each node, then one between ranks of the same place in their nodes (section 5.3).

    With ``G`` ranks on a node a rank sends ``(G - 1) + (P / G - 1)`` messages instead of ``P - 1``; rows for other
    nodes travel twice.

    Args:
        inner: The ranks of this node.
        outer: The ranks with this rank's place, one on each node.
    """

    def begin(table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        here = table.view(outer.size(), inner.size(), -1)
        passed = exchange_table(here.transpose(0, 1), inner)  # [inner, outer, X]: from inner, for outer
        found = exchange_table(passed.transpose(0, 1), outer)  # [outer, inner, X]: from both
        tables = torch.stack([here.transpose(0, 1), passed, found.transpose(0, 1)]).cpu()
        # [inner, outer] each: of the rows sent, of those on their way, of those received
        sent, via, received = tables[..., :num_experts].sum(dim=-1)
        inside_sent, inside_received = sent.sum(1).tolist(), via.sum(1).tolist()
        between_sent, between_received = via.sum(0).tolist(), received.sum(0).tolist()

        def there(rows: Tensor) -> Tensor:
            rows = send_rows(_transposed(rows, sent.T), inside_sent, inside_received, inner)
            return send_rows(_transposed(rows, via), between_sent, between_received, outer)

        def back(rows: Tensor) -> Tensor:
            rows = send_rows(rows, between_received, between_sent, outer)
            rows = send_rows(_transposed(rows, via.T), inside_received, inside_sent, inner)
            return _transposed(rows, sent)

        return tables[2].transpose(0, 1).reshape(table.shape), Route(there, back)

    return begin


def coordinated_exchange(inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> Exchange:
    """Returns an all-to-all only among ranks of one tensor-parallel index, then an all-gather (section 5.3).

    ``P / T - 1`` messages and an all-gather among the ``T`` ranks that share a batch.

    Args:
        inner: The ranks that share a batch.
        outer: The ranks with this rank's tensor-parallel index.
    """

    def begin(table: Tensor, num_experts: int) -> tuple[Tensor, Route]:
        here = table.view(outer.size(), inner.size(), -1)
        passed = exchange_table(here, outer)  # [outer, inner, X]: from outer, for inner
        everyone = gather_table(passed, inner)  # [inner, outer, inner, X]: from both, for inner
        # One transfer to the host.
        both = torch.cat([here.unsqueeze(0), everyone]).cpu()
        sizes = both[..., :num_experts].sum(dim=-1)
        all_sizes = sizes[1:]  # [inner, outer, inner]: from both, for the last
        sent, via = sizes[0].sum(1).tolist(), all_sizes[inner.rank()].sum(1).tolist()
        gathered = all_sizes.sum((1, 2)).tolist()
        own = _own_rows(all_sizes, inner.rank())

        def there(rows: Tensor) -> Tensor:
            rows = gather_rows(send_rows(rows, sent, via, outer), gathered, inner)
            return rows[own.to(rows.device)]

        def back(rows: Tensor) -> Tensor:
            # Rows of experts elsewhere are zero here: the sum is a choice.
            everyone = rows.new_zeros(sum(gathered), *rows.shape[1:]).index_copy(0, own.to(rows.device), rows)
            return send_rows(sum_rows(everyone, gathered, inner), via, sent, outer)

        received = both[1:, :, inner.rank()].transpose(0, 1).reshape(table.shape)
        return received, Route(there, back)

    return begin


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
