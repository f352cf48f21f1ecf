"""A base as if none of its weights were packed: the tensors that a merged model consists of, in the base's order."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.errors import CheckpointError
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
        dtype: Floating type of the tensors, except for those that transformers then loads in another, such as float32.
            None: what each has, or, if it is packed, what the config says.

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
        loaded = {} if dtype is None else _loaded_types(outline, names, dtype)
        planned: list[tuple[str, int, str, Planned]] = []
        for name in plain_names(placing, names):
            info = checkpoint.tensors[name]
            kind = loaded.get(name, info.dtype) if info.dtype.is_floating_point else info.dtype
            planned.append((info.file, info.start, name, Planned(info.shape, kind, info.file)))
        for weight in weights:
            info = checkpoint.tensors[weight.tensors["codes"]]
            planned.append((info.file, info.start, weight.name, Planned(weight.wide_shape, wide, info.file)))
        self.tensors = {name: one for _, _, name, one in sorted(planned)}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors.

        Raises:
            CheckpointError: If one cannot be read, has invalid scales, or exceeds the range of its type.
        """
        wanted = list(names)
        plain = self._checkpoint.read((name for name in wanted if name not in self._packed), progress=False)
        return {name: self._one(name, plain) for name in wanted}

    def _one(self, name: str, plain: dict[str, Tensor]) -> Tensor:
        dtype = self.tensors[name].dtype
        if self._published is not None and name in self._packed:
            return self._published.widened(self._packed[name], dtype)
        return converted(name, plain.pop(name), dtype)


def converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in another type.

    Raises:
        CheckpointError: If a finite number would become infinite.
    """
    found = tensor.to(dtype)
    if found is not tensor and not bool(tensor[found.isinf()].to(torch.float64).isinf().all()):
        raise CheckpointError(
            f"{name} holds numbers beyond the range of {dtype}: give another --dtype, such as bfloat16"
        )
    return found


def _loaded_types(outline: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the types in which transformers would load the tensors when asked for ``dtype``."""
    rules, state, plan = Conversions(outline), outline.state_dict(), outline._get_dtype_plan(dtype)
    in_float32 = build_glob_alternation(list(plan))[0] if plan else None
    found = {}
    for name in names:
        target, _ = rules.target(name)
        found[name] = state[target].dtype if target in state else dtype
        if in_float32 is not None and in_float32.search(target):
            found[name] = torch.float32
    return found
