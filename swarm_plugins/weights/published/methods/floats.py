"""Floats of 8 and 4 bits with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import torch

from swarm_plugins.weights.formats.fp4 import Mxfp4Format
from swarm_plugins.weights.published.methods.method import UNUSED, Infos, Method, Suffixes, needed, scaled, typed
from swarm_plugins.weights.stored import PublishedFormat


class _Fp8(msgspec.Struct, frozen=True):
    weight_block_size: tuple[int, int] | None = None
    scale_fmt: str | None = None


class Fp8Method(Method):
    """``fp8``: DeepSeek-V3, Qwen and others; a scale per block, or one per weight."""

    suffixes: ClassVar[Suffixes] = {
        "weight": "codes",
        "weight_scale_inv": "scales",
        "weight_scale": "scales",
        "_scale_inv": "scales",
        "scale": "scales",  # DeepSeek-V4
        "qscale_weight": "scales",  # Mistral
        "input_scale": UNUSED,
        "activation_scale": UNUSED,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = typed(config, _Fp8)

    @property
    def name(self) -> str:
        return "fp8"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        scales, block = needed(infos, "scales"), self._config.weight_block_size
        if scales.dtype != torch.uint8 or self._config.scale_fmt != "ue8m0":
            return scaled(shape, torch.float8_e4m3fn, scales, block)
        found = scaled(shape, torch.float8_e4m3fn, replace(scales, dtype=torch.float8_e8m0fnu), block)
        return replace(found, has_scales_as_bytes=True)


class Mxfp4Method(Method):
    """``mxfp4``: gpt-oss, whose experts are stacked."""

    suffixes: ClassVar[Suffixes] = {"_blocks": "codes", "_scales": "scales"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # nothing in it changes how bytes lie

    @property
    def name(self) -> str:
        return "mxfp4"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        return Mxfp4Format(shape)
