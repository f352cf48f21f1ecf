"""Published weights in a form with which a CPU forms products without widening them: repacked once at load.

Servers that compute in 16 bits do that. Codes stay as they are; products round activations to 16 bits or take them in
bfloat16, and scales of groups become bfloat16, so that a weight errs by no more than if it were widened to that. What
would lose more stays as it is published: FP8 and FP4, whose levels are not evenly apart; GGUF's types with minima or
more than one scale (``K``, ``_1``); zero points and act-order. In float32, and of GGUF's ``MXFP4``, only the order of
bytes changes: they are widened in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.weights.formats.fp4 import Mxfp4Format
from swarm_plugins.weights.formats.ggml import GgmlFormat, mxfp4_parts, q4_0_parts, q8_0_parts
from swarm_plugins.weights.formats.groups import SizedGroups
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.int_groups import PackQuantizedFormat
from swarm_plugins.weights.formats.nibbles import NibblesFormat
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.formats.stacked import StackedFormat
from swarm_plugins.weights.stored import PublishedFormat, StoredFormat

_GROUP_SIZES = (32, 64, 128, 256)
"""Columns that share a scale in torch's product with 4 bits."""
_BLOCK = 32
"""Columns that share a scale in GGUF's ``Q8_0`` and ``Q4_0``."""

Parts = Mapping[str, Tensor]


class Repacking(NamedTuple):
    """Another form of a weight."""

    format: StoredFormat
    remake: Callable[[Parts], dict[str, Tensor]]
    """Returns its parts, given the published ones."""


def repacking_of(stored: PublishedFormat, dtype: torch.dtype) -> Repacking | None:
    """Returns the form in which a weight is multiplied with on a CPU; None if it stays as it is.

    Args:
        stored: The published format.
        dtype: The type that blocks compute in.
    """
    if isinstance(stored, ScaledFormat):
        return _of_scaled(stored, dtype)
    if isinstance(stored, PackQuantizedFormat):
        return _of_words(stored, dtype)
    if isinstance(stored, GgmlFormat):
        return _of_ggml(stored, dtype)
    if isinstance(stored, StackedFormat):
        return _of_stack(stored, dtype)
    return None


def _of_stack(stored: StackedFormat, dtype: torch.dtype) -> Repacking | None:
    """Returns the format of equally packed weights joined along their rows."""
    first = stored.pieces[0]
    if any(piece != first for piece in stored.pieces):
        return None
    whole: PublishedFormat | None = None
    if isinstance(first, GgmlFormat | PackQuantizedFormat):
        whole = replace(first, shape=stored.shape)
    elif isinstance(first, ScaledFormat) and first.grid == (first.shape[0], 1):
        whole = replace(first, shape=stored.shape, scales_shape=(stored.shape[0],))
    found = None if whole is None else repacking_of(whole, dtype)
    if whole is None or found is None:
        return None
    names = [part.name for part in whole.parts]

    def remake(parts: Parts) -> dict[str, Tensor]:
        return found.remake(
            {name: stored.rows([parts[f"{name}_{index}"] for index in range(len(stored.pieces))]) for name in names}
        )

    return Repacking(found.format, remake)


def _of_scaled(stored: ScaledFormat, dtype: torch.dtype) -> Repacking | None:
    rows = stored.shape[0]
    if dtype == torch.float32 or stored.codes_dtype != torch.int8 or stored.grid not in ((rows, 1), (1, 1)):
        return None

    def remake(parts: Parts) -> dict[str, Tensor]:
        scales = parts["scales"].float().flatten() * stored.unit
        return {"codes": parts["codes"], "scales": scales.expand(rows).contiguous()}

    return Repacking(Int8Format(stored.shape), remake)


def _of_words(stored: PackQuantizedFormat, dtype: torch.dtype) -> Repacking | None:
    if dtype == torch.float32 or stored.is_ordered or stored.has_zeros:
        return None
    if stored.bits == 8 and stored.num_groups == 1:

        def as_rows(parts: Parts) -> dict[str, Tensor]:
            codes, zero, scales = stored.unpacked(parts)
            return {"codes": (codes - zero).to(torch.int8), "scales": scales.float().flatten()}

        return Repacking(Int8Format(stored.shape), as_rows)
    if stored.bits != 4 or dtype != torch.bfloat16 or stored.group_size not in _GROUP_SIZES:
        return None
    form = SizedGroups(stored.shape, 4, stored.group_size)

    def as_groups(parts: Parts) -> dict[str, Tensor]:
        codes, _, scales = stored.unpacked(parts)
        return form.arranged(codes, scales, torch.zeros_like(scales))

    return Repacking(form, as_groups)


def _of_ggml(stored: GgmlFormat, dtype: torch.dtype) -> Repacking | None:
    rows, columns = stored.shape
    if stored.kind == "Q8_0" and dtype == torch.bfloat16:
        halves = NibblesFormat(stored.shape, _BLOCK)
        return Repacking(halves, lambda parts: halves.arranged(*q8_0_parts(parts["codes"])))
    if stored.kind == "Q8_0":
        # Codes and scales apart: the same bytes, widened in a tenth of the time.
        apart = ScaledFormat(stored.shape, (1, _BLOCK), torch.int8, torch.float16, (rows, columns // _BLOCK))
        return Repacking(apart, lambda parts: dict(zip(("codes", "scales"), q8_0_parts(parts["codes"]), strict=True)))
    if stored.kind == "MXFP4":
        # Neighbors in a byte, which are widened in half the time; the same bytes.
        return Repacking(
            Mxfp4Format(stored.shape),
            lambda parts: dict(zip(("codes", "scales"), mxfp4_parts(parts["codes"]), strict=True)),
        )
    if stored.kind == "Q4_0" and dtype == torch.bfloat16:
        form = SizedGroups(stored.shape, 4, _BLOCK)

        def as_groups(parts: Parts) -> dict[str, Tensor]:
            codes, scales = q4_0_parts(parts["codes"])
            return form.arranged(codes, scales, torch.zeros_like(scales))

        return Repacking(form, as_groups)
    return None
