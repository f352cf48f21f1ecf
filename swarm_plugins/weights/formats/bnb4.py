"""bitsandbytes' own checkpoints of 4 bits: codes and maxima of a weight laid out as one row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from swarm_plugins.errors import one_line
from swarm_plugins.weights.stored import Part, PublishedFormat, check_scales


class _State(msgspec.Struct, frozen=True):
    """The JSON that lies beside the tensors."""

    quant_type: str
    blocksize: int
    shape: tuple[int, ...]
    dtype: str = ""
    nested_blocksize: int = 0
    nested_dtype: str = ""
    nested_offset: float = 0.0


@dataclass(frozen=True)
class Bnb4Format(PublishedFormat):
    """A weight as places in a table of 16 numbers (nf4 or fp4), with a maximum per 64 weights.

    Blocks run on from row to row. Maxima may be codes themselves, with maxima of 256 of them and an offset for all
    (double quantization; Dettmers et al. 2023, section 3).
    """

    shape: tuple[int, int]
    kind: str
    """``nf4`` or ``fp4``."""
    is_nested: bool
    storage: torch.dtype = torch.uint8
    """Type under which the file stores the bytes of codes (``bnb_4bit_quant_storage``; FSDP shards only floats)."""
    block: int = 64
    nested_block: int = 256

    def __post_init__(self) -> None:
        if math.prod(self.shape) % (2 * self.storage.itemsize):
            raise ValueError(
                f"its shape {list(self.shape)} is not a multiple of the {2 * self.storage.itemsize} codes that share "
                f"a number of {self.storage}"
            )

    @property
    def num_blocks(self) -> int:
        return -(-math.prod(self.shape) // self.block)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes, the first in the high half; maxima; the table; if nested, the same of maxima, and their offset."""
        maxima = torch.uint8 if self.is_nested else torch.float32
        plain = (
            Part("codes", torch.uint8, (math.prod(self.shape) // 2, 1)),
            Part("maxima", maxima, (self.num_blocks,)),
            Part("table", torch.float32, (16,)),
        )
        if not self.is_nested:
            return plain
        return (
            *plain,
            Part("nested_maxima", torch.float32, (-(-self.num_blocks // self.nested_block),)),
            Part("nested_table", torch.float32, (256,)),
            Part("offset", torch.float32, (1,)),
        )

    @property
    def file_parts(self) -> tuple[Part, ...]:
        """All but the offset, which stands in the JSON."""
        codes, *others = self.parts
        stored = Part("codes", self.storage, (codes.shape[0] // self.storage.itemsize, 1))
        return (stored, *(part for part in others if part.name != "offset"))

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            # Of offloaded experts the shorter ones have something else behind them.
            text = bytes(tensors["state"].tolist()).decode("latin-1")
            state = msgspec.convert(json.JSONDecoder().raw_decode(text)[0], _State)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise ValueError(f"its quant_state cannot be read ({one_line(exc)})") from exc
        found: dict[str, Any] = {"quant_type": state.quant_type, "blocksize": state.blocksize, "shape": state.shape}
        wanted: dict[str, Any] = {"quant_type": self.kind, "blocksize": self.block, "shape": self.shape}
        if self.is_nested:
            found["nested_blocksize"], wanted["nested_blocksize"] = state.nested_blocksize, self.nested_block
        if found != wanted:
            raise ValueError(f"its quant_state says {found}, known is {wanted}")
        parts = {**tensors, "offset": torch.tensor([state.nested_offset], dtype=torch.float32, device="cpu")}
        parts["codes"] = parts["codes"].view(torch.uint8).view(-1, 1)
        names = ["table", *(("nested_maxima", "nested_table", "offset") if self.is_nested else ("maxima",))]
        check_scales(parts, *names, may_be_zero=True)
        return super().checked(parts)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes = parts["codes"].flatten()
        places = torch.stack([codes >> 4, codes & 15], dim=1).flatten().int()
        maxima = parts["maxima"]
        if self.is_nested:
            nested = parts["nested_maxima"].repeat_interleave(self.nested_block)[: self.num_blocks]
            maxima = parts["nested_table"][maxima.int()] * nested + parts["offset"]
        scales = maxima.repeat_interleave(self.block)[: places.shape[0]]
        return (parts["table"][places] * scales).reshape(self.shape).to(dtype)
