"""Servers that lie: each does everything right but for one thing that a message cannot show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recipes.benchmarks.links.swarm import DistantSwarm
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.blocks.quantize import quantize_block
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.blocks.span import Span
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.startup.capacity import Speed

Lie = Literal[
    "scaled",  # the output of a block, by 1.01
    "echo",  # the input, as if it were the output
    "wrong_blocks",  # the blocks in reverse order
    "stale_adapter",  # the first adapter of each structure instead of later ones
    "int8",  # weights in 8 bits, announced as unquantized
    "zero_gradients",  # right outputs, gradients of zero
    "flipped_gradients",  # right outputs, gradients of the wrong sign
]
LIES: tuple[Lie, ...] = get_args(Lie)


class Liar:
    """Makes a span lie.

    Args:
        lie: How; one of ``LIES``.
        factor: What ``scaled`` multiplies by.
        block: Block whose output ``scaled`` multiplies. None: the last of each call.
        honest_calls: Calls answered rightly before the first lie.

    Raises:
        ConfigError: If the lie is unknown.
    """

    def __init__(self, lie: Lie, *, factor: float = 1.01, block: int | None = None, honest_calls: int = 0) -> None:
        if lie not in LIES:
            raise ConfigError(f"unknown lie {lie!r}; known: {', '.join(LIES)}")
        self.lie = lie
        self.factor = factor
        self.block = block
        self.honest_calls = honest_calls
        self.calls = 0
        """Forwards and steps so far."""
        self._adapters: dict[object, LoadedAdapter] = {}

    def corrupt(self, span: Span) -> Span:
        """Changes a span so that it lies from now on; returns it."""
        forward, step = span.forward, span.step

        def lying_forward(inputs: SpanInputs) -> SpanOutputs:
            self.calls += 1
            if self.calls <= self.honest_calls:
                return forward(inputs)
            return self._forward(forward, inputs)

        def lying_step(steps: Sequence[StepInputs]) -> list[SpanOutputs]:
            self.calls += 1
            found = step([self._stale(one) for one in steps])
            if self.calls <= self.honest_calls:
                return found
            return [self._changed(one, outputs) for one, outputs in zip(steps, found, strict=True)]

        if self.lie == "int8":
            for block in span.blocks:
                quantize_block(span._cut.layers[block], "int8")
        # A span's methods are looked up on the instance first.
        span.__dict__.update(forward=lying_forward, step=lying_step)
        return span

    def _forward(self, forward: Callable[[SpanInputs], SpanOutputs], inputs: SpanInputs) -> SpanOutputs:
        if self.lie in ("zero_gradients", "flipped_gradients"):
            scale = 0.0 if self.lie == "zero_gradients" else -1.0

            def changed(tensor: Tensor) -> Tensor:
                scaled: Tensor = _ScaledGradient.apply(tensor, scale)  # type: ignore[no-untyped-call]
                return scaled

            return forward(replace(inputs, hidden=changed(inputs.hidden), adapters=inputs.adapters.map(changed)))
        if self.lie == "wrong_blocks" or (self.lie == "scaled" and self.block in inputs.blocks[:-1]):
            return self._block_by_block(forward, inputs)
        return self._changed(inputs, forward(self._stale(inputs)))

    def _block_by_block(self, forward: Callable[[SpanInputs], SpanOutputs], inputs: SpanInputs) -> SpanOutputs:
        blocks = inputs.blocks if self.lie == "scaled" else reversed(inputs.blocks)
        hidden, states = inputs.hidden, []
        for block in blocks:
            one = inputs.take_blocks(range(block, block + 1), hidden)
            hidden = forward(replace(one, collect_hidden=False, collect_router=False)).hidden
            if self.lie == "scaled" and block == self.block:
                hidden = hidden * self.factor
            states.append(hidden)
        return SpanOutputs(hidden=hidden, hidden_states=tuple(states[:-1]) if inputs.collect_hidden else ())

    def _changed(self, inputs: SpanInputs, outputs: SpanOutputs) -> SpanOutputs:
        if self.lie == "scaled":
            return outputs.with_tensors([outputs.hidden * self.factor, *outputs.tensors[1:]])
        if self.lie == "echo":
            states = 1 + len(outputs.hidden_states)
            return outputs.with_tensors([inputs.hidden * 1.0] * states + list(outputs.router_logits))
        return outputs

    def _stale(self, inputs: Any) -> Any:
        if self.lie != "stale_adapter":
            return inputs
        kept = tuple(self._adapters.setdefault(adapter.spec, adapter) for adapter in inputs.adapters.adapters)
        old = tuple(
            LoadedAdapter(
                spec=now.spec,
                tensors=tuple(_as(first, second) for first, second in zip(a.tensors, now.tensors, strict=True)),
            )
            for a, now in zip(kept, inputs.adapters.adapters, strict=True)
        )
        use: AdapterUse = replace(inputs.adapters, adapters=old)
        return replace(inputs, adapters=use)


def _as(old: Tensor, new: Tensor) -> Tensor:
    """Returns the old values, with gradients that go to the new tensor."""
    return old.detach() + (new - new.detach())


class _ScaledGradient(torch.autograd.Function):
    """Passes its input on, and a multiple of its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class LyingSwarm(DistantSwarm):
    """A `DistantSwarm` some of whose servers lie.

    Args:
        directory: The model.
        liars: Servers that lie, by index.
        **settings: Those of `DistantSwarm`.
    """

    def __init__(self, directory: str | Path, *, liars: Mapping[int, Liar] | None = None, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self._liars = dict(liars or {})
        # Liars are preferred, however late their answers are on a busy machine: a lie never asked for shows nothing.
        self._honest_speed = 0.01 if liars else 1.0

    def prepare(self, peer: str, span: Span) -> Span:
        liar = self._liars.get(self.peers.index(peer))
        return super().prepare(peer, span if liar is None else liar.corrupt(span))

    def speed(self, peer: str) -> Speed:
        speed = self._honest_speed if self.peers.index(peer) not in self._liars else 2.0
        return Speed(throughput=speed, decode_s=1 / speed) if self.compute is None else super().speed(peer)

    def restart(self, peer: str, *, directory: str | Path | None = None) -> None:
        """Starts a killed server again, which is honest from now on."""
        self._liars.pop(self.peers.index(peer), None)
        super().restart(peer, directory=directory)

    def replace(self, peer: str, liar: Liar | None = None) -> str:
        """Kills a server and starts one with the same blocks and a new identity; returns its id."""
        self.kill(peer)
        index, old = self.peers.index(peer), self.services.pop(peer)
        del self._handlers[peer]
        old.scheduler.close()
        self._liars.pop(index, None)
        if liar is not None:
            self._liars[index] = liar
        info = old.info()
        return self.add(index, range(info.start, info.end))

    def __enter__(self) -> LyingSwarm:
        super().__enter__()
        return self
