"""A way to publish weights in few bits, and what several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import torch

from swarm_plugins.checkpoint import TensorInfo
from swarm_plugins.errors import UnsupportedError, one_line
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.stored import PublishedFormat

UNUSED = "unused"
"""The part of tensors that only packages need which round activations as well."""
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
MAX_CHARS = 200
"""Of a config's text in messages."""

T = TypeVar("T")
Infos = Mapping[str, TensorInfo]
"""The tensors of one weight, by part."""
Suffixes = Mapping[str, str]
"""Parts of a weight, by what a tensor's name has in the place of ``weight``."""


class Method(ABC):
    """Tells the format of a weight; made of a ``quantization_config``."""

    suffixes: ClassVar[Suffixes]

    @property
    @abstractmethod
    def name(self) -> str:
        """What servers announce; empty if nothing is packed."""

    @abstractmethod
    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        """Returns the format of a weight ``[out, in]``; ``name`` is its module's in the checkpoint.

        Raises:
            ValueError: If the tensors do not make one.
        """


def typed(config: Mapping[str, Any], type: type[T]) -> T:
    """Returns a config as a struct; raises UnsupportedError if a value has another type."""
    try:
        return msgspec.convert(dict(config), type)
    except msgspec.MsgspecError as exc:
        raise UnsupportedError(one_line(exc)) from exc


def needed(infos: Infos, part: str) -> TensorInfo:
    """Returns a part of a weight; raises ValueError if it has none."""
    if part not in infos:
        raise ValueError(f"it has no {part}")
    return infos[part]


def scaled(
    shape: tuple[int, int], codes: torch.dtype, scales: TensorInfo, block: tuple[int, int] | None
) -> ScaledFormat:
    """Returns the format of codes with a scale per block, row or weight; ``block`` None: per row.

    Raises:
        ValueError: If scales have another type.
    """
    if scales.dtype not in _SCALE_TYPES:
        raise ValueError(f"its scales are of {scales.dtype}, known are {', '.join(map(str, _SCALE_TYPES))}")
    is_one = len(scales.shape) == 0 or set(scales.shape) == {1}
    if is_one and shape[0] > 1:
        block = shape
    return ScaledFormat(shape, block or (1, shape[1]), codes, scales.dtype, scales.shape)
