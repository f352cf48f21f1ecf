"""Checks, and ends of streams, that keep any process from running out of batches while others wait for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel.agreement import translated

log = logging.getLogger(__name__)

_END = object()


def check_batches(stage: str, counts: Sequence[float], device: torch.device, why: str) -> None:
    """Checks that all ranks have as many batches; infinity stands for a loader without a length.

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


def ending_together(loader: Any, strategy: Any) -> Any:
    """Returns a loader that ends for all ranks when one has no more batches; one whose length all know, as it is.

    Args:
        loader: Any iterable of batches, on every rank.
        strategy: Decides for all ranks, by ``reduce_boolean_decision``.

    Raises:
        TransportError: If another rank is lost.
    """
    if strategy.world_size == 1 or not dist.is_initialized():
        return loader
    if strategy.reduce_boolean_decision(sized_len(loader) is not None):
        return loader
    return (_Resumable if hasattr(loader, "state_dict") else EndingTogether)(loader, strategy)


class EndingTogether:
    """A stream of batches; before each one the ranks agree that all have one.

    Args:
        loader: The stream. This object has its attributes too, as loaders of Fabric do.
        strategy: Decides for all ranks, by ``reduce_boolean_decision``.
    """

    loader_here: Any
    deciding: Any

    def __init__(self, loader: Iterable[Any], strategy: Any) -> None:
        vars(self).update(getattr(loader, "__dict__", {}), loader_here=loader, deciding=strategy)

    def __setattr__(self, name: str, value: Any) -> None:
        # A Trainer sets the seeds of a loader's workers.
        super().__setattr__(name, value)
        setattr(self.loader_here, name, value)

    def __iter__(self) -> Iterator[Any]:
        """Yields batches while every rank has one.

        Raises:
            TransportError: If another rank is lost.
        """
        rows, count = iter(self.loader_here), 0
        while True:
            batch = next(rows, _END)
            if not self.deciding.reduce_boolean_decision(batch is not _END):
                break
            count += 1
            yield batch
        if batch is not _END:
            log.warning(
                "another rank has only %d batches: the epoch ends here for all, and the rest of this rank's is left "
                "out; give every rank as many rows, or set limit_train_batches=%d",
                count,
                count,
            )


class _Resumable(EndingTogether):
    """One that goes on where it was; Lightning asks for the methods."""

    def state_dict(self) -> Any:
        return self.loader_here.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader_here.load_state_dict(state)
