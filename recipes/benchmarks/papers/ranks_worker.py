"""One rank of an exchange: real rows over gloo, with messages that cost a stated time and experts that wait.

Two cores cannot compute for eight ranks at once, and messages on one machine are faster than on a cluster. So experts
wait instead of computing, and each message, and each byte, to another node waits as long as it would take there.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swarm_plugins.errors import SwarmError
from swarm_plugins.parallel.collectives import count_traffic
from swarm_plugins.parallel.exchange import Exchange, coordinated_exchange, flat_exchange, hierarchical_exchange
from swarm_plugins.parallel.meshes import group_of

WAYS = ("flat", "hierarchical", "coordinated")
_TIMEOUT_S = 300.0
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer with experts on some ranks."""

    ranks: int
    node: int
    """Ranks of a node, which are also those that share a batch in the coordinated exchange."""
    way: str
    experts: int
    tokens: int
    """Rows of all ranks together."""
    width: int
    message_ms: float
    """What a message to another node costs its sender."""
    mbit: float
    """Rate of a rank's bytes to other nodes."""
    token_us: float
    """What an expert waits for a row."""
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What one rank sent and waited for in one pass with one seed."""

    messages: int
    """To all ranks, for numbers and rows, there and back."""
    far_messages: int
    """Of these, those to other nodes."""
    row_bytes: int
    seconds: float


def run_layer(layer: Layer) -> list[list[Counted]]:
    """Runs a layer with each seed, one process a rank.

    Returns:
        For each rank what it counted, by seed.

    Raises:
        SwarmError: If a rank fails, does not answer, or gets other rows back than it sent.
    """
    _CONTEXT.set_forkserver_preload([__name__])
    answers: Any = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory(prefix="swarm-ranks-") as folder:
        processes = [
            _CONTEXT.Process(target=_process, args=(rank, layer, folder, answers)) for rank in range(layer.ranks)
        ]
        for process in processes:
            process.start()
        try:
            found: dict[int, Any] = {}
            for _ in processes:
                rank, result = answers.get(timeout=2 * _TIMEOUT_S)
                if isinstance(result, str):
                    raise SwarmError(f"rank {rank} of {layer.ranks} failed: {result}")
                found[rank] = result
        except queue.Empty as exc:
            raise SwarmError(f"{layer.ranks - len(found)} of {layer.ranks} ranks did not answer") from exc
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [found[rank] for rank in range(layer.ranks)]


def _process(rank: int, layer: Layer, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), layer.ranks)  # type: ignore[attr-defined]
        options = {"store": store, "rank": rank, "world_size": layer.ranks}
        dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S), **options)  # type: ignore[arg-type]
        _pass(layer, layer.seeds)  # connects the ranks
        answers.put((rank, [_pass(layer, seed) for seed in range(layer.seeds)]))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as exc:  # noqa: BLE001  # whatever it is, the parent says it
        answers.put((rank, f"{type(exc).__name__}: {exc}"))


def _pass(layer: Layer, seed: int) -> Counted:
    exchange = _exchange(layer)
    counts, rows = _rows(layer, seed)
    dist.barrier()
    with count_traffic() as traffic, _far_away(layer) as far:
        started = time.perf_counter()
        _, route = exchange(counts, counts.shape[1])
        received = route.there(rows)
        time.sleep(1e-6 * layer.token_us * len(received))
        returned = route.back(2 * received)
        dist.barrier()
        seconds = time.perf_counter() - started
    if not torch.equal(returned, 2 * rows):
        raise SwarmError(f"the {layer.way} exchange did not return the rows that were sent")
    return Counted(messages=traffic.messages, far_messages=far[0], row_bytes=traffic.row_bytes, seconds=seconds)


def _exchange(layer: Layer) -> Exchange:
    everyone = torch.arange(layer.ranks).view(-1, layer.node)  # [outer, inner]
    outer, inner = divmod(dist.get_rank(), layer.node)
    if layer.way == "flat":
        return flat_exchange(group_of(everyone.flatten().tolist(), _TIMEOUT_S))
    groups = group_of(everyone[outer].tolist(), _TIMEOUT_S), group_of(everyone[:, inner].tolist(), _TIMEOUT_S)
    return hierarchical_exchange(*groups) if layer.way == "hierarchical" else coordinated_exchange(*groups)


def _rows(layer: Layer, seed: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's numbers of rows for each expert, ``[P, E / P]``, and its rows, ``[N, D]``, by expert."""
    dice = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    num_rows = layer.tokens // layer.ranks
    experts = torch.randint(layer.experts, (num_rows,), generator=dice)
    counts = torch.bincount(experts, minlength=layer.experts).view(layer.ranks, -1)
    return counts, torch.randn(num_rows, layer.width, generator=dice)


@contextmanager
def _far_away(layer: Layer) -> Iterator[list[int]]:
    """Makes messages to other nodes wait inside; yields their number."""
    counted = [0]
    own = dist.get_rank() // layer.node

    def wait(group: dist.ProcessGroup, bytes_to: Sequence[int]) -> None:
        ranks = dist.get_process_group_ranks(group)
        far = [size for rank, size in zip(ranks, bytes_to, strict=True) if rank // layer.node != own]
        counted[0] += len(far)
        time.sleep(1e-3 * layer.message_ms * len(far) + 8e-6 * sum(far) / layer.mbit)

    def all_to_all(
        output: Tensor, given: Tensor, received: Any = None, sent: Any = None, *, group: dist.ProcessGroup
    ) -> Any:
        row = given[:1].nbytes
        wait(group, [row * count for count in sent or [len(given) // group.size()] * group.size()])
        return sending(output, given, received, sent, group=group)

    def all_gather(output: Tensor, given: Tensor, *, group: dist.ProcessGroup) -> Any:
        wait(group, [given.nbytes] * group.size())
        return gathering(output, given, group=group)

    sending: Callable[..., Any] = dist.all_to_all_single
    gathering: Callable[..., Any] = dist.all_gather_single
    dist.all_to_all_single, dist.all_gather_single = all_to_all, all_gather  # type: ignore[assignment]
    try:
        yield counted
    finally:
        dist.all_to_all_single, dist.all_gather_single = sending, gathering
