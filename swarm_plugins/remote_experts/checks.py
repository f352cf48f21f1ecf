"""Spot checks of holders' answers: one expert, on some of its rows, is computed again here.

A holder has no way to know which expert and which rows are compared.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client.answers import SpanMovedError
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.errors import SwarmError, UnsupportedError, one_line
from swarm_plugins.offload.held import load_expert
from swarm_plugins.transport.messages import ExpertsRequest
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.checker import Checker, CheckingGuard, Finding, Server, checked_as
from swarm_plugins.verification.local_blocks import Kind, UncheckableError
from swarm_plugins.verification.quarantine import user_quarantine
from swarm_plugins.verification.recompute import NUDGES, nudged_hidden, packed
from swarm_plugins.verification.scores import Comparison, Verdict, coarsest

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.server_view import ServerView
    from swarm_plugins.remote_experts.holders import HolderView

_MAX_ROWS = 64
"""Rows of the expert that are computed again."""


class _Sample(NamedTuple):
    """Some rows of one expert, and the answer to them."""

    expert: int
    places: Tensor
    """``[n]``: positions among the request's rows."""
    rows: Tensor
    """``[n, D]``."""
    grad: Tensor | None
    """``[n, D]``."""


class HolderGuard(CheckingGuard):
    """Examines answers of the holders that one owner asks; leaves out those in quarantine; see `Guard`.

    Args:
        view: Names the model, whose version holders have; asks a holder what it serves, before it is accused.
    """

    def __init__(self, view: HolderView) -> None:
        super().__init__(Checker(view.peers.book, user_quarantine(), model=str(view.version)))
        self._view = view
        self._checkpoint: Checkpoint | None = None
        self._lock = threading.Lock()
        """One expert is in memory at a time."""

    async def examine(self, call: Call[Any, Any], answer: Answer[Any, Any], info: ServerInfo, view: ServerView) -> None:
        """Checks an answer, or not; see `CheckingGuard`."""
        what = "experts" if answer.request.grad is None else "gradients of experts"
        server = checked_as(answer.peer, what, info)
        when = self.checker.when(server)
        if when == "never":
            return
        # The answer is its caller's from here on; the request's tensors are the owner's.
        rows, sample = answer.response.rows.clone(), _sample(answer.request)
        await self.checker.run(server, when, functools.partial(self._found, server, info, answer.request, rows, sample))

    async def _found(
        self, server: Server, info: ServerInfo, request: ExpertsRequest, rows: Tensor, sample: _Sample
    ) -> Finding:
        kind = Kind(info.dtype, info.quantization)
        try:
            verdict = await asyncio.to_thread(lambda: self._verdict(kind, request, rows, sample))
        except (SwarmError, MemoryError, RuntimeError) as exc:
            raise UncheckableError(one_line(exc)) from exc
        if verdict.is_wrong:
            # Its answers are not signed: one that was started anew computes otherwise than it is believed to.
            now = (await self._view.peers.info(server.peer)).of(self._view.version.key)
            if now is None or checked_as(server.peer, server.what, now) != server:
                raise SpanMovedError(f"holder {server.peer} was started anew, with other experts or in another type")
        return Finding(verdicts=[verdict], where=f"expert {sample.expert} of block {request.block}")

    def _verdict(self, kind: Kind, request: ExpertsRequest, answer: Tensor, sample: _Sample) -> Verdict:
        """Compares rows with the same expert here; before a holder is accused, again from nudged rows."""
        with self._lock:
            held = load_expert(
                self._opened(),
                request.block,
                sample.expert,
                part=request.slice,
                dtype=kind.torch_dtype,
                quantization=kind.weights,
            )
            try:
                grad = None if sample.grad is None else sample.grad.to(kind.torch_dtype)
                spans = {sample.expert: slice(0, len(sample.rows))}

                def run(nudge: int) -> Tensor:
                    rows = nudged_hidden(sample.rows.to(kind.torch_dtype), nudge)
                    found = answer.clone()
                    found[sample.places] = held.run(request.block, rows, spans, grad).to(answer.dtype)
                    # As it would have arrived, with the same neighbors.
                    return packed(found, request.reply_codec)[sample.places][None]

                wire = str(request.hidden.dtype).removeprefix("torch.")
                comparison = Comparison(
                    precision=coarsest([kind.precision, wire, request.reply_codec]), is_mixture=False
                )
                return self._compared(comparison, answer[sample.places][None], run, is_forward=grad is None)
            finally:
                held.close()

    def _compared(
        self, comparison: Comparison, found: Tensor, run: Callable[[int], Tensor], *, is_forward: bool
    ) -> Verdict:
        here = run(0)

        def compare(nudged: Sequence[Tensor]) -> Verdict:
            if is_forward:
                # Nothing but the experts' outputs travels, no residual stream.
                verdict = comparison.outputs(torch.zeros_like(here), found, here, nudged)
            else:
                verdict = comparison.gradients(found, here, nudged)
            if verdict is None:
                raise UncheckableError("there are too few rows to compare")
            return verdict

        verdict = compare([])
        if not verdict.is_wrong:
            return verdict
        # A training run may have written other weights meanwhile.
        self._checkpoint = None
        self._opened()
        return compare([run(nudge) for nudge in NUDGES])

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            # A branch of the Hub may have moved on since.
            version = self._view.version
            revision = None if version.is_local else version.revision
            opened = Checkpoint.open(self._view.model, revision=revision)
            if opened.version != version:
                raise UnsupportedError(
                    f"{opened.name} has changed since the model was loaded: it is {opened.version} now, holders have "
                    f"{version}"
                )
            self._checkpoint = opened
        return self._checkpoint


def _sample(request: ExpertsRequest) -> _Sample:
    """Picks an expert of a request, and some of its rows, as its holder cannot foresee."""
    chance = secrets.SystemRandom()
    index = chance.randrange(len(request.experts))
    end = list(accumulate(request.counts))[index]
    first = end - request.counts[index]
    picked = sorted(chance.sample(range(first, end), min(_MAX_ROWS, end - first)))
    places = torch.tensor(picked)
    return _Sample(
        expert=request.experts[index],
        places=places,
        rows=packed(request.hidden, request.reply_codec)[request.rows[places].long()],
        grad=None if request.grad is None else packed(request.grad, request.reply_codec)[places],
    )
