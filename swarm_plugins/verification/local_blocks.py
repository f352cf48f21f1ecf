"""Blocks computed here, to compare with: read from the checkpoint when first needed, dropped when room is short.

A span is run block by block (by pieces, where several only run together; see `swarm_plugins.borders`), so memory holds
one block at a time if the budget is that small.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.borders import pieces, tied_blocks, tied_inside
from swarm_plugins.checkpoint.partition import find_layers, num_blocks_of
from swarm_plugins.errors import ProtocolError, SwarmError, UnsupportedError, one_line
from swarm_plugins.verification.scores import coarsest
from swarm_plugins.versions import ModelVersion
from swarm_plugins.weights.names import KV_INT8, QUANTIZATIONS, parts_of
from swarm_plugins.weights.published.methods.known import is_published_name
from swarm_plugins.weights.published.weights import Published

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from swarm_plugins.blocks import KVCache, Span
    from swarm_plugins.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_is_ending = threading.Event()
# The interpreter waits for all jobs of executors before it runs `atexit`; only this hook comes earlier.
threading._register_atexit(_is_ending.set)  # type: ignore[attr-defined]

T = TypeVar("T")
P = ParamSpec("P")
_ROUTED = re.compile(r"(Experts?|Mo[Ee]|MoA|MoeBlock)$")
"""Names of transformers' classes of experts, with interchangeable implementations or without."""


class UncheckableError(SwarmError):
    """Neither this machine nor another server can compute the blocks."""


class UncheckableRequestError(UncheckableError):
    """This request cannot be checked; others for the same blocks can."""


@dataclass(frozen=True)
class Kind:
    """How a server computes: two blocks of one kind give the same numbers up to the order of sums."""

    dtype: str
    quantization: str
    """As it is announced: how weights are kept, and keys and values."""

    @property
    def weights(self) -> str:
        """How weights are kept."""
        return parts_of(self.quantization)[0]

    @property
    def kv_bits(self) -> int | None:
        """Bits of keys and values in sessions; None: as wide as they are computed."""
        return parts_of(self.quantization)[1]

    @property
    def precision(self) -> str:
        """What decides how far two honest computations may differ."""
        return self.dtype if self.weights == "none" else "quantized"

    @property
    def session_precision(self) -> str:
        """The same for steps of sessions."""
        return coarsest([self.precision, *([] if self.kv_bits is None else [KV_INT8])])

    def computes_like(self, other: Kind) -> bool:
        """Returns whether both give the same for requests without a session."""
        return (self.dtype, self.weights) == (other.dtype, other.weights)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of its hidden states.

        Raises:
            UnsupportedError: If it is not a floating type that blocks compute in.
        """
        found = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}.get(self.dtype)
        is_known = self.weights in QUANTIZATIONS or is_published_name(self.weights)
        if found is None or not is_known:
            raise UnsupportedError(
                f"blocks of {self.dtype!r}, quantized {self.quantization!r}, cannot be computed here"
            )
        return found


def _in_thread(
    work: Callable[Concatenate[LocalBlocks, P], T],
) -> Callable[Concatenate[LocalBlocks, P], Coroutine[Any, Any, T]]:
    """Runs a method in a thread, one at a time; one that fails here for want of memory must not end what it checks."""

    @functools.wraps(work)
    async def run(self: LocalBlocks, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def locked() -> T:
            with self._lock:
                _check_not_ending()
                return work(self, *args, **kwargs)

        try:
            return await asyncio.to_thread(locked)
        except (MemoryError, RuntimeError) as exc:
            if isinstance(exc, SwarmError):
                raise
            raise UncheckableError(f"blocks cannot be run here: {one_line(exc)}") from exc

    return run


def _check_not_ending() -> None:
    """Raises UncheckableError once the main thread has ended: the program is not to wait for its checks."""
    if _is_ending.is_set():
        raise UncheckableError("this program is ending")


def mixtures_of(config: PreTrainedConfig) -> frozenset[int]:
    """Returns which blocks of a model are mixtures of experts: there, a rounding may choose another expert."""
    from swarm_plugins.checkpoint.outline import meta_model

    layers = find_layers(meta_model(config, torch.float32))
    return frozenset(
        number
        for number, layer in enumerate(layers)
        if any(_ROUTED.search(type(module).__name__) for module in layer.modules())
    )


class SessionCaches:
    """The caches of one session, a cache for each block or piece of several; freed with the object.

    Args:
        blocks: The blocks.
        kind: How they compute.
        prefix: Keys and values the caches start with, K then V for each block.
    """

    def __init__(self, blocks: range, kind: Kind, prefix: Sequence[Tensor] = ()) -> None:
        self.blocks = blocks
        self.kind = kind
        self.prefix = tuple(prefix)
        self.by_piece: dict[int, KVCache] = {}
        """By the first block of each piece."""

    def __del__(self) -> None:
        for cache in self.by_piece.values():
            cache.close()


class LocalBlocks:
    """Runs blocks of one model in this process, one call at a time.

    All calls raise SwarmError if blocks or checkpoint cannot be read, or blocks not run here.

    Args:
        open_checkpoint: Opens the model's checkpoint.
        limit_bytes: Most bytes of blocks kept in memory; one block is always possible.
        version: What the checkpoint has to be. None: whatever it is.
    """

    def __init__(
        self, open_checkpoint: Callable[[], Checkpoint], *, limit_bytes: int, version: ModelVersion | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.version = version
        self._open = open_checkpoint
        self._checkpoint: Checkpoint | None = None
        self._spans: OrderedDict[tuple[range, Kind], tuple[Span, int]] = OrderedDict()
        self._fits: dict[int, bool] = {}
        self._mixtures: frozenset[int] | None = None
        """Which blocks of the model are mixtures of experts; None until one has run here."""
        self._lock = threading.Lock()

    @_in_thread
    def outputs(self, inputs: SpanInputs, kind: Kind) -> list[Tensor]:
        """Returns the output of each of ``inputs.blocks``, ``[B, S, D]``, in the kind's type."""
        with torch.no_grad():
            return self._forward(inputs, kind)

    @_in_thread
    def gradients(self, inputs: SpanInputs, kind: Kind, grad: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of ``wanted``, which are among the inputs, for a gradient of the output."""
        with torch.enable_grad():
            output = self._forward(inputs, kind)[-1]
            found = torch.autograd.grad(output, wanted, grad.to(output.dtype), allow_unused=True)
        return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(wanted, found, strict=True)]

    @_in_thread
    def extend(self, caches: SessionCaches, steps: Sequence[SpanInputs]) -> Tensor:
        """Runs further steps of a session; returns the outputs of the last block for all of them, ``[B, S, D]``."""
        from swarm_plugins.blocks import StepInputs

        kind = caches.kind
        hidden = [step.hidden.to(kind.torch_dtype) for step in steps]
        for piece in self._pieces(caches.blocks):
            span = self._span(piece, kind)
            if piece.start not in caches.by_piece:
                first, end = (2 * (block - caches.blocks.start) for block in (piece.start, piece.stop))
                prefix = [part.to(kind.torch_dtype) for part in caches.prefix[first:end]]
                caches.by_piece[piece.start] = span.new_cache(hidden[0].shape[0], piece, prefix)
            for number, step in enumerate(steps):
                inputs = StepInputs(
                    cache=caches.by_piece[piece.start],
                    blocks=piece,
                    hidden=hidden[number],
                    position_ids=step.position_ids,
                    attention_mask=step.attention_mask,
                    layer_masks=step.layer_masks,
                    token_ids=step.token_ids,
                    adapters=step.adapters,
                )
                hidden[number] = span.step([inputs])[0].hidden
        return torch.cat(hidden, dim=1)

    def _forward(self, inputs: SpanInputs, kind: Kind) -> list[Tensor]:
        hidden, outputs = inputs.hidden, []
        for piece in self._pieces(inputs.blocks):
            one = replace(inputs.take_blocks(piece, hidden), collect_hidden=len(piece) > 1, collect_router=False)
            found = self._span(piece, kind).forward(one)
            hidden = found.hidden
            outputs += [*found.hidden_states, hidden]
        return outputs

    def _pieces(self, blocks: range) -> list[range]:
        return pieces(blocks, self._tied_of(blocks))

    def _tied_of(self, blocks: range) -> frozenset[int]:
        """Returns the tied blocks of the model; evidence of others may name blocks that it does not have."""
        config = self._opened().config
        num_blocks = num_blocks_of(config)
        if blocks.start < 0 or blocks.stop > num_blocks:
            raise ProtocolError(f"blocks {blocks.start}:{blocks.stop} are to be computed, the model has 0:{num_blocks}")
        return tied_blocks(config)

    def _span(self, piece: range, kind: Kind) -> Span:
        _check_not_ending()
        key = (piece, kind)
        if key not in self._spans:
            # Late: a client that checks nothing does not load what runs blocks.
            from swarm_plugins.blocks import load_span

            checkpoint = self._opened()
            published = Published.of(checkpoint)
            if (published is None) == is_published_name(kind.weights) or (
                published is not None and published.name != kind.weights
            ):
                stored = "wide" if published is None else f"published as {published.name}"
                raise UncheckableError(f"{checkpoint.name} is {stored}, the server says {kind.weights!r}")
            quantization = kind.weights if published is None else "none"
            span = load_span(checkpoint, piece, dtype=kind.torch_dtype, quantization=quantization, kv_bits=kind.kv_bits)
            num_bytes = sum(tensor.nbytes for tensor in (*span.model.parameters(), *span.model.buffers()))
            while self._spans and sum(size for _, size in self._spans.values()) + num_bytes > self.limit_bytes:
                self._spans.popitem(last=False)
            self._spans[key] = (span, num_bytes)
            if self._mixtures is None:
                self._mixtures = mixtures_of(checkpoint.config)
            log.debug("blocks %d:%d are here for checks: %d bytes", piece.start, piece.stop, num_bytes)
        self._spans.move_to_end(key)
        return self._spans[key][0]

    async def can_hold(self, num_blocks: int) -> bool:
        """Returns whether so many blocks fit in memory together, from a checkpoint that is on this machine."""
        if num_blocks not in self._fits:
            self._fits[num_blocks] = await self._look_whether_fits(num_blocks)
        return self._fits[num_blocks]

    @_in_thread
    def _look_whether_fits(self, num_blocks: int) -> bool:
        checkpoint = self._opened()
        total = num_blocks_of(checkpoint.config)
        num_bytes = sum(info.num_bytes for info in checkpoint.tensors.values())
        return checkpoint.directory is not None and num_blocks * num_bytes <= self.limit_bytes * total

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            opened = self._open()
            if self.version not in (None, opened.version):
                raise UncheckableError(
                    f"{opened.name} has changed since the model was loaded: it is {opened.version} now, servers run "
                    f"{self.version}"
                )
            self._checkpoint = opened
        return self._checkpoint

    @_in_thread
    def check_unchanged(self) -> None:
        """Checks that the files still hold the version that servers run: a training run may have written new ones.

        Raises:
            UncheckableError: If they do not.
        """
        if self.version is None or not self.version.is_local:
            return
        self._checkpoint = None
        try:
            self._opened()
        except SwarmError:
            self._spans.clear()
            raise

    def has_experts(self, blocks: range) -> bool:
        """Returns whether one of some blocks is a mixture of experts; False as long as no block has run here."""
        return self._mixtures is not None and not self._mixtures.isdisjoint(blocks)

    @_in_thread
    def has_fixed_positions(self, blocks: range, kind: Kind) -> bool:
        """Returns whether steps of a session may be joined: the tokens they come with change nothing."""
        return self._span(self._pieces(blocks)[0], kind).spec.has_fixed_positions

    @_in_thread
    def tied_inside(self, blocks: range) -> frozenset[int]:
        """Returns which of some blocks are tied to another of them, as the checkpoint's config says."""
        return tied_inside(blocks, self._tied_of(blocks))
