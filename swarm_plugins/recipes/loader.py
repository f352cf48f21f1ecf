"""Batches in an order that a resumed run goes on with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler


class EpochSampler(RandomSampler):
    """Shuffles anew in each epoch, by a seed and the number of the epoch alone.

    Lightning and Fabric tell it the epoch. For several processes, they put a DistributedSampler in its place, which
    shuffles like this.

    Args:
        rows: The data set.
        seed: Of the order.
    """

    def __init__(self, rows: Sized, seed: int) -> None:
        super().__init__(rows)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        return super().__iter__()


class ResumableLoader(DataLoader[Any]):
    """A loader whose place is kept in Lightning's checkpoints: a resumed epoch goes on with the next batch.

    It needs a sampler with a seed and an epoch; with others, an epoch begins anew.
    """

    _num_batches = 0
    """Of this epoch, which have been read."""
    _resumed: Mapping[str, int] | None = None

    def __iter__(self) -> Any:
        # A generator: the epoch is known when its first batch is read, not before.
        resumed, self._resumed = self._resumed, None
        is_same = resumed is not None and resumed["epoch"] == getattr(self.sampler, "epoch", None)
        first = resumed["num_batches"] if resumed is not None and is_same else 0
        self._num_batches = first
        for batch in itertools.islice(super().__iter__(), first, None):
            self._num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the order of this epoch, and how many batches have been read."""
        sampler: Any = self.sampler
        if not hasattr(sampler, "epoch"):
            return {}
        return {"seed": sampler.seed, "epoch": sampler.epoch, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a place, if the next epoch is that of the place; with its order in any case."""
        sampler: Any = self.sampler
        if state and hasattr(sampler, "epoch"):
            sampler.seed = state["seed"]
            self._resumed = state
