"""GPTQ and AWQ: integers in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.formats.int_groups import BITS, AwqFormat, GptqFormat
from swarm_plugins.weights.published.methods.method import MAX_CHARS, Infos, Method, Suffixes, needed, typed
from swarm_plugins.weights.stored import PublishedFormat


class _Gptq(msgspec.Struct, frozen=True):
    bits: int
    group_size: int
    format: str = "gptq"
    checkpoint_format: str | None = None
    """Older name of ``format``; takes precedence, as in transformers."""
    dynamic: dict[str, Any] | None = None


class GptqMethod(Method):
    """``gptq``: as AutoGPTQ and GPTQModel write it."""

    suffixes: ClassVar[Suffixes] = {
        "qweight": "codes",
        "qzeros": "zeros",
        "scales": "scales",
        "g_idx": "order",
    }
    _OFFSETS: ClassVar[Mapping[str, int]] = {"gptq": 1, "gptq_v2": 0}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = typed(config, _Gptq)
        layout = (self._config.checkpoint_format or self._config.format).lower()
        if layout not in self._OFFSETS or self._config.bits not in BITS or self._config.dynamic:
            raise UnsupportedError(
                f"format {layout[:MAX_CHARS]!r} of {self._config.bits} bits with dynamic "
                f"{str(self._config.dynamic)[:MAX_CHARS]} is not known: known are {', '.join(self._OFFSETS)} "
                f"of {', '.join(map(str, BITS))} bits without it"
            )
        self._offset = self._OFFSETS[layout]

    @property
    def name(self) -> str:
        return f"gptq-int{self._config.bits}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        size = self._config.group_size
        scales = needed(infos, "scales")
        return GptqFormat(
            shape,
            self._config.bits,
            shape[1] if size == -1 else size,
            scales.dtype,
            is_ordered="order" in infos,
            zero_offset=self._offset,
        )


class _Awq(msgspec.Struct, frozen=True):
    bits: int
    group_size: int
    format: str = "gemm"
    version: str | None = None
    """Older name of ``format``; takes precedence, as in transformers."""
    zero_point: bool = True


class AwqMethod(Method):
    """``awq``: as AutoAWQ writes it for its product ``gemm``."""

    suffixes: ClassVar[Suffixes] = {"qweight": "codes", "qzeros": "zeros", "scales": "scales"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = typed(config, _Awq)
        layout = (self._config.version or self._config.format).lower()
        if layout != "gemm" or self._config.bits != 4 or not self._config.zero_point:
            raise UnsupportedError(
                f"version {layout[:MAX_CHARS]!r} of {self._config.bits} bits with zero_point "
                f"{self._config.zero_point} is not known: known is 'gemm' of 4 bits with zero points"
            )

    @property
    def name(self) -> str:
        return f"awq-int{self._config.bits}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        size = self._config.group_size
        return AwqFormat(shape, self._config.bits, shape[1] if size == -1 else size, needed(infos, "scales").dtype)
