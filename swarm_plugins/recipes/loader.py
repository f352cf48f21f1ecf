"""Batches whose order a resumed run continues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sized
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
    """A loader whose position is part of Lightning's checkpoints: a resumed epoch continues with the next batch.

    This takes a sampler with a seed and an epoch. With any other, a resumed epoch starts over.

    Args:
        num_processed: Returns how many batches of this epoch have been trained: one that was only read is read again by
            a resumed run. None: a batch is trained once it is read.
        arguments: As for ``DataLoader``.
        options: As for ``DataLoader``.
    """

    _num_read = 0
    """Batches of `_epoch`."""
    _epoch: int | None = None
    _resumed: Mapping[str, int] | None = None

    def __init__(self, *arguments: Any, num_processed: Callable[[], int] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_processed = num_processed

    def __iter__(self) -> Any:
        # A generator: the epoch is known when its first batch is read, not before.
        resumed, self._resumed = self._resumed or {}, None
        self._epoch = getattr(self.sampler, "epoch", None)
        self._num_read = resumed["num_batches"] if resumed.get("epoch", -1) == self._epoch else 0
        for batch in itertools.islice(super().__iter__(), self._num_read, None):
            self._num_read += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the seed, the epoch and how many of its batches have been trained."""
        sampler: Any = self.sampler
        if not hasattr(sampler, "epoch"):
            return {}
        if self._resumed is not None:
            return dict(self._resumed)
        # Lightning sets the epoch before it reads the first batch.
        num_batches = self._num_read if self._epoch == sampler.epoch else 0
        if self.num_processed is not None:
            num_batches = min(num_batches, self.num_processed())
        return {"seed": sampler.seed, "epoch": sampler.epoch, "num_batches": num_batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Shuffles by the seed of a state; if its epoch is the next one to be read, continues where it ended."""
        sampler: Any = self.sampler
        if state and hasattr(sampler, "epoch"):
            sampler.seed = state["seed"]
            self._resumed = state
