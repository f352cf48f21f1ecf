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

__all__ = [
    "AdapterKind",
    "AdapterModule",
    "AdapterSpec",
    "PeftLayer",
    "PeftPart",
    "adapter_digest",
]

AdapterKind = Literal["lora", "lora_parameter", "ia3"]
PeftValue = bool | int | float | str


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


class PeftLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer of one of PEFT's methods on one linear layer of one block."""

    block: int
    """Index of the block in the whole model."""
    module: str
    """Path of the adapted module inside the block."""
    options: tuple[tuple[str, PeftValue], ...]
    """Names and values of the method's options."""
    names: tuple[str, ...]
    """Names of the layer's tensors, as PEFT has them, without the adapter's."""
    places: tuple[int, ...]
    """For each name, the index of its tensor in the part; layers can share a tensor."""
    scaling: float | None = None
    """Factor of the update; None where the method knows none."""
    dropout: float = 0.0
    """Probability of zeroing an input element while training."""

    @property
    def needs_norm(self) -> bool:
        """Whether it starts from the norm of its module's weight, as DoRA does."""
        return ("use_dora", True) in self.options


class PeftPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that servers build of PEFT's own classes; see `swarm_plugins.peft_methods`."""

    method: str
    """A name of ``PeftType``."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors of all layers."""
    layers: tuple[PeftLayer, ...]


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The structure of a whole adapter, or of its part on a span."""

    modules: tuple[AdapterModule, ...]
    peft: PeftPart | None = None
    """Layers of other kinds. Left out of messages and digests where there are none, as servers before it expect."""

    @property
    def layers(self) -> tuple[AdapterModule | PeftLayer, ...]:
        """All layers, of every kind."""
        return self.modules if self.peft is None else (*self.modules, *self.peft.layers)

    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of all tensors, in the order in which they are shipped."""
        shapes = [shape for module in self.modules for shape in module.shapes]
        return shapes if self.peft is None else [*shapes, *self.peft.shapes]

    def tensor_blocks(self) -> list[tuple[int, ...]]:
        """Returns the blocks that use each tensor, in the same order."""
        blocks: list[tuple[int, ...]] = [(module.block,) for module in self.modules for _ in module.shapes]
        if self.peft is not None:
            users: list[set[int]] = [set() for _ in self.peft.shapes]
            for layer in self.peft.layers:
                for place in layer.places:
                    users[place].add(layer.block)
            blocks.extend(tuple(sorted(one)) for one in users)
        return blocks

    def on(self, blocks: range) -> tuple[AdapterSpec, list[int]]:
        """Returns the part of the structure on some blocks, and the positions of its tensors in the whole."""
        modules: list[AdapterModule] = []
        indices: list[int] = []
        position = 0
        for module in self.modules:
            if module.block in blocks:
                modules.append(module)
                indices.extend(range(position, position + len(module.shapes)))
            position += len(module.shapes)
        layers = [] if self.peft is None else [layer for layer in self.peft.layers if layer.block in blocks]
        if self.peft is None or not layers:
            return AdapterSpec(modules=tuple(modules)), indices
        used = sorted({place for layer in layers for place in layer.places})
        renumbered = {place: index for index, place in enumerate(used)}
        kept = tuple(
            msgspec.structs.replace(layer, places=tuple(renumbered[place] for place in layer.places))
            for layer in layers
        )
        shapes = tuple(self.peft.shapes[place] for place in used)
        part = PeftPart(method=self.peft.method, shapes=shapes, layers=kept)
        return AdapterSpec(modules=tuple(modules), peft=part), [*indices, *(position + place for place in used)]


def adapter_digest(spec: AdapterSpec, tensors: Sequence[torch.Tensor]) -> str:
    """Returns the content hash of an adapter: its structure and every tensor's type, shape and bytes."""
    import torch

    digest = hashlib.blake2b(msgspec.msgpack.encode(spec), digest_size=20)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()
