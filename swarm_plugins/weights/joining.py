"""Layers with weights in few bits that take the same input, as one layer: a product instead of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from swarm_plugins.weights.formats.groups import TILE_ROWS, GroupedFormat, SizedGroups
from swarm_plugins.weights.kernels.int4pack import Int4PackKernel
from swarm_plugins.weights.linears import PackedLinear


def join(layers: Sequence[object]) -> PackedLinear | None:
    """Joins layers into one whose result concatenates theirs; None if they cannot be joined.

    Results of up to `MOST_ROWS` rows are the same, bit for bit; products of more widen the weight and may round
    otherwise. Weights do not exist twice: the others' become views of the joined one.
    """
    parts = [layer for layer in layers if isinstance(layer, PackedLinear)]
    formats = [found for part in parts if (found := _format(part)) is not None]
    if not formats or len(formats) < len(layers):
        return None
    rows = [one.shape[0] for one in formats]
    shape = (sum(rows), formats[0].shape[1])
    if len({replace(one, shape=shape) for one in formats}) > 1 or len({one.shape[1] for one in formats}) > 1:
        return None
    codes = torch.cat([part.parts["codes"] for part in parts])  # [tiles, ..]
    scales = torch.cat([part.parts["scales"] for part in parts], dim=1)  # [groups, out, 2]
    joined = PackedLinear(replace(formats[0], shape=shape), {"codes": codes, "scales": scales}, None, codes.device)
    tiles = [count // TILE_ROWS for count in rows]
    for part, its_codes, its_scales in zip(parts, codes.split(tiles), scales.split(rows, dim=1), strict=True):
        part.take({"codes": its_codes, "scales": its_scales})
    return joined


def _format(layer: PackedLinear) -> GroupedFormat | None:
    """Returns the format of a layer whose weight may be a part of another; None if it may not."""
    kernel = layer.kernel
    if layer.bias is not None:
        return None
    # Only whole tiles in the stored order can lie one behind the other.
    if not isinstance(kernel, Int4PackKernel) or kernel.is_converted:
        return None
    form = kernel.format
    return form if type(form) in (GroupedFormat, SizedGroups) and form.shape[0] % TILE_ROWS == 0 else None
