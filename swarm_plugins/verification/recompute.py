"""Computes again what a server was asked, and compares: for a client's check, and for a third party's replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs
from swarm_plugins.client.answers import SpanMovedError
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Codec,
    ForwardRequest,
    ForwardResponse,
    Message,
    Receipt,
)
from swarm_plugins.transport.wire import decode, encode
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.scores import Comparison, Verdict, coarsest

if TYPE_CHECKING:
    from swarm_plugins.verification.openings import Opening

M = TypeVar("M", bound=Message)
NUDGES = (1, 2, 3, 4)
"""Seeds of the nudged runs: a near tie that rounding decides falls the other way in one of them."""
_NUDGE = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""How far an input is nudged: a rounding, of float32 sixteen."""


class Asked:
    """The inputs of a request, as the server got them.

    Args:
        request: The forward, or the one that a backward belongs to.
        adapters: The adapters that it names. Copied: those in training change in place.
        kind: How the server computes.
    """

    def __init__(self, request: ForwardRequest, adapters: Sequence[LoadedAdapter], kind: Kind) -> None:
        self.kind = kind
        self.adapters = tuple(one.map(lambda tensor: tensor.detach().to("cpu", copy=True)) for one in adapters)
        self.request = request
        wire = str(request.hidden.dtype).removeprefix("torch.")
        self.precision = coarsest([kind.precision, wire, request.reply_codec])

    @property
    def is_as_sent(self) -> bool:
        """Whether the adapters are still those that the request names: a training step may have changed them."""
        return all(adapter_digest(one.spec, one.tensors) == one.digest for one in self.adapters)

    def inputs(self) -> SpanInputs:
        """Returns the inputs in the server's type."""
        request, dtype = self.request, self.kind.torch_dtype
        return SpanInputs(
            blocks=range(request.start, request.end),
            hidden=request.hidden.to(dtype),
            position_ids=request.position_ids,
            attention_mask=request.attention_mask,
            adapters=AdapterUse(adapters=self.adapters, rows=request.adapter_rows, dropout_seed=request.dropout_seed),
            prefix=tuple(tensor.to(dtype) for tensor in request.prefix),
        )

    def comparison(self, *, is_mixture: bool) -> Comparison:
        """Returns how to compare the answer to the request."""
        return Comparison(
            precision=self.precision,
            is_mixture=is_mixture,
            num_blocks=self.request.end - self.request.start,
            mask=self.request.attention_mask,
        )


def check_kind(peer: str, receipt: Receipt, version: str, kind: Kind) -> None:
    """Checks that a server has signed for the blocks that it is asked for, and believed to have.

    Raises:
        SpanMovedError: If it has not: perhaps it was started anew with other settings, which it is to be asked for.
    """
    signed = (receipt.version, receipt.dtype, receipt.quantization)
    said = (version, kind.dtype, kind.quantization)
    if signed != said:
        raise SpanMovedError(f"server {peer} signed for {signed}, it is asked for and announces {said}")


def travelled(message: M, codec: Codec) -> M:
    """Returns a copy of a message as it is on the other end of the wire."""
    return cast(M, decode(b"".join(encode(message, codec=codec))))


def packed(tensor: Tensor, codec: Codec) -> Tensor:
    """Returns a result of this machine as an answer would have brought it: what a codec loses accuses nobody."""
    return tensor if codec == "none" else travelled(ForwardResponse(hidden=tensor), codec).hidden


async def recompute_forward(asked: Asked, response: ForwardResponse, blocks: LocalBlocks) -> list[Verdict]:
    """Compares a forward's answer, inner hidden states included, with the same blocks here.

    Raises:
        SwarmError: If the blocks cannot be read or run here.
    """
    inputs = asked.inputs()

    async def run(nudge: int) -> list[Tensor]:
        outputs = await blocks.outputs(_nudged(inputs, nudge), asked.kind)
        return [packed(one, asked.request.reply_codec) for one in outputs]

    expected = await run(0)
    is_mixture = blocks.has_experts(inputs.blocks)
    return await settled(
        blocks, lambda nudged: forward_verdicts(asked, response, expected, nudged, is_mixture=is_mixture), run
    )


def forward_verdicts(
    asked: Asked,
    response: ForwardResponse,
    expected: Sequence[Tensor],
    nudged: Sequence[Sequence[Tensor]] = (),
    *,
    is_mixture: bool,
) -> list[Verdict]:
    """Compares a forward's answer with the outputs of the last blocks, ``[B, S, D]`` each."""
    claimed = [*response.hidden_states, response.hidden]
    comparison = asked.comparison(is_mixture=is_mixture)
    return _known(
        comparison.outputs(asked.request.hidden, one, *here)
        for one, here in zip(claimed, _with_nudged(expected, nudged)[-len(claimed) :], strict=True)
    )


async def recompute_backward(
    asked: Asked, request: BackwardRequest, response: BackwardResponse, blocks: LocalBlocks
) -> list[Verdict]:
    """Compares a backward's answer with the gradients of the same blocks here.

    Raises:
        SwarmError: If the blocks cannot be read or run here.
    """
    if request.grad_hidden_states or request.grad_router_logits:
        return []
    given = asked.inputs()

    async def run(nudge: int) -> list[Tensor]:
        inputs = _as_leaves(_nudged(given, nudge))
        wanted = [
            inputs.hidden,
            *(inputs.adapters.tensors if request.needs_adapters else ()),
            *(inputs.prefix if request.needs_prefix else ()),
        ]
        found = await blocks.gradients(inputs, asked.kind, request.grad_hidden, wanted)
        return [packed(one, request.reply_codec) for one in found]

    expected = await run(0)
    is_mixture = blocks.has_experts(given.blocks)
    return await settled(
        blocks, lambda nudged: backward_verdicts(asked, response, expected, nudged, is_mixture=is_mixture), run
    )


def backward_verdicts(
    asked: Asked,
    response: BackwardResponse,
    expected: Sequence[Tensor],
    nudged: Sequence[Sequence[Tensor]] = (),
    *,
    is_mixture: bool,
) -> list[Verdict]:
    """Compares a backward's answer with gradients: of the hidden states, then of what the answer has of the others."""
    comparison = asked.comparison(is_mixture=is_mixture)
    found = (*response.grad_adapters, *response.grad_prefix)
    verdicts = []
    if response.grad_hidden is not None:
        verdicts.append(comparison.gradients(response.grad_hidden, expected[0], [one[0] for one in nudged]))
    if found:
        rest = [one[1:] for one in nudged]
        verdicts.append(comparison.parameters(found, expected[1:], rest, hidden=expected[0]))
    return _known(verdicts)


async def recompute_opened(
    asked: Asked, response: ForwardResponse | BackwardResponse, opening: Opening, blocks: LocalBlocks
) -> list[Verdict]:
    """Compares what a server has opened of a forward or backward, block by block, with the same blocks here.

    Raises:
        SwarmError: If a block cannot be read or run here.
    """
    verdicts = []
    for block in opening.blocks:
        one = _OpenedBlock(asked, opening, block, blocks)
        if isinstance(response, ForwardResponse):
            verdicts += await one.output_verdicts(response)
        else:
            verdicts += await one.output_verdicts(None)
            verdicts += await one.gradient_verdicts(response)
    return verdicts


class _OpenedBlock:
    """One block of an opening, computed here from the state before it.

    States between blocks come from one run of the server, its answer from another: they differ by what two honest
    computations of the whole span differ by, and are compared as such.
    """

    def __init__(self, asked: Asked, opening: Opening, block: int, blocks: LocalBlocks) -> None:
        self._asked = asked
        self._opening = opening
        self._blocks = blocks
        whole = asked.inputs()
        self._index = block - whole.blocks.start
        self._last = len(whole.blocks) - 1
        before = opening.states[self._index - 1] if self._index else whole.hidden
        self._whole = whole
        self._inputs = whole.take_blocks(range(block, block + 1), before)

    async def output_verdicts(self, response: ForwardResponse | None) -> list[Verdict]:
        """Compares the state behind the block, and what an answer says about it."""
        run, index, verdicts = self._outputs, self._index, []
        expected = await run(0)
        pairs: list[tuple[Comparison, Tensor, Tensor, Codec]] = []
        if index < self._last:
            comparison = self._comparison(is_answer=False)
            pairs.append((comparison, self._inputs.hidden, self._opening.states[index], "none"))
        if response is not None:
            claimed = [*response.hidden_states, response.hidden]
            # An answer has the last states only: of all blocks, or of one.
            at = index - self._last + len(claimed) - 1
            if at >= 0:
                codec = self._asked.request.reply_codec
                pairs.append((self._comparison(is_answer=True), self._whole.hidden, claimed[at], codec))
        for comparison, hidden, found, codec in pairs:
            tokens = found.shape[1]  # of a session, only the last ones were answered

            def compare(
                nudged: Sequence[Sequence[Tensor]],
                comparison: Comparison = comparison,
                hidden: Tensor = hidden,
                found: Tensor = found,
                tokens: int = tokens,
                codec: Codec = codec,
            ) -> list[Verdict]:
                whole = (expected[0], *(one[0] for one in nudged))
                here, *moved = (packed(each[:, -tokens:], codec) for each in whole)
                return _known([comparison.outputs(hidden[:, -tokens:], found, here, moved)])

            verdicts += await settled(self._blocks, compare, run)
        return verdicts

    async def gradient_verdicts(self, response: BackwardResponse) -> list[Verdict]:
        """Compares the gradients of the block's input, of the adapters on it, and of its prefix."""
        asked, opening, index = self._asked, self._opening, self._index
        on_block = [
            number
            for number, users in enumerate(_blocks_of(asked.adapters))
            # What several blocks share has the sum of their gradients, which no single block shows.
            if len(users) == 1 and users[0] in self._inputs.blocks and response.grad_adapters
        ]
        grad = opening.request.grad if index == self._last else opening.states[self._last + index]
        if grad is None:
            return []
        prefix = response.grad_prefix[2 * index : 2 * index + 2]

        async def run(nudge: int) -> list[Tensor]:
            leaves = _as_leaves(_nudged(self._inputs, nudge))
            adapters = [leaves.adapters.tensors[number] for number in on_block]
            wanted = [leaves.hidden, *adapters, *(leaves.prefix if prefix else ())]
            first, *rest = await self._blocks.gradients(leaves, asked.kind, grad, wanted)
            codec = asked.request.reply_codec
            return [first if index else packed(first, codec), *(packed(one, codec) for one in rest)]

        expected = await run(0)
        found = opening.states[self._last + index - 1] if index else response.grad_hidden
        claimed = [*(response.grad_adapters[number] for number in on_block), *prefix]
        inner, answer = (self._comparison(is_answer=is_answer) for is_answer in (False, True))

        def compare(nudged: Sequence[Sequence[Tensor]]) -> list[Verdict]:
            verdicts = []
            if found is not None:
                comparison = inner if index else answer
                verdicts.append(comparison.gradients(found, expected[0], [one[0] for one in nudged]))
            if claimed:
                rest = [one[1:] for one in nudged]
                verdicts.append(answer.parameters(claimed, expected[1:], rest, hidden=expected[0]))
            return _known(verdicts)

        return await settled(self._blocks, compare, run)

    async def _outputs(self, nudge: int) -> list[Tensor]:
        return await self._blocks.outputs(_nudged(self._inputs, nudge), self._asked.kind)

    def _comparison(self, *, is_answer: bool) -> Comparison:
        """Returns how to compare with the answer, which has travelled, or with a state as the server has it."""
        is_mixture = self._blocks.has_experts(self._whole.blocks if is_answer else self._inputs.blocks)
        if is_answer:
            return self._asked.comparison(is_mixture=is_mixture)
        # The first block's input has travelled, but both sides begin with what arrived.
        return Comparison(precision=self._asked.kind.precision, is_mixture=is_mixture, mask=self._inputs.attention_mask)


async def settled(
    blocks: LocalBlocks,
    compare: Callable[[Sequence[Sequence[Tensor]]], list[Verdict]],
    run: Callable[[int], Awaitable[Sequence[Tensor]]],
) -> list[Verdict]:
    """Returns the verdicts; before they accuse anybody, the blocks run again from nudged inputs.

    Raises:
        SwarmError: If the checkpoint has changed meanwhile, or the blocks cannot be run.
    """
    verdicts = compare([])
    if not any(verdict.is_wrong for verdict in verdicts):
        return verdicts
    await blocks.check_unchanged()
    return compare([await run(nudge) for nudge in NUDGES])


def nudged_hidden(hidden: Tensor, nudge: int) -> Tensor:
    """Returns hidden states with every element off by a rounding, up or down by chance; 0: as they are."""
    if not nudge:
        return hidden
    signs = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(nudge)).sub_(0.5).sign_()
    return (hidden.float() * (1 + _NUDGE[hidden.dtype] * signs)).to(hidden.dtype)


def _nudged(inputs: SpanInputs, nudge: int) -> SpanInputs:
    return replace(inputs, hidden=nudged_hidden(inputs.hidden, nudge))


def _with_nudged(expected: Sequence[Tensor], nudged: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, list[Tensor]]]:
    return [(here, [one[index] for one in nudged]) for index, here in enumerate(expected)]


def _known(verdicts: Iterable[Verdict | None]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict is not None]


def _as_leaves(inputs: SpanInputs) -> SpanInputs:
    """Returns inputs whose floating tensors are leaves of a graph."""
    leaves = inputs.map(lambda tensor: _leaf(tensor) if tensor.is_floating_point() else tensor)
    return replace(leaves, adapters=inputs.adapters.map(_leaf))


def _blocks_of(adapters: Sequence[LoadedAdapter]) -> list[tuple[int, ...]]:
    """Returns the blocks that use each tensor of each adapter, in order."""
    return [blocks for one in adapters for blocks in one.spec.tensor_blocks()]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
