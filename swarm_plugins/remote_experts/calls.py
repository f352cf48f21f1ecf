"""One pass through the experts of a block at other peers: a message per holder, all at once, repaired when one fails.

Letters: ``T`` tokens, ``N`` rows (one for each choice of an expert by a token, sorted by expert), ``D`` width.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from swarm_plugins.client.answers import check_tensor
from swarm_plugins.client.hedging import first_answer
from swarm_plugins.client.peers import Peers
from swarm_plugins.errors import SwarmError
from swarm_plugins.remote_experts.holders import HolderRetries, HolderView
from swarm_plugins.routing import Share
from swarm_plugins.transport.limits import DEFAULT_LIMITS
from swarm_plugins.transport.messages import ExpertsRequest, ExpertsResponse

if TYPE_CHECKING:
    from swarm_plugins.remote_experts.checks import HolderChecks

log = logging.getLogger(__name__)

T = TypeVar("T")
_LATE_S = 0.25
_LATE_FACTOR = 4.0
"""A holder is late after this many times the expected seconds and `_LATE_S`: a replica is asked too."""
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


class Holders:
    """Asks the holders of experts; all methods run on one event loop.

    Args:
        peers: Sends the requests.
        view: Knows the holders.
        on_answer: Called with the holder and the number of rows of each answer that has been checked.
        checks: Computes some answers again. None: all are believed.
    """

    def __init__(
        self,
        peers: Peers,
        view: HolderView,
        on_answer: Callable[[str, int], None] = lambda peer, rows: None,
        checks: HolderChecks | None = None,
    ) -> None:
        self.peers = peers
        self.view = view
        self.checks = checks
        if checks is not None:
            view.observer = checks
        self._on_answer = on_answer

    async def run(self, rows: ExpertRows) -> Tensor:
        """Returns the outputs of the experts (or gradients of their rows), ``[N, D]``; zeros outside all spans.

        A holder that fails, is late or answers nonsense is left out, and others compute its rows. Parts of an expert
        are added in their order, so that the order of arrival changes no bit.

        Raises:
            MissingExpertsError: If some expert has no living holder.
            SwarmError: If a holder refuses the request, or too many holders failed.
        """
        retries = HolderRetries(self.view)
        found: dict[tuple[int, tuple[int, int]], Tensor] = {}
        left = {expert: rows.num_rows(expert) for expert in rows.spans}
        plan: dict[int, int] = {}
        while left:
            shares = await retries.shares(rows.block, left)
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

    async def _ask_all(
        self,
        rows: ExpertRows,
        shares: list[Share],
        found: dict[tuple[int, tuple[int, int]], Tensor],
        retries: HolderRetries,
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
        late_s = _LATE_S + _LATE_FACTOR * share.holder.answer_s(sum(loads.values()))
        started = time.perf_counter()
        asked = {share.holder.peer, *without}

        def ask_replicas() -> Coroutine[Any, Any, dict[int, Tensor]] | None:
            others = self.view.replicas(rows.block, share, loads, asked)
            if not others:
                return None
            log.info("holder %s has not answered for %.2f s: a replica is asked", share.holder.peer, late_s)
            asked.update(other.holder.peer for other in others)
            return self._ask_holders(rows, others)

        request = self._ask_holder(rows, share)
        answer = await first_answer(request, ask_replicas, late_s=late_s, most=_MAX_SPARES)
        self.view.observe(share.holder, sum(loads.values()), time.perf_counter() - started)
        return answer

    async def _ask_holders(self, rows: ExpertRows, shares: Sequence[Share]) -> dict[int, Tensor]:
        answers = await _all(self._ask_holder(rows, share) for share in shares)
        return {expert: part for answer in answers for expert, part in answer.items()}

    async def _ask_holder(self, rows: ExpertRows, share: Share) -> dict[int, Tensor]:
        """Returns a holder's answer by expert."""
        width = rows.hidden.shape[1]
        limit = max(1, DEFAULT_LIMITS.max_message_bytes // (3 * width * rows.hidden.element_size()))
        limit = min(limit, self.view.max_rows(share.holder.peer) or limit)
        num_rows = sum(rows.num_rows(expert) for expert in share.experts)
        chunks = _chunks(rows, share, limit)
        found: list[tuple[_Chunk, Tensor]] = []

        async def ask_next() -> None:
            for chunk in chunks:
                try:
                    found.append((chunk, await self._ask_chunk(rows, share, chunk)))
                except BaseException:
                    chunks.close()  # no further message to this holder
                    raise

        await _all(ask_next() for _ in range(min(_MAX_ON_THE_WAY, math.ceil(num_rows / limit))))
        parts: dict[int, list[Tensor]] = {expert: [] for expert in share.experts}
        for chunk, answer in sorted(found, key=lambda pair: int(pair[0].places[0])):
            for expert, part in zip(chunk.experts, answer.split(list(chunk.counts)), strict=True):
                parts[expert].append(part)
        self.view.bans.forgive(share.holder.peer)
        return {expert: some[0] if len(some) == 1 else torch.cat(some) for expert, some in parts.items()}

    async def _ask_chunk(self, rows: ExpertRows, share: Share, chunk: _Chunk) -> Tensor:
        peer = share.holder.peer
        tokens, of_token = torch.unique(rows.tokens[chunk.places], return_inverse=True)
        hidden = rows.hidden[tokens]
        request = ExpertsRequest(
            version=self.view.version.key,
            block=rows.block,
            slice=share.holder.part,
            experts=chunk.experts,
            counts=chunk.counts,
            hidden=hidden,
            rows=of_token.to(torch.int32),
            grad=None if rows.grad is None else rows.grad[chunk.places],
            reply_codec=self.view.codecs.between(hidden, peer),
        )
        answer = await self.peers.request(peer, "rpc_experts", request, ExpertsResponse)
        like = rows.hidden[:1, :1].expand(chunk.places.shape[0], rows.hidden.shape[1])
        check_tensor(answer.rows, like, peer, "the rows of its experts")
        if self.checks is not None:
            await self.checks.answered(self.peers, peer, self.view.known.infos.get(peer), request, answer.rows)
        self._on_answer(peer, answer.rows.shape[0])
        return answer.rows


async def _all(requests: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all, and raises the first error only when none is still running."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)


def _part_of(share: Share) -> tuple[int, int]:
    return share.holder.part or (0, 1)


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
