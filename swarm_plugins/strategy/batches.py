"""A check that no process runs out of batches while others wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel.agreement import translated


def check_batches(stage: str, counts: Sequence[float], device: torch.device, why: str) -> None:
    """Checks that all ranks have as many batches; infinity stands for an IterableDataset, which has no length.

    Args:
        stage: ``train``, ``val``, ``test`` or ``predict``.
        counts: This rank's number of batches per loader.
        device: Where collectives run.
        why: Why it matters, for the error.

    Raises:
        ConfigError: If they have not, on every rank.
        TransportError: If another rank is lost.
    """
    mine = torch.tensor([float(sum(counts))], device=device)
    everyone = mine.new_empty(dist.get_world_size())
    with translated(f"counting the {stage} batches"):
        dist.all_gather_single(everyone, mine)
    found = [int(count) if count != float("inf") else count for count in everyone.tolist()]
    if len(set(found)) > 1:
        raise ConfigError(
            f"the ranks have {found} {stage} batches, but {why}: give every rank as many rows, or set "
            f"limit_{stage}_batches={min(found)}"
        )
