"""The types of ggml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from swarm_plugins.checkpoint import TensorInfo
from swarm_plugins.checkpoint.gguf.header import BLOCK_SIZES
from swarm_plugins.weights.formats.ggml import GGML_TYPES, GgmlFormat
from swarm_plugins.weights.formats.latent import LatentFormat
from swarm_plugins.weights.formats.stacked import InterleavedFormat
from swarm_plugins.weights.published.methods.method import Infos, Method, Suffixes, needed
from swarm_plugins.weights.stored import PublishedFormat


class GgufMethod(Method):
    """``gguf``: blocks that hold their scales, of a type that the header gives each tensor."""

    suffixes: ClassVar[Suffixes] = {
        "weight": "codes",
        **{f"_{part}": part for part in ("codes", "codes_0", "codes_1")},  # of stacked experts
        **{part: part for part in ("codes_0", "codes_1")},
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # the header says everything

    @property
    def name(self) -> str:
        return "gguf"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        if "codes_0" not in infos:
            return _blocks(shape, needed(infos, "codes"))
        first, second = needed(infos, "codes_0"), needed(infos, "codes_1")
        if first.name.endswith("_codes_0"):
            half = (shape[0] // 2, shape[1])
            return InterleavedFormat((_blocks(half, first), _blocks(half, second)))
        keys, values = (_blocks((math.prod(one.shape[:-1]), _columns(one)), one) for one in (first, second))
        return LatentFormat(shape, first.shape[0], keys, values)


def _blocks(shape: tuple[int, int], info: TensorInfo) -> GgmlFormat:
    kind = info.packing
    if kind is None or kind not in GGML_TYPES:
        raise ValueError(f"its packing is {kind}, known are {', '.join(GGML_TYPES)}")
    if shape[1] % GGML_TYPES[kind].block:
        raise ValueError(f"a weight of {list(shape)} has no whole blocks of {GGML_TYPES[kind].block} ({kind})")
    return GgmlFormat(shape, kind)


def _columns(info: TensorInfo) -> int:
    block, num_bytes = BLOCK_SIZES[str(info.packing)]
    return info.shape[-1] // num_bytes * block
