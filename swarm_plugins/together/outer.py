"""The outer optimization of DiLoCo (arXiv 2311.08105), with the same bits on every machine.

A round begins with the shared state: weights and momentum, in float32. Each peer trains for some steps; its update is
the change that it made, weights before minus weights after (the pseudo-gradient). The mean of all updates is the
gradient of one Nesterov step on the shared state.

Every peer computes that step itself, and all must get the same bits. So updates travel as 16-bit integers with a scale
for each tensor, norms are sums of integers, and everything else is done element by element in float64, in a fixed
order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_plugins.errors import NumericError, ProtocolError

Array = NDArray[np.float32]
Shape = tuple[int, ...]

_HEADER = struct.Struct("<8sQQdd")
_MAGIC = b"swarmrun"
_LARGEST = 32_767
_LARGEST_CHANGE = 100.0
"""No honest round moves a weight of an adapter so far."""
_LARGEST_SCALE = np.float32(_LARGEST_CHANGE / _LARGEST)
_MOST_GROWTH = 4.0
"""By how much the typical norm may differ from the one two rounds before."""
_MAX_WEIGHT_RATIO = 2.0
"""Largest weight of a peer, as a multiple of the median samples: one of three never has more than the other two."""
_MOST_SAMPLES = 1 << 60
"""Counted in a run."""


def blob_digest(blob: bytes) -> bytes:
    """Returns the content address of an update or a state."""
    return hashlib.blake2b(blob, digest_size=20).digest()


@dataclass(frozen=True)
class SharedState:
    """What all peers of a run have at the beginning of a round."""

    round: int
    samples: int
    """Samples in all rounds so far."""
    weights: tuple[Array, ...]
    momentum: tuple[Array, ...]
    typical: tuple[float, float] = (0.0, 0.0)
    """Median norm of the updates in the last even and in the last odd round; 0 before there was one."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the trained tensors."""
        return tuple(one.shape for one in self.weights)

    @cached_property
    def blob(self) -> bytes:
        """All of it, as it travels."""
        parts = (part.astype("<f4").tobytes() for part in (*self.weights, *self.momentum))
        return _HEADER.pack(_MAGIC, self.round, self.samples, *self.typical) + b"".join(parts)

    @cached_property
    def digest(self) -> bytes:
        """Content address."""
        return blob_digest(self.blob)


def first_state(weights: Sequence[Array]) -> SharedState:
    """Returns the state with which a run begins."""
    return SharedState(0, 0, tuple(weights), tuple(np.zeros_like(one) for one in weights))


def state_bytes(shapes: Sequence[Shape]) -> int:
    """Returns the size of a state."""
    return _HEADER.size + 8 * sum(map(math.prod, shapes))


def read_state(blob: bytes, shapes: Sequence[Shape]) -> SharedState:
    """Reads a state.

    Raises:
        ProtocolError: If it does not belong to tensors of these shapes, or is not finite.
    """
    if len(blob) != state_bytes(shapes) or not blob.startswith(_MAGIC):
        raise ProtocolError(f"a shared state of {len(blob)} bytes, expected {state_bytes(shapes)} for these tensors")
    _, round_, samples, even, odd = _HEADER.unpack_from(blob)
    values = np.frombuffer(blob, "<f4", offset=_HEADER.size)
    if not (np.isfinite(values).all() and 0 <= even < math.inf and 0 <= odd < math.inf):
        raise ProtocolError("a shared state with NaN or infinity")
    if samples > _MOST_SAMPLES:
        raise ProtocolError(f"a shared state of {samples} samples, at most {_MOST_SAMPLES} can be")
    parts = _split(values.astype(np.float32), (*shapes, *shapes))
    return SharedState(round_, samples, tuple(parts[: len(shapes)]), tuple(parts[len(shapes) :]), (even, odd))


class Update:
    """One peer's change in a round: for each tensor a scale and 16-bit integers."""

    def __init__(self, scales: Sequence[float], values: Sequence[NDArray[np.int16]]) -> None:
        self.scales = scales
        self.values = values

    @property
    def norm(self) -> float:
        """Euclidean norm; integers are added exactly, in whatever order a machine adds them."""
        squared = 0.0
        for scale, part in zip(self.scales, self.values, strict=True):
            # A loop: sum() of floats rounds differently in Python 3.11 and 3.12.
            squared += scale * scale * int(np.square(part.astype(np.int64)).sum())
        return math.sqrt(squared)

    def part(self, index: int) -> NDArray[np.float64]:
        """Returns the change of one tensor."""
        return self.values[index].astype(np.float64) * self.scales[index]


def update_bytes(shapes: Sequence[Shape]) -> int:
    """Returns the size of an update of tensors with these shapes."""
    return sum(4 + 2 * math.prod(shape) for shape in shapes)


def write_update(changes: Sequence[Array]) -> bytes:
    """Encodes an update: all scales, then all values.

    Raises:
        NumericError: If a change is NaN, or larger than peers accept.
    """
    scales, values = [], []
    for index, change in enumerate(changes):
        largest = float(np.abs(change).max(initial=0.0))
        if not largest <= _LARGEST_CHANGE:  # true for NaN
            raise NumericError(
                f"the largest change of trained tensor {index} in this round is {largest:g}, at most "
                f"{_LARGEST_CHANGE:g} can be: lower the learning rate or clip gradients, and resume from a checkpoint"
            )
        scale = np.float32(largest / _LARGEST)
        scales.append(scale)
        steps = np.rint(change.astype(np.float64) / np.float64(scale)) if scale > 0 else np.zeros_like(change)
        values.append(np.clip(steps, -_LARGEST, _LARGEST).astype("<i2").tobytes())
    return np.asarray(scales, "<f4").tobytes() + b"".join(values)


def read_update(blob: bytes, shapes: Sequence[Shape]) -> Update:
    """Decodes an update.

    Raises:
        ProtocolError: If it does not belong to tensors of these shapes, or is not finite.
    """
    if len(blob) != update_bytes(shapes):
        raise ProtocolError(f"an update of {len(blob)} bytes, expected {update_bytes(shapes)} for these tensors")
    scales = np.frombuffer(blob, "<f4", count=len(shapes))
    if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():  # false for NaN
        raise ProtocolError(f"an update with a scale of {_worst(scales)}; allowed are 0 to {_LARGEST_SCALE:g}")
    values = np.frombuffer(blob, "<i2", offset=scales.nbytes).astype(np.int16)
    return Update([float(scale) for scale in scales], _split(values, shapes))


def combine(
    updates: Sequence[tuple[Update, int]], *, max_norm_ratio: float, typical: float = 0.0
) -> tuple[list[NDArray[np.float64]], float]:
    """Returns the mean of updates, each with its samples, and their median norm.

    Samples are clipped to twice their median, and norms to ``max_norm_ratio`` times theirs, in which each update counts
    by its samples: a short update of a peer that leaves must not clip the long ones of others. Peers may claim
    any number of samples, so the median is capped at the norm that two thirds of all updates do not exceed. As long as
    no more than a third of the peers are hostile, some honest update has that norm or a larger one. The median is also
    kept near the ``typical`` norm of such a round, if there was one, so that no round of a few peers is far out.
    """
    if not updates:
        return [], typical
    most = _MAX_WEIGHT_RATIO * _lower_median([(samples, 1.0) for _, samples in updates if samples > 0])
    weights = [min(float(samples), most) for _, samples in updates]
    norms = [update.norm for update, _ in updates]
    median = _lower_median([pair for pair in zip(norms, weights, strict=True) if pair[0] > 0])
    median = min(median, sorted(norms)[(2 * len(norms) - 1) // 3])
    if typical > 0:
        median = min(max(median, typical / _MOST_GROWTH), typical * _MOST_GROWTH)
    bound = max_norm_ratio * median
    factors = [min(1.0, bound / norm) if norm > 0 else 0.0 for norm in norms]
    total = math.fsum(weights) or 1.0
    means = []
    for index, first in enumerate(updates[0][0].values):
        mean = np.zeros(first.shape, np.float64)
        for (update, _), factor, weight in zip(updates, factors, weights, strict=True):
            mean = mean + update.part(index) * (factor * weight / total)
        means.append(mean)
    return means, median


def outer_step(
    state: SharedState,
    mean: Sequence[NDArray[np.float64]],
    *,
    samples: int,
    lr: float,
    momentum: float,
    typical: float = 0.0,
) -> SharedState:
    """Returns the state after a Nesterov step, with the mean of the updates as gradient; empty: no step."""
    weights, velocity = list(state.weights), list(state.momentum)
    for index, change in enumerate(mean):
        moved = velocity[index].astype(np.float64) * momentum + change
        stepped = weights[index].astype(np.float64) - (change + moved * momentum) * lr
        weights[index], velocity[index] = stepped.astype(np.float32), moved.astype(np.float32)
    even, odd = state.typical
    return SharedState(
        state.round + 1,
        min(state.samples + samples, _MOST_SAMPLES),
        tuple(weights),
        tuple(velocity),
        (even, typical) if state.round % 2 else (typical, odd),
    )


def _lower_median(weighted: Sequence[tuple[float, float]]) -> float:
    """Returns the median of values with weights; of two in the middle the smaller one, which cannot raise its bound."""
    half, passed = math.fsum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        passed += weight
        if passed >= half:
            return value
    return 0.0


def _worst(scales: Array) -> float:
    return next(float(scale) for scale in scales if not 0 <= scale <= _LARGEST_SCALE)


def _split(values: NDArray[Any], shapes: Sequence[Shape]) -> list[NDArray[Any]]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes, strict=True)]
