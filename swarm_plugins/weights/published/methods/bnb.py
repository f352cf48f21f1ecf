"""The formats of bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import torch

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.formats.bnb4 import Bnb4Format
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.published.methods.method import MAX_CHARS, UNUSED, Infos, Method, Suffixes, needed, typed
from swarm_plugins.weights.stored import PublishedFormat


class _Bnb(msgspec.Struct, frozen=True):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"


class BitsAndBytesMethod(Method):
    """``bitsandbytes``: nf4 and fp4, maxima plain or quantized again, and int8 with a maximum per row."""

    suffixes: ClassVar[Suffixes] = {
        "weight": "codes",
        "weight.absmax": "maxima",
        "weight.quant_map": "table",
        "weight.nested_absmax": "nested_maxima",
        "weight.nested_quant_map": "nested_table",
        "weight.quant_state.bitsandbytes__nf4": "state",
        "weight.quant_state.bitsandbytes__fp4": "state",
        "SCB": "scales",
        "weight_format": UNUSED,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = typed(config, _Bnb)
        kind = self._config.bnb_4bit_quant_type
        if self._config.load_in_4bit == self._config.load_in_8bit or kind not in ("nf4", "fp4"):
            raise UnsupportedError(
                f"load_in_4bit {self._config.load_in_4bit}, load_in_8bit {self._config.load_in_8bit} and quant type "
                f"{kind[:MAX_CHARS]!r} are not known: known are 8 bits, or 4 of the type nf4 or fp4"
            )

    @property
    def name(self) -> str:
        return "bnb-int8" if self._config.load_in_8bit else f"bnb-{self._config.bnb_4bit_quant_type}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        if self._config.load_in_8bit:
            return ScaledFormat(shape, (1, shape[1]), torch.int8, torch.float32, shape[:1], unit=1 / 127)
        state = needed(infos, "state")
        if state.dtype != torch.uint8:
            raise ValueError(f"its quant_state is of {state.dtype}, expected bytes")
        storage = needed(infos, "codes").dtype
        return Bnb4Format(shape, self._config.bnb_4bit_quant_type, is_nested="nested_maxima" in infos, storage=storage)
