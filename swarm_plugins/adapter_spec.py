"""The structure of an adapter, shared by client and server.

A client reads it from PEFT's modules and ships it; a server applies it. The structure is small, validated, and travels
as metadata; the tensors follow in the order of
[`AdapterSpec.tensor_shapes`][swarm_plugins.adapter_spec.AdapterSpec.tensor_shapes].
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import torch

__all__ = ["AdapterKind", "AdapterModule", "AdapterSpec", "adapter_digest"]

AdapterKind = Literal["lora", "lora_parameter", "ia3"]


class AdapterModule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One adapter layer on one module of one block."""

    block: int
    """Index of the block in the whole model."""
    module: str
    """Path of the adapted module inside the block, as HF names it: ``self_attn.q_proj``."""
    kind: AdapterKind
    """``lora``: on a linear layer; ``lora_parameter``: on a bare parameter (experts, router); ``ia3``: a vector."""
    parameter: str | None = None
    """Name of the adapted parameter of ``module``; only for ``lora_parameter``."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors: ``(A, B)`` for LoRA, PEFT's layouts; ``(l,)`` for IA3."""
    scaling: float = 1.0
    """Factor of the low-rank product (``lora_alpha / r``, or ``/ sqrt(r)`` for rslora)."""
    dropout: float = 0.0
    """Probability of zeroing an input element while training."""
    num_experts: int = 1
    """Experts in the adapted parameter; 1 for a two-dimensional one."""
    transposed: bool = False
    """For ``lora_parameter``: the parameter is stored ``[experts, in, out]``."""
    is_feedforward: bool = False
    """For ``ia3``: scale the module's input instead of its output."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The structure of a whole adapter, or of its part on a span."""

    modules: tuple[AdapterModule, ...]

    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of all tensors, in the order in which they are shipped."""
        return [shape for module in self.modules for shape in module.shapes]


def adapter_digest(spec: AdapterSpec, tensors: Sequence[torch.Tensor]) -> str:
    """Returns the content hash of an adapter: its structure and every tensor's type, shape and bytes."""
    import torch

    digest = hashlib.blake2b(msgspec.msgpack.encode(spec), digest_size=20)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()
