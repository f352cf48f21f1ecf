"""The spans that one server holds: the one it serves and, after a move, the one that its open sessions still use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Generator, Sequence
from typing import cast

from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterSpec, PeftLayer
from swarm_plugins.block_io import LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.blocks.adapters.checks import check_adapter, checking_adapter
from swarm_plugins.blocks.adapters.norms import NormedLayer, weight_norms
from swarm_plugins.blocks.kv import KVCache
from swarm_plugins.blocks.runner import SpanSpec, StepInputs
from swarm_plugins.blocks.span import Span
from swarm_plugins.server.failures import RequestError


class HostedSpans:
    """One or two spans behind one compute thread, one KV budget and one set of stores; a `SpanRunner`.

    A request names its blocks, and runs on the span that holds them; the caches of sessions fit every span. Spans are
    added and dropped on the compute thread, between requests.

    Args:
        span: The first span.
    """

    def __init__(self, span: Span) -> None:
        self._spans = [span]
        self._on_block_boundary: Callable[[], None] | None = None
        self._spec = span.spec
        self.weights: Collection[int] = frozenset(storages(span))
        """Addresses of the spans' own storages."""
        self.pool = span.pool
        """The KV budget of all spans."""

    @property
    def spec(self) -> SpanSpec:
        """What is held and accepted: the span that is served, which is the newest, and the one that is being left."""
        return self._spec

    @property
    def on_block_boundary(self) -> Callable[[], None] | None:
        """Called between blocks; see `Span`."""
        return self._on_block_boundary

    @on_block_boundary.setter
    def on_block_boundary(self, function: Callable[[], None] | None) -> None:
        self._on_block_boundary = function
        for span in self._spans:
            span.on_block_boundary = function

    def at_boundary(self) -> None:
        """Lets other work run, as between two blocks."""
        if self._on_block_boundary is not None:
            self._on_block_boundary()

    def free_tokens(self, idle_bytes: int = 0) -> int:
        """Returns the tokens that the KV budget still has room for, in all blocks of the span that is served.

        Args:
            idle_bytes: Bytes of the budget in use that count as free.
        """
        return self._spans[-1].spec.kv_tokens(self.pool.free_bytes + idle_bytes) if self._spans else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of the span that is served."""
        return sum(storages(self._spans[-1]).values()) if self._spans else 0

    def add(self, span: Span) -> None:
        """Serves another span from now on; the one before is left, and dropped by `drop_left`."""
        span.on_block_boundary = self._on_block_boundary
        self._spans.append(span)
        self._describe()

    def drop_left(self) -> None:
        """Drops the spans that are not served any more."""
        self._close(self._spans[:-1])

    def drop_all(self) -> None:
        """Drops every span: requests are refused until one is added."""
        self._close(list(self._spans))

    def close(self) -> None:
        """Closes the readers of offloaded experts. Idempotent."""
        for span in self._spans:
            span.close()

    def new_cache(self, batch_size: int, blocks: range, prefix: Sequence[Tensor] = ()) -> KVCache:
        """Opens a session's cache; see `SpanRunner`."""
        return self._holding(blocks).new_cache(batch_size, blocks, prefix)

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs blocks without a session; see `SpanRunner`."""
        return self._holding(inputs.blocks).forward(inputs)

    def forward_part(self, inputs: SpanInputs) -> tuple[SpanOutputs, tuple[Tensor, ...]]:
        """Runs some tokens of rows; see `SpanRunner`."""
        return self._holding(inputs.blocks).forward_part(inputs)

    def step(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        """Runs new tokens of sessions; see `SpanRunner`."""
        return self._holding(steps[0].blocks).step(steps) if steps else []

    def weight_norms(self, layers: Sequence[NormedLayer]) -> Generator[None, None, tuple[Tensor, ...]]:
        """Computes the norms of weights that layers start from, each in a part; spans may come and go in between."""
        return weight_norms(layers, self._linear)

    def _linear(self, layer: PeftLayer) -> nn.Linear:
        span = self._holding(range(layer.block, layer.block + 1))
        return cast(nn.Linear, span.module(layer.block, layer.module))

    def check_adapter(
        self, digest: str, spec: AdapterSpec, tensors: tuple[Tensor, ...], run_bytes: int
    ) -> LoadedAdapter:
        """Checks an uploaded adapter against the span that holds its blocks, and the memory of a run."""
        return check_adapter(spec, tensors, self._fitting(spec), max_run_bytes=run_bytes, digest=digest)

    def checking_adapter(
        self, digest: str, spec: AdapterSpec, tensors: tuple[Tensor, ...], run_bytes: int
    ) -> Generator[None, None, LoadedAdapter]:
        """Does what `check_adapter` does in parts, for layers that are built."""
        span = self._fitting(spec)
        return (yield from checking_adapter(spec, tensors, span, max_run_bytes=run_bytes, digest=digest))

    def _fitting(self, spec: AdapterSpec) -> Span:
        blocks = [layer.block for layer in spec.layers]
        fitting = [span for span in self._spans if all(block in span.blocks for block in blocks)]
        if not self._spans:
            raise _gone(range(min(blocks, default=0), max(blocks, default=0) + 1))
        return (fitting or self._spans)[-1]

    def _close(self, spans: Sequence[Span]) -> None:
        self._spans = [span for span in self._spans if span not in spans]
        self._describe()
        for span in spans:
            span.close()

    def _describe(self) -> None:
        self.weights = frozenset(address for span in self._spans for address in storages(span))
        layouts = {block: layout for span in self._spans for block, layout in span.spec.kv_layouts.items()}
        if not self._spans:
            self._spec = dataclasses.replace(self._spec, blocks=range(0), left=None, kv_layouts={})
            return
        left = self._spans[-2].blocks if len(self._spans) > 1 else None
        self._spec = dataclasses.replace(self._spans[-1].spec, left=left, kv_layouts=layouts)

    def _holding(self, blocks: range) -> Span:
        for span in reversed(self._spans):
            if span.blocks.start <= blocks.start and blocks.stop <= span.blocks.stop:
                return span
        raise _gone(blocks)


def _gone(blocks: range) -> RequestError:
    # Checked when the request came; the server has moved since.
    return RequestError(
        "draining", f"this server has left blocks {blocks.start}:{blocks.stop} meanwhile: look up the swarm again"
    )


def storages(span: Span) -> dict[int, int]:
    """Returns the sizes of a span's own storages, by address."""
    tensors = [*span.model.parameters(), *span.model.buffers()]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
