"""Which tensors of GGUF are made of which of a checkpoint, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.merging.base import Planned
from swarm_plugins.merging.llama_cpp.architectures import Architecture, heads_of, in_pairs
from swarm_plugins.merging.llama_cpp.library import gguf_py

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_ENDS = (".weight", ".bias")
_WIDE_ENDS = ("_norm.weight", "ffn_gate_inp.weight")
"""What llama.cpp reads in 32 bits only, as everything with one dimension."""
_EMBEDDINGS = ("token_embd.weight", "output.weight")
_COMPUTED_END = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store these; llama.cpp computes them, and refuses a file that contains them."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Name of ggml's type."""
    sources: tuple[str, ...]
    """Names in the checkpoint; of several, each is an expert."""
    change: Callable[[Tensor], Tensor]

    def made_of(self, read: Callable[[str], Tensor]) -> Tensor:
        """Returns the tensor in float32."""
        parts = [self.change(read(name).float()) for name in self.sources]
        return torch.stack(parts) if len(self.shape) > parts[0].ndim else parts[0]


def name_map(architecture: Architecture, num_blocks: int) -> Callable[[str], str | None]:
    """Returns what gives the GGUF name of a tensor of a checkpoint; None for one that llama.cpp does not know."""
    gguf = gguf_py()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    known: Any = gguf.get_tensor_name_map(kinds[architecture.name], num_blocks)

    def named(name: str) -> str | None:
        found: str | None = known.get_name(name, try_suffixes=_ENDS)
        return found

    return named


def plan_tensors(
    tensors: Iterable[tuple[str, Planned]], config: PreTrainedConfig, architecture: Architecture, kind: str
) -> list[GgufTensor]:
    """Returns the tensors to write, block by block.

    Args:
        tensors: Those of the checkpoint.
        config: Its config.
        architecture: llama.cpp's.
        kind: Type of ggml for weights.

    Raises:
        UnsupportedError: If llama.cpp does not know a tensor.
    """
    named = name_map(architecture, config.num_hidden_layers)
    found: dict[str, dict[int, str]] = {}
    shapes = {}
    for name, planned in tensors:
        if name.endswith(_COMPUTED_END):
            continue
        match = _EXPERT.fullmatch(name)
        target = named(f"{match[1]}.{match[3]}" if match else name)
        if target is None:
            raise UnsupportedError(f"{name} has no name in llama.cpp's architecture {architecture.name!r}")
        found.setdefault(target, {})[int(match[2]) if match else 0] = name
        shapes[name] = planned.shape
    plan = []
    for target, by_expert in found.items():
        sources = tuple(by_expert[index] for index in sorted(by_expert))
        shape = shapes[sources[0]]
        if target.endswith("_exps.weight"):
            shape = (len(sources), *shape)
        change = _change(target, config, architecture)
        plan.append(GgufTensor(target, shape, _kind(target, shape, kind), sources, change))
    # Gates and ups of experts one after the other, as they are merged together.
    return sorted(plan, key=lambda one: (_block(one.name), one.name))


def _block(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def _kind(name: str, shape: tuple[int, ...], wanted: str) -> str:
    if len(shape) == 1 or name.endswith(_WIDE_ENDS):
        return "F32"
    gguf = gguf_py()
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]]
    if name in _EMBEDDINGS and num_bytes / block < 1:
        # Few bits cost most here; llama.cpp's own quantizer spares them too.
        wanted, (block, _) = "Q8_0", gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0]
    return wanted if shape[-1] % block == 0 else "F16"


def _change(name: str, config: PreTrainedConfig, architecture: Architecture) -> Callable[[Tensor], Tensor]:
    heads = heads_of(name, config)
    if architecture.rotates_pairs and heads is not None:
        return lambda weight: in_pairs(weight, heads)
    if architecture.adds_one and name.endswith("norm.weight"):
        return lambda weight: weight + 1
    return lambda weight: weight
