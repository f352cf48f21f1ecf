"""Experts that this machine computes, for owners of their blocks: loading, forward and gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.files import Piece
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.offload.cache.cache import make_cache
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.formats.experts import PlainFormat
from swarm_plugins.offload.formats.slices import SlicedFormat
from swarm_plugins.offload.interfaces import ExpertCache, ExpertFormat, ExpertKey
from swarm_plugins.offload.model.attach import check_budget, formats_of
from swarm_plugins.offload.model.loans import ExpertLoans
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint
from swarm_plugins.offload.store.checkpoint_store import CheckpointStore
from swarm_plugins.offload.store.quantized_store import open_quantized
from swarm_plugins.weights.names import HOSTED_WIDTHS
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.published.widening import Widening, experts_only, widening_of
from swarm_plugins.weights.widths import Width

HOLDER_BITS: dict[str, Width | None] = {"none": None, **HOSTED_WIDTHS}
"""Widths of experts that are all in memory, by the quantization that their holder announces."""


class _Layer(NamedTuple):
    module: nn.Module
    """The family's experts on the meta device: flags and activation."""
    loans: ExpertLoans


@dataclass(kw_only=True, eq=False)
class HeldExperts:
    """The same experts of some blocks, ready to compute. All calls come from one thread."""

    layers: Mapping[int, _Layer]
    """By block."""
    experts: range
    """Indices of the experts, in every block."""
    part: tuple[int, int] | None
    """``(k, n)``: only the k-th of n parts of each expert. None: whole experts."""
    cache: ExpertCache
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    """Width of the experts' input rows, which is less than that of the hidden states in some mixtures."""
    widening: Widening | None = None
    """What experts in a published format take beside their bytes."""
    rows_at_once: int = 1 << 40
    """Rows of one expert that run at a time; urgent work waits for so many."""
    on_block_boundary: Callable[[], None] | None = None
    """Called between two experts, and between the parts of one; may call `run`."""

    @property
    def blocks(self) -> Sequence[int]:
        return list(self.layers)

    def run(self, block: int, rows: Tensor, spans: Mapping[int, slice], grad: Tensor | None = None) -> Tensor:
        """Runs rows through their experts, or returns the gradients of the rows.

        Args:
            block: Index of the block.
            rows: ``[N, D]``, sorted by expert.
            spans: Rows of each expert.
            grad: ``[N, D]``, gradient of the outputs; None: the outputs are wanted.

        Returns:
            ``[N, D]``; zeros outside of the spans. Without routing weights and the norm after the experts, and of a
            slice only its summand.
        """
        module, loans = self.layers[block]
        result = rows.new_zeros(rows.shape)
        with closing(loans.borrow(list(spans), is_backward=grad is not None)) as lent:
            for expert, tensors in lent:
                for span in _cut(spans[expert], self.rows_at_once):
                    if grad is None:
                        with torch.no_grad():
                            result[span] = loans.run(module, rows[span], tensors)
                    else:
                        with torch.inference_mode(False), torch.enable_grad():
                            leaf = rows[span].detach().clone().requires_grad_()
                            output = loans.run(module, leaf, tensors)
                        (result[span],) = torch.autograd.grad(output, leaf, grad[span].to(output.dtype))
                    if self.on_block_boundary is not None and isinstance(self.cache, _Resident):
                        self.on_block_boundary()
        return result

    def close(self) -> None:
        """Closes the readers of offloaded experts. Idempotent."""
        self.cache.close()


def _cut(span: slice, size: int) -> list[slice]:
    return [slice(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]


class _Resident:
    """Experts that are all in memory; an `ExpertCache`."""

    unused_bytes = 0

    def __init__(self, tensors: Mapping[ExpertKey, Mapping[str, Tensor]]) -> None:
        self._tensors = tensors

    def borrow(self, layer: int, experts: Sequence[int]) -> Generator[tuple[int, Mapping[str, Tensor]]]:
        for expert in experts:
            yield expert, self._tensors[ExpertKey(layer, expert)]

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Has nothing to read ahead."""

    def close(self) -> None:
        """Has nothing to end."""


def load_held_experts(
    checkpoint: Checkpoint,
    blocks: range,
    experts: range,
    *,
    part: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device,
    bits: Width | None = None,
    offload: OffloadConfig | None = None,
) -> HeldExperts:
    """Loads some experts of some blocks, and no other tensor.

    Args:
        checkpoint: Where the weights are: a model, or with ``offload`` a store that `swarm quantize` made.
        blocks: Global indices of the blocks; those without experts are passed over.
        experts: Indices of the experts, in each of these blocks.
        part: ``(k, n)``: the k-th, from 0, of n equal parts of each expert's inner dimension. None: whole experts.
        dtype: Floating type to compute in. None: the checkpoint's.
        device: Where to compute.
        bits: Width of experts that are all in memory. None: as wide as ``dtype``.
        offload: Budgets of experts that stay on disk. None: all are in memory.

    Raises:
        ConfigError: If a block has fewer experts, or they cannot be cut in so many parts.
        CheckpointError: If weights are missing.
        UnsupportedError: If the blocks have no experts, or experts that cannot be read one by one.
        CapacityError: If the budget is too small to compute with.
    """
    store = open_quantized(checkpoint)
    if store is not None and offload is None:
        raise ConfigError(
            f"{checkpoint.name} is a quantized store, whose experts are read on demand: set how much memory they may "
            "take with fast_bytes"
        )
    moe = MoeCheckpoint.inspect(checkpoint, store, dtype=dtype, layers=blocks)
    moe.check_has_experts(blocks)
    _check_range(moe, experts)
    settings = offload or OffloadConfig(expert_bits=bits)
    formats = formats_of(moe, settings, device)
    if part is not None:
        formats = {layer: _sliced(moe, layer, form, part) for layer, form in formats.items()}
    cache: ExpertCache
    if offload is None and isinstance(moe.store, CheckpointStore):
        cache = _read_all(checkpoint, moe.store, formats, experts, device)
    else:
        check_budget(moe, formats, settings, device)
        moe.store.fetch()
        cache = make_cache(moe.store, formats, settings, device)
    layers = {
        layer: _Layer(moe.outline.get_submodule(path), ExpertLoans(layer, formats[layer], cache))
        for layer, path in moe.paths.items()
    }
    outline: Any = layers[min(layers)].module
    widening = None
    if moe.placing is not None:
        widening = widening_of(experts_only(moe.placing), moe.dtype, keeps_experts=True, device=device)
    return HeldExperts(
        layers=layers,
        experts=experts,
        part=part,
        cache=cache,
        dtype=moe.dtype,
        device=device,
        hidden_size=outline.down_proj.shape[2 if outline.is_transposed else 1],
        widening=widening,
    )


def load_expert(
    checkpoint: Checkpoint,
    block: int,
    expert: int,
    *,
    part: tuple[int, int] | None,
    dtype: torch.dtype,
    quantization: str,
) -> HeldExperts:
    """Loads a single expert, or a part of it, as a holder that announces this type and quantization has it.

    Raises:
        SwarmError: As for `load_held_experts`; ``UnsupportedError`` if the quantization is unknown.
    """
    published = Published.of(checkpoint)
    bits = HOLDER_BITS if published is None else {published.name: None}
    if quantization not in bits:
        raise UnsupportedError(f"experts quantized as {quantization!r} cannot be computed here")
    return load_held_experts(
        checkpoint,
        range(block, block + 1),
        range(expert, expert + 1),
        part=part,
        dtype=dtype,
        device=torch.device("cpu"),
        bits=bits[quantization],
    )


def _check_range(moe: MoeCheckpoint, experts: range) -> None:
    for layer, count in moe.store.num_experts.items():
        if experts.stop > count:
            raise ConfigError(
                f"experts {experts.start}:{experts.stop} are out of range: block {layer} of {moe.checkpoint.name} has "
                f"experts 0:{count}; serve blocks with other numbers of experts by a command of their own"
            )


def _sliced(moe: MoeCheckpoint, layer: int, form: ExpertFormat, part: tuple[int, int]) -> SlicedFormat:
    if not isinstance(form, PlainFormat):
        raise ConfigError(
            f"slice {part[0]}/{part[1]} of experts in few bits: slices are kept as wide as the model has them; leave "
            "out --slice, or what makes them narrow (bits= in --offload, a store or a checkpoint of few bits)"
        )
    module = moe.outline.get_submodule(moe.paths[layer])
    return SlicedFormat(
        form,
        part,
        is_transposed=moe.is_transposed[layer],
        is_concatenated=bool(getattr(module, "is_concatenated", True)),
    )


def _read_all(
    checkpoint: Checkpoint,
    store: CheckpointStore,
    formats: Mapping[int, ExpertFormat],
    experts: range,
    device: torch.device,
) -> _Resident:
    """Reads experts, one after the other: each exists twice only while it is converted."""
    found: dict[ExpertKey, Mapping[str, Tensor]] = {}
    for layer, form in formats.items():
        for expert in experts:
            key = ExpertKey(layer, expert)
            stored = torch.empty(form.stored.num_bytes, dtype=torch.uint8, device="cpu")
            pieces: defaultdict[str, list[Piece]] = defaultdict(list)
            for info, start, num_bytes, offset in store.pieces(key):
                pieces[info.file].append(Piece(start, stored[offset : offset + num_bytes].numpy().data))
            for file, some in pieces.items():
                checkpoint.read_pieces(file, sorted(some, key=lambda piece: piece.start))
            form.check(stored, key)
            computed = stored
            if form.computed is not form.stored:
                computed = torch.empty(form.computed.num_bytes, dtype=torch.uint8, device="cpu")
                form.convert(stored, computed)
            found[key] = form.computed.views(computed.to(device))
    return _Resident(found)
