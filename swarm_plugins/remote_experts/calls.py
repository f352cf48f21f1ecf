"""One pass through the experts of a block at other peers: a message per holder, all at once, repaired when one fails.

Letters: ``T`` tokens, ``N`` rows (one for each choice of an expert by a token, sorted by expert), ``D`` width.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from swarm_plugins.book.record import Forgiven, Lagged
from swarm_plugins.client.answers import check_tensor
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.client.calls.direct import Direct
from swarm_plugins.client.calls.hedging import first_answer
from swarm_plugins.client.calls.retries import Retries
from swarm_plugins.errors import SwarmError
from swarm_plugins.remote_experts.checks import HolderGuard
from swarm_plugins.remote_experts.holders import HolderView
from swarm_plugins.routing import Share
from swarm_plugins.transport.limits import MAX_MESSAGE_BYTES
from swarm_plugins.transport.messages import ExpertsRequest, ExpertsResponse

log = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_SPARES = 2
"""Replicas asked for one late holder, one after the other."""
_MAX_ON_THE_WAY = 4
"""Messages that one holder has at a time: a holder chooses how many a batch is cut into."""


@dataclass(frozen=True)
class ExpertRows:
    """The rows that a block's experts have to compute, on the CPU."""

    block: int
    hidden: Tensor
    """``[T, D]``."""
    tokens: Tensor
    """``[N]``: the token of each row."""
    spans: Mapping[int, slice]
    """Rows of each expert."""
    grad: Tensor | None = None
    """``[N, D]``: gradient of the experts' outputs, if gradients of the rows are wanted."""

    def num_rows(self, expert: int) -> int:
        """Returns the number of rows of an expert."""
        span = self.spans[expert]
        return int(span.stop - span.start)


class _Chunk(NamedTuple):
    """Rows of some experts that travel in one message."""

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    places: Tensor
    """``[n]``: positions among all rows."""


class _Answered(NamedTuple):
    """A message to a holder, and its answer."""

    chunk: _Chunk
    call: ExpertsCall
    answer: Answer[ExpertsRequest, ExpertsResponse]


class ExpertsCall(Call[ExpertsRequest, ExpertsResponse]):
    """A message to a holder: rows of some of its experts.

    Args:
        view: Knows the holders.
        rows: All rows of the pass.
        share: The holder and its experts.
        chunk: Those in this message.
    """

    rpc = "rpc_experts"
    kind = ExpertsResponse

    def __init__(self, view: HolderView, rows: ExpertRows, share: Share, chunk: _Chunk) -> None:
        super().__init__(range(rows.block, rows.block + 1), len(chunk.places))
        tokens, of_token = torch.unique(rows.tokens[chunk.places], return_inverse=True)
        self._view = view
        self._share = share
        self._chunk = chunk
        self._hidden = rows.hidden[tokens]
        self._of_token = of_token.to(torch.int32)
        self._grad = None if rows.grad is None else rows.grad[chunk.places]

    def input(self) -> Tensor:
        """Returns the hidden states."""
        return self._hidden

    def request(self, peers: Sequence[str]) -> ExpertsRequest:
        """Returns the message to the first of some peers."""
        return ExpertsRequest(
            version=self._view.version.key,
            block=self.blocks.start,
            slice=self._share.holder.part,
            experts=self._chunk.experts,
            counts=self._chunk.counts,
            hidden=self._hidden,
            rows=self._of_token,
            grad=self._grad,
            reply_codec=self._view.codecs.between(self._hidden, *peers),
        )

    def receive(self, answer: Answer[ExpertsRequest, ExpertsResponse]) -> None:
        """Checks the shape of an answer."""
        like = self._hidden[:1, :1].expand(self.tokens, self._hidden.shape[1])
        check_tensor(answer.response.rows, like, answer.peer, "the rows of its experts")


class Holders:
    """Asks the holders of experts; all methods run on one event loop.

    Args:
        view: Knows the holders, and how they are asked.
        on_answer: Called with the holder and the number of rows of each answer that has been checked.
    """

    def __init__(
        self,
        view: HolderView,
        on_answer: Callable[[str, int], None] = lambda peer, rows: None,
    ) -> None:
        self.peers = view.peers
        self.view = view
        self.guard: HolderGuard | None = None
        """Computes some answers again. None: all are believed."""
        self._caller = Direct(view.peers)
        if view.config.wants_checks(view.initial_peers):
            self.guard = HolderGuard(view)
            view.excludes = self.guard.is_excluded
        self._on_answer = on_answer

    async def run(self, rows: ExpertRows) -> Tensor:
        """Returns the outputs of the experts (or gradients of their rows), ``[N, D]``; zeros outside all spans.

        A holder that fails, is late or answers nonsense is left out, and others compute its rows. Parts of an expert
        are added in their order, so that the order of arrival changes no bit.

        Raises:
            MissingExpertsError: If some expert has no living holder.
            SwarmError: If a holder refuses the request, or too many holders failed.
        """
        retries = Retries(self.view, may_pause=self.view.may_pause)
        found: dict[tuple[int, tuple[int, int]], Tensor] = {}
        left = {expert: rows.num_rows(expert) for expert in rows.spans}
        plan: dict[int, int] = {}
        while left:
            share = functools.partial(self._shared, rows.block, dict(left), retries)
            shares = await retries.plan(share)
            plan |= {expert: _part_of(share)[1] for share in shares for expert in share.experts}
            wanted = [
                Share(share.holder, experts)
                for share in shares
                if (experts := tuple(one for one in share.experts if (one, _part_of(share)) not in found))
            ]
            await self._ask_all(rows, wanted, found, retries)
            left = {
                expert: count
                for expert, count in left.items()
                if not all((expert, (index, plan[expert])) in found for index in range(plan[expert]))
            }
        retries.succeeded()
        return _joined(rows, found, plan)

    async def _shared(
        self, block: int, loads: Mapping[int, int], retries: Retries, without: Collection[str]
    ) -> list[Share]:
        """Returns who computes what is left; raises MissingExpertsError if some expert has no living holder."""
        return await self.view.shares(block, loads, without=without, failure=retries.last)

    async def _ask_all(
        self,
        rows: ExpertRows,
        shares: list[Share],
        found: dict[tuple[int, tuple[int, int]], Tensor],
        retries: Retries,
    ) -> None:
        answers = await asyncio.gather(
            *(self._ask(rows, share, retries.excluded) for share in shares), return_exceptions=True
        )
        failures: list[tuple[str, SwarmError]] = []
        for share, answer in zip(shares, answers, strict=True):
            if isinstance(answer, SwarmError):
                failures.append((share.holder.peer, answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.update({(expert, _part_of(share)): tensor for expert, tensor in answer.items()})
        for peer, error in failures:
            retries.note(peer, error)

    async def _ask(self, rows: ExpertRows, share: Share, without: Collection[str]) -> dict[int, Tensor]:
        """Returns a holder's answer by expert; while it is late, its replicas are asked too, and the first counts."""
        loads = {expert: rows.num_rows(expert) for expert in share.experts}
        rules = self.peers.book.rules
        late_s = rules.holder_late_s + rules.holder_late_factor * share.holder.answer_s(sum(loads.values()))
        asked = {share.holder.peer, *without}

        def ask_replicas() -> Coroutine[Any, Any, list[_Answered]] | None:
            others = self.view.replicas(rows.block, share, loads, asked)
            if not others:
                return None
            log.info("holder %s has not answered for %.2f s: a replica is asked", share.holder.peer, late_s)
            asked.update(other.holder.peer for other in others)
            return self._ask_holders(rows, others)

        while True:
            started = time.perf_counter()
            answers = await first_answer(self._ask_holder(rows, share), ask_replicas, late_s=late_s, most=_MAX_SPARES)
            late_by_s = time.perf_counter() - started - share.holder.answer_s(sum(loads.values()))
            self.peers.book.observe(share.holder.peer, Lagged(late_by_s))
            # Only now: a check takes time here, which must not make its holder look late.
            found = await self._fault_in(answers)
            if found is None:
                return _by_expert(share, answers)
            peer, error = found
            if peer == share.holder.peer:
                raise error
            self.view.ban(peer, error)

    async def _ask_holders(self, rows: ExpertRows, shares: Sequence[Share]) -> list[_Answered]:
        return [answer for answers in await _all(self._ask_holder(rows, one) for one in shares) for answer in answers]

    async def _ask_holder(self, rows: ExpertRows, share: Share) -> list[_Answered]:
        """Returns a holder's answers."""
        width = rows.hidden.shape[1]
        limit = max(1, MAX_MESSAGE_BYTES // (3 * width * rows.hidden.element_size()))
        limit = min(limit, self.view.max_batch_tokens(share.holder.peer) or limit)
        num_rows = sum(rows.num_rows(expert) for expert in share.experts)
        chunks = _chunks(rows, share, limit)
        found: list[_Answered] = []

        async def ask_next() -> None:
            for chunk in chunks:
                try:
                    call = ExpertsCall(self.view, rows, share, chunk)
                    found.append(_Answered(chunk, call, await self._caller.ask(call, share.holder.peer)))
                except BaseException:
                    chunks.close()  # no further message to this holder
                    raise

        await _all(ask_next() for _ in range(min(_MAX_ON_THE_WAY, math.ceil(num_rows / limit))))
        return found

    async def _fault_in(self, answers: Sequence[_Answered]) -> tuple[str, SwarmError] | None:
        """Checks answers; returns the peer and the error of the first one that is wrong, if any."""
        for _, call, answer in answers:
            if self.guard is not None:
                try:
                    await self.guard.check(call, answer, self.view)
                except SwarmError as exc:
                    return answer.peer, exc
            self._on_answer(answer.peer, answer.response.rows.shape[0])
        for peer in {answer.peer for _, _, answer in answers}:
            self.peers.book.observe(peer, Forgiven())
        return None

    async def close(self) -> None:
        """Ends checks, look-ups and streams. Idempotent."""
        if self.guard is not None:
            await self.guard.close()
        await self.view.close()
        await self.peers.close()


async def _all(requests: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all, and raises the first error only when none is still running."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def _part_of(share: Share) -> tuple[int, int]:
    return share.holder.part or (0, 1)


def _by_expert(share: Share, answers: Sequence[_Answered]) -> dict[int, Tensor]:
    """Returns the rows of each expert of a share, in their order."""
    parts: dict[int, list[Tensor]] = {expert: [] for expert in share.experts}
    for chunk, _, answer in sorted(answers, key=lambda one: int(one.chunk.places[0])):
        for expert, part in zip(chunk.experts, answer.response.rows.split(list(chunk.counts)), strict=True):
            parts[expert].append(part)
    return {expert: some[0] if len(some) == 1 else torch.cat(some) for expert, some in parts.items()}


def _chunks(rows: ExpertRows, share: Share, limit: int) -> Generator[_Chunk]:
    """Cuts the rows of a share into messages of at most ``limit`` rows."""
    pieces: list[tuple[int, int, int]] = []
    room = limit
    for expert in share.experts:
        span = rows.spans[expert]
        start = span.start
        while start < span.stop:
            end = min(span.stop, start + room)
            pieces.append((expert, start, end))
            room -= end - start
            start = end
            if not room:
                yield _chunk(pieces)
                pieces, room = [], limit
    if pieces:
        yield _chunk(pieces)


def _chunk(pieces: list[tuple[int, int, int]]) -> _Chunk:
    return _Chunk(
        tuple(expert for expert, _, _ in pieces),
        tuple(end - start for _, start, end in pieces),
        torch.cat([torch.arange(start, end) for _, start, end in pieces]),
    )


def _joined(rows: ExpertRows, found: Mapping[tuple[int, tuple[int, int]], Tensor], plan: Mapping[int, int]) -> Tensor:
    """Adds the parts of each expert and puts its rows in their places."""
    result = rows.hidden.new_zeros(rows.tokens.shape[0], rows.hidden.shape[1])
    for expert, span in rows.spans.items():
        count = plan[expert]
        for index in range(count):
            part = found[expert, (index, count)]
            if index:
                result[span] += part
            else:
                result[span] = part
    return result
