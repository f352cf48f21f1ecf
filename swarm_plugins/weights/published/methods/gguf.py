"""The types of ggml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from swarm_plugins.weights.formats.ggml import GGML_TYPES, GgmlFormat
from swarm_plugins.weights.published.methods.method import Infos, Method, Suffixes, needed
from swarm_plugins.weights.stored import PublishedFormat


class GgufMethod(Method):
    """``gguf``: blocks that hold their scales, of a type that the header gives each tensor."""

    suffixes: ClassVar[Suffixes] = {"weight": "codes"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # the header says everything

    @property
    def name(self) -> str:
        return "gguf"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        kind = needed(infos, "codes").packing
        if kind is None or kind not in GGML_TYPES:
            raise ValueError(f"its packing is {kind}, known are {', '.join(GGML_TYPES)}")
        if shape[1] % GGML_TYPES[kind].block:
            raise ValueError(f"a weight of {list(shape)} has no whole blocks of {GGML_TYPES[kind].block} ({kind})")
        return GgmlFormat(shape, kind)
