"""Computes again what a server was asked, and compares: for a client's check, and for a third party's replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarm_plugins.block_io import LoadedAdapter, SpanInputs
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import BackwardResponse, Codec, ForwardResponse
from swarm_plugins.verification.claims import Claim, known, travelled
from swarm_plugins.verification.local_blocks import LocalBlocks
from swarm_plugins.verification.scores import Comparison, Verdict

if TYPE_CHECKING:
    from swarm_plugins.verification.openings import Opening

NUDGES = (1, 2, 3, 4)
"""Seeds of the nudged runs: a near tie that rounding decides falls the other way in one of them."""
_NUDGE = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""How far an input is nudged: a rounding, of float32 sixteen."""


def packed(tensor: Tensor, codec: Codec) -> Tensor:
    """Returns a result of this machine as an answer would have brought it: what a codec loses accuses nobody."""
    return tensor if codec == "none" else travelled(ForwardResponse(hidden=tensor), codec).hidden


def packed_apart(results: Tensor, answers: Sequence[tuple[Tensor, Codec]]) -> Tensor:
    """Packs results, ``[B, S, D]``, step by step, as the answers were."""
    parts = results.split([answer.shape[1] for answer, _ in answers], dim=1)
    return torch.cat([packed(part, codec) for part, (_, codec) in zip(parts, answers, strict=True)], dim=1)


async def recompute(claim: Claim, opening: Opening | None, blocks: LocalBlocks) -> list[Verdict]:
    """Compares an answer with the same blocks here: with all of them, or with those that the server has opened.

    Raises:
        SwarmError: If the blocks cannot be read or run here.
    """
    if opening is None:
        return await _recompute_all(claim, blocks)
    if opening.tied != await blocks.tied_inside(claim.blocks):
        raise ProtocolError("other blocks only run together in what was opened than the model's config says")
    verdicts = []
    chosen = [index for index, piece in enumerate(opening.pieces) if piece.start in opening.blocks]
    for index in chosen:
        one = _OpenedPiece(claim, opening, index, blocks)
        verdicts += await one.output_verdicts()
        if claim.backward is not None:
            verdicts += await one.gradient_verdicts(claim.backward[1])
    return verdicts


async def _recompute_all(claim: Claim, blocks: LocalBlocks) -> list[Verdict]:
    request = None if claim.backward is None else claim.backward[0]
    if request is not None and (request.grad_hidden_states or request.grad_router_logits):
        return []
    given = claim.inputs()

    async def run(nudge: int) -> list[Tensor]:
        inputs = _nudged(given, nudge)
        if request is None:
            found = await blocks.outputs(inputs, claim.kind)
        else:
            inputs = _as_leaves(inputs)
            wanted = [
                inputs.hidden,
                *(inputs.adapters.tensors if request.needs_adapters else ()),
                *(inputs.prefix if request.needs_prefix else ()),
            ]
            found = await blocks.gradients(inputs, claim.kind, request.grad_hidden, wanted)
        return [packed(one, claim.codec) for one in found]

    expected = await run(0)
    is_mixture = blocks.has_experts(claim.blocks)
    return await settled(blocks, lambda nudged: claim.verdicts(expected, nudged, is_mixture=is_mixture), run)


class _OpenedPiece:
    """One piece of an opening, most often a block, computed here from the state before it.

    States between blocks come from one run of the server, its answer from another: they differ by what two honest
    computations of the whole span differ by, and are compared as such.
    """

    def __init__(self, claim: Claim, opening: Opening, index: int, blocks: LocalBlocks) -> None:
        self._claim = claim
        self._opening = opening
        self._blocks = blocks
        whole = claim.inputs()
        self._index = index
        self._last = len(opening.pieces) - 1
        before = opening.states[self._index - 1] if self._index else whole.hidden
        self._whole = whole
        self._inputs = whole.take_blocks(opening.pieces[index], before)

    async def output_verdicts(self) -> list[Verdict]:
        """Compares the state behind the piece, and what an answer to the forward says about it."""
        index, verdicts = self._index, []
        expected = await self._outputs(0)
        pairs: list[tuple[Comparison, Tensor, Sequence[tuple[Tensor, Codec]]]] = []
        if index < self._last:
            comparison = self._comparison(is_answer=False)
            pairs.append((comparison, self._inputs.hidden, [(self._opening.states[index], "none")]))
        if self._claim.backward is None:
            claimed = self._claim.results()
            # An answer has the last states only: of all blocks, or of one.
            at = self._inputs.blocks.stop - self._whole.blocks.stop + len(claimed) - 1
            if at >= 0:
                parts = self._claim.steps or ((claimed[at], self._claim.codec),)
                pairs.append((self._comparison(is_answer=True), self._whole.hidden, parts))
        for comparison, hidden, answers in pairs:

            def compare(
                nudged: Sequence[Sequence[Tensor]],
                comparison: Comparison = comparison,
                hidden: Tensor = hidden,
                answers: Sequence[tuple[Tensor, Codec]] = answers,
            ) -> list[Verdict]:
                found = torch.cat([answer for answer, _ in answers], dim=1)
                tokens = found.shape[1]  # of a session, only the last ones are compared
                whole = (expected[-1], *(one[-1] for one in nudged))
                here, *moved = (packed_apart(each[:, -tokens:], answers) for each in whole)
                return known([comparison.outputs(hidden[:, -tokens:], found, here, moved)])

            verdicts += await settled(self._blocks, compare, self._outputs)
        return verdicts

    async def gradient_verdicts(self, response: BackwardResponse) -> list[Verdict]:
        """Compares the gradients of the piece's input, of the adapters on it, and of its prefix."""
        claim, opening, index = self._claim, self._opening, self._index
        on_block = [
            number
            for number, users in enumerate(_blocks_of(claim.adapters))
            # What several pieces share has the sum of their gradients, which none of them shows.
            if users and all(user in self._inputs.blocks for user in users) and response.grad_adapters
        ]
        grad = opening.request.grad if index == self._last else opening.states[self._last + index]
        if grad is None:
            return []
        piece, start = self._inputs.blocks, self._whole.blocks.start
        prefix = response.grad_prefix[2 * (piece.start - start) : 2 * (piece.stop - start)]

        async def run(nudge: int) -> list[Tensor]:
            leaves = _as_leaves(_nudged(self._inputs, nudge))
            adapters = [leaves.adapters.tensors[number] for number in on_block]
            wanted = [leaves.hidden, *adapters, *(leaves.prefix if prefix else ())]
            first, *rest = await self._blocks.gradients(leaves, claim.kind, grad, wanted)
            codec = claim.forward.reply_codec
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
            return known(verdicts)

        return await settled(self._blocks, compare, run)

    async def _outputs(self, nudge: int) -> list[Tensor]:
        return await self._blocks.outputs(_nudged(self._inputs, nudge), self._claim.kind)

    def _comparison(self, *, is_answer: bool) -> Comparison:
        """Returns how to compare with the answer, which has travelled, or with a state as the server has it."""
        is_mixture = self._blocks.has_experts(self._whole.blocks if is_answer else self._inputs.blocks)
        if is_answer:
            return self._claim.comparison(is_mixture=is_mixture)
        # The first block's input has travelled, but both sides begin with what arrived.
        precision = self._claim.kind.precision
        return Comparison(precision=precision, is_mixture=is_mixture, mask=self._inputs.attention_mask)


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


def _as_leaves(inputs: SpanInputs) -> SpanInputs:
    """Returns inputs whose floating tensors are leaves of a graph."""
    leaves = inputs.map(lambda tensor: _leaf(tensor) if tensor.is_floating_point() else tensor)
    return replace(leaves, adapters=inputs.adapters.map(_leaf))


def _blocks_of(adapters: Sequence[LoadedAdapter]) -> list[tuple[int, ...]]:
    """Returns the blocks that use each tensor of each adapter, in order."""
    return [blocks for one in adapters for blocks in one.spec.tensor_blocks()]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
