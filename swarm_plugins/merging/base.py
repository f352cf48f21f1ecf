"""A base as if none of its weights were packed: the tensors that a merged model consists of, in the base's order."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.weights.published.placing import place, plain_names
from swarm_plugins.weights.published.weights import PackedWeight, Published

log = logging.getLogger(__name__)


class Planned(NamedTuple):
    """A tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    """The file of the base that it comes from."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PlainBase:
    """The tensors of a checkpoint, packed ones widened as they are read.

    Args:
        checkpoint: The base.
        outline: Its model, without storage.
        dtype: Floating type of the tensors. None: what each has, or, if it is packed, what the config says.

    Raises:
        CheckpointError: If a packed weight lacks a tensor, or has one of another shape.
        UnsupportedError: If weights are packed in a way that is not known.
    """

    tensors: Mapping[str, Planned]

    def __init__(self, checkpoint: Checkpoint, outline: PreTrainedModel, dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self._published = Published.of(checkpoint)
        names = list(checkpoint.tensors)
        placing = None if self._published is None else place(self._published, outline, {name: name for name in names})
        weights = [] if placing is None else placing.weights()
        self._packed: dict[str, PackedWeight] = {weight.name: weight for weight in weights}
        left_out = (placing.taken if placing else set()) - {
            one for weight in weights for one in weight.tensors.values()
        }
        if left_out:
            log.warning(
                "%d packed tensors of %s, such as %s, belong to nothing that transformers loads, and are left out",
                len(left_out),
                checkpoint.name,
                min(left_out),
            )
        wide = dtype or outline.dtype
        planned: list[tuple[str, int, str, Planned]] = []
        for name in plain_names(placing, names):
            info = checkpoint.tensors[name]
            kind = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
            planned.append((info.file, info.start, name, Planned(info.shape, kind, info.file)))
        for weight in weights:
            info = checkpoint.tensors[weight.tensors["codes"]]
            planned.append((info.file, info.start, weight.name, Planned(weight.wide_shape, wide, info.file)))
        self.tensors = {name: one for _, _, name, one in sorted(planned)}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors.

        Raises:
            CheckpointError: If one cannot be read, or its scales make no weight.
        """
        wanted = list(names)
        plain = self._checkpoint.read((name for name in wanted if name not in self._packed), progress=False)
        return {name: self._one(name, plain) for name in wanted}

    def _one(self, name: str, plain: dict[str, Tensor]) -> Tensor:
        dtype = self.tensors[name].dtype
        if self._published is not None and name in self._packed:
            return self._published.widened(self._packed[name], dtype)
        return plain.pop(name).to(dtype)
