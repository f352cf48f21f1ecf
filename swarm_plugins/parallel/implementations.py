"""Expert-parallel implementations in transformers' registry: unpadded exchanges that fail on every rank or on none.

They run in models loaded with transformers' own ``DistributedConfig(ep_implementation=...)`` too, once this module is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from swarm_plugins.errors import ConfigError
from swarm_plugins.moe import Routing
from swarm_plugins.parallel.collectives import gather_rows, gather_table, keep_own_rows, share_rows, sum_rows
from swarm_plugins.parallel.exchange import (
    Exchange,
    Route,
    coordinated_exchange,
    flat_exchange,
    hierarchical_exchange,
)
from swarm_plugins.parallel.layout import LayerLayout
from swarm_plugins.parallel.meshes import DEFAULT_TIMEOUT_S, group_of, own_device
from swarm_plugins.parallel.refusal import CanRefuse, check, complaints, failure

_SETTINGS = "swarm_exchange"
_IMPLEMENTATION = "swarm_implementation"


@dataclass(frozen=True)
class ExchangeSettings:
    """What an implementation needs besides the meshes that transformers hands it."""

    name: str = "experts"
    """Name of the module, for messages."""
    slice_mesh: DeviceMesh | None = None
    """Ranks that hold slices of the same experts; None: experts are whole."""
    ranks_per_node: int | None = None
    """Ranks on one machine; None: ``LOCAL_WORLD_SIZE``, as torchrun sets it."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold experts or slices of one copy; empty: those of the expert-parallel group."""
    timeout_s: float = DEFAULT_TIMEOUT_S

    def attach(self, experts: nn.Module) -> None:
        """Leaves the settings where an implementation finds them."""
        setattr(experts, _SETTINGS, self)


class ExchangeEP(EPImplementation):
    """Sorts tokens by expert, exchanges them with the ranks of those experts, and combines the results.

    Ranks that share a batch send disjoint parts of it. Ranks that hold slices of the same experts gather their tokens,
    and sum what their slices make of them (expert slicing, section 5.2).
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.settings: ExchangeSettings = vars(experts).get(_SETTINGS) or ExchangeSettings()
        self.num_local = int(experts.num_experts)  # type: ignore[arg-type]
        self.num_experts = self.num_local * ep_mesh.size()
        self.exchange = self.make_exchange()
        self.is_open = self.is_refused = False
        self.ranks = frozenset(self.settings.ranks or dist.get_process_group_ranks(ep_mesh.get_group()))
        setattr(experts, _IMPLEMENTATION, self)

    def make_exchange(self) -> Exchange:
        """Returns the way that tokens take."""
        return flat_exchange(self.ep_mesh.get_group())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns each token's weighted sum over its experts, wherever they are.

        Args:
            hidden_states: ``[T, D]``.
            top_k_index: Experts of the whole layer, ``[T, k]``; one more than the last for none, which nobody is sent.
            top_k_weights: ``[T, k]``.

        Raises:
            SwarmError: On every rank of the group, if one of them cannot go on or is lost.
        """
        num_shared = self.tp_mesh.size()
        sizes = [len(part) for part in torch.arange(hidden_states.shape[0]).tensor_split(num_shared)]
        if num_shared > 1:
            group = self.tp_mesh.get_group()
            hidden_states, top_k_index, top_k_weights = (
                keep_own_rows(one, sizes, group) for one in (hidden_states, top_k_index, top_k_weights)
            )
        routing = Routing(top_k_index.clamp(0, self.num_experts), self.num_experts)
        counts = torch.bincount(routing.experts, minlength=self.num_experts)[: self.num_experts]
        counts, num_sent = counts.view(-1, self.num_local), int(counts.sum())
        words = complaints(top_k_index, top_k_weights, self.num_experts)
        counts, words, slice_sizes, route = self._open(counts, words)
        check(self, words, self.settings.name)

        rows = self._compute(route.there(hidden_states[routing.tokens[:num_sent]]), counts, slice_sizes)
        # Those of no expert were sorted last.
        rows = functional.pad(route.back(rows), (0, 0, 0, len(routing.tokens) - num_sent))
        rows = routing.unsort(rows).view(*top_k_weights.shape, hidden_states.shape[1])  # [T, k, D]
        output = (rows * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)
        return share_rows(output, sizes, self.tp_mesh.get_group()) if num_shared > 1 else output

    def refuse(self) -> None:
        """See `CanRefuse`."""
        device = own_device(self.ep_mesh.device_type)
        counts = torch.zeros(self.ep_mesh.size(), self.num_local, dtype=torch.long, device=device)
        self._open(counts, failure(device))

    def _open(self, counts: Tensor, words: Tensor) -> tuple[Tensor, Tensor, list[int], Route]:
        """Exchanges the numbers of rows, ``[P, experts]``, and the complaints, ``[words]``.

        Returns those received, the rows of each rank with slices of the same experts, and the route of the rows.
        """
        self.is_open = True
        table = torch.cat([counts, words.expand(counts.shape[0], -1)], dim=1)
        received, route = self.exchange(table, self.num_local)
        counts, words = received.split([self.num_local, words.shape[0]], dim=1)
        if self.settings.slice_mesh is None:
            return counts, words, [], route
        mine = torch.cat([counts.sum().view(1), words.flatten()]).to(table.device)
        everyone = gather_table(mine, self.settings.slice_mesh.get_group()).cpu()
        return counts, everyone[:, 1:].reshape(-1, words.shape[1]), everyone[:, 0].tolist(), route

    def _compute(self, rows: Tensor, counts: Tensor, slice_sizes: list[int]) -> Tensor:
        """Runs rows ``[N, D]`` through this rank's experts; ``counts [P, experts]`` tells which."""
        experts = torch.arange(self.num_local).repeat(counts.shape[0]).repeat_interleave(counts.flatten())
        experts = experts.to(rows.device)
        if self.settings.slice_mesh is None:
            return self._run_experts(rows, experts)
        group = self.settings.slice_mesh.get_group()
        rows, experts = (gather_rows(one, slice_sizes, group) for one in (rows, experts))
        return sum_rows(self._run_experts(rows, experts), slice_sizes, group)

    def _run_experts(self, rows: Tensor, experts: Tensor) -> Tensor:
        num_rows = rows.shape[0]
        if num_rows == 0:
            # One row of zeros keeps experts and exchange in the graph: the other ranks wait in backward.
            rows, experts = functional.pad(rows, (0, 0, 0, 1)), functional.pad(experts, (0, 1))
        result: Tensor = self.experts_forward(rows, experts.unsqueeze(1), rows.new_ones(rows.shape[0], 1))
        return result[:num_rows]


def implementation_of(experts: nn.Module) -> CanRefuse | None:
    """Returns the implementation that transformers built for an experts module, if it is one of ours."""
    found: CanRefuse | None = vars(experts).get(_IMPLEMENTATION)
    return found


class HierarchicalEP(ExchangeEP):
    """Exchanges inside each node first, then between nodes: ``(G - 1) + (P / G - 1)`` messages a rank (section 5.3)."""

    def make_exchange(self) -> Exchange:
        """Returns the way that tokens take.

        Raises:
            ConfigError: If the group's ranks do not lie on nodes evenly.
        """
        per_node = find_ranks_per_node(self.settings.ranks_per_node)
        ranks = dist.get_process_group_ranks(self.ep_mesh.get_group())
        return hierarchical_exchange(*_inner_and_outer(ranks, node_size(ranks, per_node), self.settings.timeout_s))


class CoordinatedEP(ExchangeEP):
    """Exchanges only among ranks of one tensor-parallel index, then gathers among the ranks that share a batch."""

    def make_exchange(self) -> Exchange:
        """Returns the way that tokens take.

        Raises:
            ConfigError: If no ranks share a batch.
        """
        num_shared = self.tp_mesh.size()
        check_shared_batch(num_shared)
        if self.settings.slice_mesh is not None:
            # The group already consists of ranks of one index, and the slices are gathered anyway.
            return flat_exchange(self.ep_mesh.get_group())
        ranks = dist.get_process_group_ranks(self.ep_mesh.get_group())
        return coordinated_exchange(*_inner_and_outer(ranks, num_shared, self.settings.timeout_s))


def check_shared_batch(num_shared: int) -> None:
    """Raises unless there are ranks that share a batch.

    Raises:
        ConfigError: If there are none.
    """
    if num_shared == 1:
        raise ConfigError(
            "coordinated_all_to_all needs ranks that share a batch: give the mesh a last dimension named 'tp', or use "
            "flat_all_to_all"
        )


def find_ranks_per_node(given: int | None) -> int:
    """Returns how many ranks a machine has, as given or as torchrun says.

    Raises:
        ConfigError: If neither does.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if given is None else given
    if per_node < 1:
        raise ConfigError(
            f"hierarchical_all_to_all: ranks_per_node is {given} and LOCAL_WORLD_SIZE {per_node}: pass how many "
            "ranks a machine has, or start with torchrun, which sets LOCAL_WORLD_SIZE"
        )
    return per_node


def node_size(ranks: list[int], ranks_per_node: int) -> int:
    """Returns how many ranks of a group each node has.

    Raises:
        ConfigError: If nodes have different numbers of them.
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    per_node = {node: nodes.count(node) for node in nodes}
    if len(set(per_node.values())) > 1 or nodes != sorted(nodes):
        raise ConfigError(
            f"hierarchical_all_to_all: with {ranks_per_node} ranks per node, ranks {ranks} lie on nodes {nodes}: "
            "every node needs as many of them; choose another ep_size or ranks_per_node, or use flat_all_to_all"
        )
    return next(iter(per_node.values()))


def _inner_and_outer(ranks: list[int], num_inner: int, timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's row and column of a group's ranks laid out as ``[outer, inner]``."""
    grid = torch.tensor(ranks).view(-1, num_inner)
    outer, inner = (grid == dist.get_rank()).nonzero()[0].tolist()
    return group_of(grid[outer].tolist(), timeout_s), group_of(grid[:, inner].tolist(), timeout_s)


OWN_IMPLEMENTATIONS: Mapping[str, type[ExchangeEP]] = {
    "flat_all_to_all": ExchangeEP,
    "hierarchical_all_to_all": HierarchicalEP,
    "coordinated_all_to_all": CoordinatedEP,
}
for _name, _implementation in OWN_IMPLEMENTATIONS.items():
    EPImplementationInterface.register(_name, _implementation)


def check_implementation(name: str, layouts: Sequence[LayerLayout], ranks: Tensor, ranks_per_node: int | None) -> None:
    """Raises unless an implementation can run all layers, whatever the rank.

    Args:
        name: Its name in transformers' registry.
        layouts: The layers.
        ranks: All ranks by batch, ``[data, tp]``.
        ranks_per_node: Ranks on one machine, if the caller says.

    Raises:
        ConfigError: If there is no such implementation, or it needs another layout.
    """
    known = list(EPImplementationInterface())
    if name not in known:
        raise ConfigError(f"unknown ep_implementation {name!r}; known: {', '.join(sorted(known))}")
    if name not in OWN_IMPLEMENTATIONS and any(layout.expert_slices > 1 for layout in layouts):
        raise ConfigError(f"ep_implementation {name!r} knows no expert_slices: use {', '.join(OWN_IMPLEMENTATIONS)}")
    own_batches = [layout for layout in layouts if layout.is_distributed and layout.ep_size != ranks.shape[1]]
    if EPImplementationInterface()[name].needs_shared_batch and own_batches:
        raise ConfigError(
            f"ep_implementation {name!r} needs groups of the ranks that share a batch: layer "
            f"{own_batches[0].layer.index} has ep_size {own_batches[0].ep_size}, and {ranks.shape[1]} ranks share a "
            f"batch; use ep_size={ranks.shape[1]}, or {', '.join(OWN_IMPLEMENTATIONS)}"
        )
    if name == "coordinated_all_to_all":
        check_shared_batch(ranks.shape[1])
    if name == "hierarchical_all_to_all":
        per_node = find_ranks_per_node(ranks_per_node)
        for layout in layouts:
            grid = ranks.reshape(layout.num_replicas, layout.ep_size, layout.expert_slices)
            for group in grid.transpose(1, 2).reshape(-1, layout.ep_size).tolist():
                node_size(group, per_node)


def check_drops(name: str) -> None:
    """Raises ConfigError unless an implementation runs with tokens over an expert's capacity, which go to none."""
    # Of transformers' own, these send each choice to the rank of its expert.
    if name in ("all_to_all", "auto"):
        raise ConfigError(
            f"ep_implementation {name!r} cannot run a model with capacity_factor, where some tokens go to no expert: "
            f"use {', '.join(OWN_IMPLEMENTATIONS)} or all_reduce"
        )
