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

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"swarmrun"
_LARGEST = 32_767
_LARGEST_SCALE = 1e6 / _LARGEST
"""No honest round moves a weight by a million."""
_MAX_WEIGHT_RATIO = 4.0
"""No peer counts for more than so many times the median's samples."""
_TRIMMED = 0.2
"""Part of the updates left out at each end by the trimmed mean."""
_A, _B = ("lora_A.", "lora_embedding_A."), ("lora_B.", "lora_embedding_B.")


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

    @cached_property
    def blob(self) -> bytes:
        """All of it, as it travels."""
        parts = (part.astype("<f4").tobytes() for part in (*self.weights, *self.momentum))
        return _HEADER.pack(_MAGIC, self.round, self.samples) + b"".join(parts)

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
    _, round_, samples = _HEADER.unpack_from(blob)
    values = np.frombuffer(blob, "<f4", offset=_HEADER.size)
    if not np.isfinite(values).all():
        raise ProtocolError("a shared state with NaN or infinity")
    parts = _split(values.astype(np.float32), (*shapes, *shapes))
    return SharedState(round_, samples, tuple(parts[: len(shapes)]), tuple(parts[len(shapes) :]))


def active_tensors(names: Sequence[str], round_: int, *, alternate_lora: bool) -> list[int]:
    """Returns the indices of the tensors that are trained in a round: LoRA's B in even rounds, its A in odd ones.

    B first: it begins with zeros, and then A has no gradient. Tensors that are neither are trained in all rounds.
    """
    halves = [
        next((half for half, marks in enumerate((_B, _A)) if any(m in f"{n}." for m in marks)), None) for n in names
    ]
    if not alternate_lora or not {0, 1} <= set(halves):
        return list(range(len(names)))
    return [index for index, half in enumerate(halves) if half is None or half == round_ % 2]


class Update:
    """One peer's change in a round: for each tensor a scale and 16-bit integers."""

    def __init__(self, scales: Sequence[float], values: Sequence[NDArray[np.int16]]) -> None:
        self.scales = scales
        self.values = values

    @property
    def norm(self) -> float:
        """Euclidean norm; integers are added exactly, in whatever order a machine adds them."""
        sums = (int(np.square(part.astype(np.int64)).sum()) for part in self.values)
        return math.sqrt(sum(scale * scale * total for scale, total in zip(self.scales, sums, strict=True)))

    def part(self, index: int) -> NDArray[np.float64]:
        """Returns the change of one tensor."""
        return self.values[index].astype(np.float64) * self.scales[index]


def update_bytes(shapes: Sequence[Shape]) -> int:
    """Returns the size of an update of tensors with these shapes."""
    return sum(4 + 2 * math.prod(shape) for shape in shapes)


def write_update(changes: Sequence[Array]) -> bytes:
    """Encodes an update: all scales, then all values.

    Raises:
        NumericError: If a change is NaN or infinite.
    """
    scales, values = [], []
    for change in changes:
        largest = float(np.abs(change).max(initial=0.0))
        if not math.isfinite(largest):
            raise NumericError(
                "the update of this round has NaN or infinity: lower the learning rate or clip gradients"
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
        raise ProtocolError("an update with NaN, infinity, a negative scale or one beyond all reason")
    values = np.frombuffer(blob, "<i2", offset=scales.nbytes).astype(np.int16)
    return Update([float(scale) for scale in scales], _split(values, shapes))


def combine(
    updates: Sequence[tuple[Update, int]], *, aggregation: str, max_norm_ratio: float
) -> list[NDArray[np.float64]]:
    """Returns the mean of updates, each with its samples.

    Norms are clipped to ``max_norm_ratio`` times the round's (lower) median, and samples to four times theirs, so that
    one peer moves the mean by no more than others do.
    """
    if not updates:
        return []
    norms = [update.norm for update, _ in updates]
    bound = max_norm_ratio * _lower_median([norm for norm in norms if norm > 0])
    factors = [min(1.0, bound / norm) if norm > 0 else 0.0 for norm in norms]
    num_tensors = len(updates[0][0].values)
    if aggregation == "trimmed_mean":
        return [
            _trimmed([u.part(i) * f for (u, _), f in zip(updates, factors, strict=True)]) for i in range(num_tensors)
        ]
    most = _MAX_WEIGHT_RATIO * _lower_median([samples for _, samples in updates if samples > 0])
    weights = [min(float(samples), most) for _, samples in updates]
    total = sum(weights) or 1.0
    means = []
    for index in range(num_tensors):
        mean = np.zeros(updates[0][0].values[index].shape, np.float64)
        for (update, _), factor, weight in zip(updates, factors, weights, strict=True):
            mean = mean + update.part(index) * (factor * weight / total)
        means.append(mean)
    return means


def outer_step(
    state: SharedState,
    active: Sequence[int],
    means: Sequence[NDArray[np.float64]],
    *,
    samples: int,
    lr: float,
    momentum: float,
) -> SharedState:
    """Returns the state after a Nesterov step on the active tensors, with the mean of the updates as gradient."""
    weights, velocity = list(state.weights), list(state.momentum)
    for index, mean in zip(active, means, strict=True):
        moved = velocity[index].astype(np.float64) * momentum + mean
        stepped = weights[index].astype(np.float64) - (mean + moved * momentum) * lr
        weights[index], velocity[index] = stepped.astype(np.float32), moved.astype(np.float32)
    return SharedState(state.round + 1, state.samples + samples, tuple(weights), tuple(velocity))


def _trimmed(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    cut = max(1, int(_TRIMMED * len(parts))) if len(parts) >= 3 else 0
    kept = np.sort(np.stack(parts), axis=0)[cut : len(parts) - cut]
    total = np.zeros(kept.shape[1:], np.float64)
    for part in kept:
        total = total + part
    return total / len(kept)


def _lower_median(values: Sequence[float]) -> float:
    """Of two values the smaller one: a large one must not raise its own bound."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _split(values: NDArray[Any], shapes: Sequence[Shape]) -> list[NDArray[Any]]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes, strict=True)]
