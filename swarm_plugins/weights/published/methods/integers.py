"""GPTQ and AWQ: integers in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.formats.int_groups import AwqFormat, GptqFormat
from swarm_plugins.weights.published.methods.method import MAX_CHARS, Infos, Method, Suffixes, needed, typed
from swarm_plugins.weights.stored import PublishedFormat


class _Gptq(msgspec.Struct, frozen=True):
    bits: int
    group_size: int
    checkpoint_format: str = "gptq"
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
        if self._config.checkpoint_format not in self._OFFSETS or self._config.dynamic:
            raise UnsupportedError(
                f"checkpoint_format {self._config.checkpoint_format[:MAX_CHARS]!r} with dynamic "
                f"{str(self._config.dynamic)[:MAX_CHARS]} is not known: known are {', '.join(self._OFFSETS)} "
                "without it"
            )

    @property
    def name(self) -> str:
        return f"gptq-int{self._config.bits}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        size, offset = self._config.group_size, self._OFFSETS[self._config.checkpoint_format]
        scales = needed(infos, "scales")
        return GptqFormat(
            shape,
            self._config.bits,
            shape[1] if size == -1 else size,
            scales.dtype,
            is_ordered="order" in infos,
            zero_offset=offset,
        )


class _Awq(msgspec.Struct, frozen=True):
    bits: int
    group_size: int
    version: str = "gemm"
    zero_point: bool = True


class AwqMethod(Method):
    """``awq``: as AutoAWQ writes it for its product ``gemm``."""

    suffixes: ClassVar[Suffixes] = {"qweight": "codes", "qzeros": "zeros", "scales": "scales"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = typed(config, _Awq)
        if self._config.version.lower() != "gemm" or not self._config.zero_point:
            raise UnsupportedError(
                f"version {self._config.version[:MAX_CHARS]!r} with zero_point {self._config.zero_point} is not "
                "known: known is 'gemm' with zero points"
            )

    @property
    def name(self) -> str:
        return f"awq-int{self._config.bits}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        size = self._config.group_size
        return AwqFormat(shape, self._config.bits, shape[1] if size == -1 else size, needed(infos, "scales").dtype)
