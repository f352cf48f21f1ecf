"""Packs tensors as bytes: unchanged, in 16 bits, or in 8 bits of a rotated block.

Pure torch: a decoder accepts only a payload of exactly the size that dtype, shape and codec imply. (The compiled
blockwise decoders of other packages trust lengths inside the payload.)

``rotated8`` splits a flat tensor into blocks of 128 numbers. One that is at least twice as large as any other of its
block travels by itself, in bfloat16, and leaves a zero. What remains, ``x``, is multiplied with the Hadamard matrix
``H`` (Sylvester's, entries 1 and -1), which spreads large numbers over the whole block, and each number of
``r = H x / 128`` becomes a whole number ``q`` from -127 to 127 of steps ``s = max |r| / 127``. Steps are rounded to
bfloat16: with the range of float32, they overflow for no block. Unpacked, the block is ``s H q``, with the outlier put
back. 133 bytes hold 128 numbers; those after the last whole block travel as they are. Rotations that tame outliers
before a quantization: QuIP# (arXiv 2402.04396) for weights, QuaRot (arXiv 2404.00456) for activations. Random signs
before the rotation, as there, changed nothing that was measured, so there are none.

Both ends, a server that hands its output on, and whoever checks an answer must see the same numbers. So unpacking is
exact up to one product with the scale (``H q`` are whole numbers below 2**24), packing is made of sums in a fixed
order, and packing what was unpacked gives the same bytes again.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from swarm_plugins.transport.messages import Codec

BLOCK_ELEMENTS = 128
"""Numbers of ``rotated8`` that are rotated together and share a scale."""

MIN_PACKED_ELEMENTS = 1024
"""Smaller tensors travel unpacked: packing would cost more than it saves."""

_BLOCK_BYTES = BLOCK_ELEMENTS + 5
_BLOCKS_AT_ONCE = 2048
"""1 MiB of float32: what packing and unpacking need beyond their result is a few MiB, in the processor's cache."""
_LARGEST = 127
_MAX = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max, torch.float32: 3.4028234663852886e38}
_ORDINARY = (2.0**-100, 2.0**100)
"""Scales with which float32 unpacks to numbers that certainly pack to the same bytes."""
_LEAST_SCALE = 2.0**-120
"""Blocks with smaller scales become zeros."""
_MOST_TRIES = 12
_CLEAR = 2.0
"""An outlier is so many times as large as any other number of its block."""
_CLOSE = (1.8, 2.5)
"""One less than so many times as large does not become one by what packing loses; one above the second remains one."""
_MOST_MOVED = 0.2
"""Share of a step by which the rotated numbers may move so that they and the step stay what they are; see `_moved`."""
_CLEARER = 1 + 2.0**-6
_NUDGE = 1 - 2.0**-8
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_PACKABLE = frozenset({torch.float32, torch.bfloat16, torch.float16})


def is_packable(codec: Codec, dtype: torch.dtype, num_elements: int) -> bool:
    """Returns whether a codec other than ``none`` applies to a tensor."""
    if num_elements < MIN_PACKED_ELEMENTS:
        return False
    return dtype == torch.float32 if codec == "bfloat16" else dtype in _PACKABLE


def packed_bytes(codec: Codec, dtype: torch.dtype, num_elements: int) -> int:
    """Returns the exact size of a packed tensor."""
    if codec == "none":
        return num_elements * dtype.itemsize
    if codec in _HALVES:
        return num_elements * 2
    num_blocks, rest = divmod(num_elements, BLOCK_ELEMENTS)
    return rest * dtype.itemsize + _BLOCK_BYTES * num_blocks


def pack(tensor: Tensor, codec: Codec) -> Tensor | None:
    """Packs a contiguous CPU tensor; the result is contiguous and may be the tensor itself.

    ``float16`` saturates: a finite number beyond 65504 becomes 65504 instead of infinity, so that one large
    activation does not look like a broken computation; infinities and NaN are kept. In ``rotated8`` they make their
    block NaN.

    Returns:
        The packed tensor; None for one of 16 bits that ``rotated8`` does not give back the same each time.
    """
    if codec == "rotated8":
        return _to_rotated8(tensor)
    if codec == "none" or tensor.dtype == _HALVES[codec]:
        return tensor
    return _saturated(tensor, _HALVES[codec])


def unpack(payload: Tensor, codec: Codec, dtype: torch.dtype, num_elements: int) -> Tensor:
    """Restores a flat tensor from a payload, flat ``uint8``, of any codec but ``none``.

    Raises:
        ValueError: If the payload does not have exactly ``packed_bytes(codec, dtype, num_elements)`` elements.
    """
    expected = packed_bytes(codec, dtype, num_elements)
    if payload.numel() != expected:
        raise ValueError(f"{payload.numel()} bytes for {num_elements} elements packed by {codec}, expected {expected}")
    if codec == "rotated8":
        values = torch.empty(num_elements, dtype=dtype)
        unpack_rotated8(payload, values)
        return values
    half = payload.view(_HALVES[codec])
    # The result must own its memory.
    return half.clone() if dtype == half.dtype else half.to(dtype)


def has_non_finite(tensor: Tensor) -> bool:
    """Returns whether a floating tensor holds NaN or infinity; False for other tensors."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    # One pass and no temporary: a finite sum proves that all terms are finite. Finite terms can overflow the sum, so
    # otherwise the exact, slower test decides.
    if math.isfinite(tensor.detach().sum(dtype=torch.float32).item()):
        return False
    return not bool(torch.isfinite(tensor.detach()).all())


def _saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()  # bfloat16 would round the bound itself up
    clamped = tensor.clamp(-_MAX[dtype], _MAX[dtype])
    if has_non_finite(tensor):
        clamped = torch.where(tensor.isinf(), tensor, clamped)
    return clamped.to(dtype)


def _hadamard() -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32)  # torch's default type may differ: any thread can set it
    while len(matrix) < BLOCK_ELEMENTS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix  # [128, 128]


_HADAMARD = _hadamard()


class _Blocks(NamedTuple):
    """Coded blocks; views of a payload, or on their way into one."""

    steps: Tensor
    """``[blocks]``, bfloat16; NaN for a block with numbers that are not finite."""
    outliers: Tensor
    """``[blocks]``, bfloat16; 0: none."""
    codes: Tensor
    """``[blocks, 128]``, int8."""
    places: Tensor
    """``[blocks]``, uint8: of the outliers."""

    def at(self, index: Tensor | slice) -> _Blocks:
        """Returns some of the blocks."""
        return _Blocks(*(part[index] for part in self))

    def put(self, index: Tensor | slice, other: _Blocks) -> None:
        """Replaces some of the blocks."""
        for mine, part in zip(self, other, strict=True):
            mine[index] = part


def _to_rotated8(tensor: Tensor) -> Tensor | None:
    flat = tensor.reshape(-1)
    packed = torch.empty(packed_bytes("rotated8", flat.dtype, flat.numel()), dtype=torch.uint8)
    rest, coded = _parts(packed, flat.dtype, flat.numel())
    numbers = flat[: coded.codes.numel()].view(-1, BLOCK_ELEMENTS)
    rest.copy_(flat[numbers.numel() :])
    for first in range(0, len(numbers), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        found = _lasting(numbers[part])
        if found is None:
            return None
        coded.put(part, found)
    return packed


def unpack_rotated8(payload: Tensor, values: Tensor) -> None:
    """Restores a flat tensor in place from a payload, flat ``uint8``, of exactly its packed size."""
    rest, coded = _parts(payload, values.dtype, values.numel())
    numbers = values[: coded.codes.numel()].view(-1, BLOCK_ELEMENTS)
    values[numbers.numel() :] = rest
    for first in range(0, len(numbers), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        numbers[part] = _restored(coded.at(part), values.dtype)


def _parts(payload: Tensor, dtype: torch.dtype, num_elements: int) -> tuple[Tensor, _Blocks]:
    """Returns views of a payload: the numbers after the last block, and the blocks."""
    n, rest = divmod(num_elements, BLOCK_ELEMENTS)
    raw, steps, outliers, codes, places = payload.split([rest * dtype.itemsize, 2 * n, 2 * n, BLOCK_ELEMENTS * n, n])
    whole = codes.view(torch.int8).view(n, BLOCK_ELEMENTS)
    return raw.view(dtype), _Blocks(steps.view(torch.bfloat16), outliers.view(torch.bfloat16), whole, places)


def _lasting(numbers: Tensor) -> _Blocks | None:
    """Codes blocks, ``[blocks, 128]``, so that they survive unpacking and packing again; None if that fails.

    Rounding to 16 bits can move a number across the border between two steps, and what is lost can make an outlier of a
    number, or none. What packing then makes of the moved numbers is taken instead, until nothing moves any more.
    """
    coded, is_close = _coded(numbers)
    may_move = torch.ones_like(is_close)
    if numbers.dtype == torch.float32:
        least, most = _ORDINARY
        is_ordinary = (coded.steps == 0) | ((coded.steps > least) & (coded.steps < most))
        may_move = is_close | ~is_ordinary | (_moved(coded) > _MOST_MOVED)
    moving = may_move.nonzero()[:, 0]
    for attempt in range(_MOST_TRIES):
        if len(moving) == 0:
            return coded
        before = coded.at(moving)
        restored = _restored(before, numbers.dtype)
        is_nudged = attempt % 3 == 2
        if is_nudged:
            restored *= _NUDGE  # some blocks go to and fro between two steps
        again, _ = _coded(restored)
        wavers = ((again.outliers != 0) != (before.outliers != 0)).nonzero()[:, 0]
        if len(wavers):
            # A little larger, so that it stays an outlier. Its place is 0 where it was none.
            place = torch.maximum(again.places, before.places)[wavers].long()
            larger = restored[wavers, place].float() * _CLEARER
            restored[wavers, place] = larger.clamp(-_MAX[numbers.dtype], _MAX[numbers.dtype]).to(numbers.dtype)
            again.put(wavers, _coded(restored[wavers])[0])
        is_same = (before.codes == again.codes).all(dim=1) & (before.places == again.places)
        for one, other in ((before.steps, again.steps), (before.outliers, again.outliers)):
            is_same &= one.view(torch.int16) == other.view(torch.int16)  # NaN too
        is_same[wavers] = False
        coded.put(moving, again)
        if not is_nudged:
            moving = moving[~is_same]
    return None


def _moved(coded: _Blocks) -> Tensor:
    """Returns by how much of a step packing again moves all rotated numbers of each block, ``[blocks]``.

    An outlier replaces what the whole numbers add up to in its place, and the zero there is rotated again.
    """
    moved = torch.zeros(coded.steps.shape, dtype=torch.float32)
    has_outlier = (coded.outliers != 0).nonzero()[:, 0]
    if len(has_outlier):
        lost = coded.codes[has_outlier].float().mul_(_HADAMARD[coded.places[has_outlier].long()]).sum(dim=1)
        moved[has_outlier] = lost.abs() / BLOCK_ELEMENTS
    return moved


def _coded(numbers: Tensor) -> tuple[_Blocks, Tensor]:
    """Codes blocks, ``[blocks, 128]``; also returns in which of them a rounding could make an outlier, or none."""
    # Blocks side by side, so that all sums are of long rows.
    rows = torch.empty(BLOCK_ELEMENTS, len(numbers), dtype=torch.float32).copy_(numbers.t())
    outliers, places, is_close = _cut_outliers(rows)
    # Divided first, so that the largest floats cannot overflow.
    rotated = _times_hadamard(rows.mul_(1 / BLOCK_ELEMENTS))  # [128, blocks]
    steps = (rotated.abs().amax(dim=0) / _LARGEST).to(torch.bfloat16)  # [blocks]; NaN for NaN and infinity
    steps = torch.where(steps < _LEAST_SCALE, 0.0, steps)
    steps = torch.where(steps.isfinite(), steps, torch.nan)
    inverse = torch.where(steps > 0, steps.float().reciprocal(), 0.0)
    codes = rotated.mul_(inverse).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0).to(torch.int8)
    return _Blocks(steps, outliers, codes.t(), places), is_close


def _cut_outliers(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces the outliers in ``[128, blocks]`` by zeros; returns them, their places, and which blocks were close."""
    sizes = rows.abs()
    largest, at = sizes.max(dim=0)  # [blocks]
    others = sizes.scatter_(0, at[None], 0.0).amax(dim=0)
    values = rows.gather(0, at[None])[0]
    outliers = _saturated(values, torch.bfloat16)
    is_outlier = (largest >= _CLEAR * others) & (outliers != 0)
    outliers = torch.where(is_outlier, outliers, 0.0)  # never -0
    rows.scatter_(0, at[None], torch.where(is_outlier, 0.0, values)[None])
    is_close = (largest >= _CLOSE[0] * others) & (largest < _CLOSE[1] * others)
    return outliers, torch.where(is_outlier, at, 0).to(torch.uint8), is_close


def _times_hadamard(rows: Tensor) -> Tensor:
    """Multiplies the Hadamard matrix with ``[128, blocks]``, overwriting it, by seven rounds of sums and differences.

    A product of matrices would add in another order on another machine, or for another number of blocks.
    """
    other, half = torch.empty_like(rows), BLOCK_ELEMENTS // 2
    while half:
        before, after = (one.view(-1, 2, half, one.shape[1]) for one in (rows, other))
        torch.add(before[:, 0], before[:, 1], out=after[:, 0])
        torch.sub(before[:, 0], before[:, 1], out=after[:, 1])
        rows, other, half = other, rows, half // 2
    return rows


def _restored(coded: _Blocks, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of blocks, ``[blocks, 128]``."""
    codes = coded.codes.float()
    # Whole numbers of at most 128 * 128: exact in any order. Given its output, autocast leaves the product alone.
    values = torch.mm(codes, _HADAMARD, out=torch.empty_like(codes)).mul_(coded.steps.float()[:, None])
    outliers, most = coded.outliers.float(), _MAX[dtype]
    if dtype == torch.float16 or bool((coded.steps > _ORDINARY[1]).any()):
        # A step beyond the largest number, not an infinity. NaN stays.
        values.clamp_(-most, most)
    has_outlier = (outliers != 0).nonzero()[:, 0]
    if len(has_outlier):
        kept = outliers[has_outlier]
        place = coded.places[has_outlier].long() % BLOCK_ELEMENTS
        values[has_outlier, place] = torch.where(kept.isinf(), kept, kept.clamp(-most, most))
    return values.to(dtype)


def tensor_hash(tensor: Tensor) -> bytes:
    """Returns the SHA-256 of a tensor's type, shape and bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype}{list(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.digest()
