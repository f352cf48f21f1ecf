"""Spot checks of holders' answers: one expert, on some of its rows, is computed again here.

The first answers of a holder are checked before they are used, later ones by chance and in the background, at the rates
at which clients check servers. A holder has no way to know which expert and which rows are compared.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client.answers import SpanMovedError
from swarm_plugins.client.observer import NoObserver, WrongAnswerError
from swarm_plugins.errors import SwarmError, UnsupportedError, one_line
from swarm_plugins.transport.messages import ExpertsRequest
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.background import BackgroundChecks
from swarm_plugins.verification.local_blocks import Kind, UncheckableError
from swarm_plugins.verification.quarantine import Quarantine
from swarm_plugins.verification.rates import CheckRates
from swarm_plugins.verification.recompute import NUDGES, nudged_hidden, packed
from swarm_plugins.verification.scores import Comparison, Verdict, coarsest
from swarm_plugins.versions import ModelVersion

if TYPE_CHECKING:
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.remote_experts.held import HeldExperts

log = logging.getLogger(__name__)

_MAX_ROWS = 64
"""Rows of the expert that are computed again."""
_UNCHECKED_S = 60.0
"""Pause after an answer could not be checked."""


class LoadExpert(Protocol):
    """`load_expert` fits."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        block: int,
        expert: int,
        *,
        part: tuple[int, int] | None,
        dtype: torch.dtype,
        quantization: str,
    ) -> HeldExperts:
        """Loads an expert as a holder has it."""


class _Asked(NamedTuple):
    """What is checked for itself: a holder with other experts is new, and so are its gradients."""

    peer: str
    what: str
    experts: tuple[int, int] | None
    dtype: str
    quantization: str


class _Sample(NamedTuple):
    """Some rows of one expert, and the answer to them."""

    expert: int
    places: Tensor
    """``[n]``: positions among the request's rows."""
    rows: Tensor
    """``[n, D]``."""
    grad: Tensor | None
    """``[n, D]``."""


class HolderChecks(NoObserver):
    """Checks the answers of the holders that one owner asks; excludes those in quarantine.

    Args:
        model: The model's directory or id.
        version: Its version, which holders have.
        load_expert: Loads one expert of its checkpoint.
        quarantine: Where caught holders are listed.
    """

    def __init__(
        self, model: str | Path, version: ModelVersion, load_expert: LoadExpert, quarantine: Quarantine
    ) -> None:
        self.rates = CheckRates()
        """Which answers are checked."""
        self.num_checked = 0
        """Checks that came to a result."""
        self._model = model
        self._load = load_expert
        self._version = version
        self._quarantine = quarantine
        self._checkpoint: Checkpoint | None = None
        self._lock = threading.Lock()
        """One expert is in memory at a time."""
        self._background = BackgroundChecks()
        self._unchecked: dict[_Asked, float] = {}
        """Holders whose answers could not be checked, and when to try again."""

    @property
    def is_busy(self) -> bool:
        """Whether checks are under way in the background."""
        return self._background.is_busy

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a holder is in quarantine."""
        return peer in self._quarantine

    async def answered(
        self, peers: Peers, peer: str, info: ServerInfo | None, request: ExpertsRequest, answer: Tensor
    ) -> None:
        """Checks an answer of the right shape, or not.

        Args:
            peers: Asks the holder what it serves, before it is accused.
            peer: The holder.
            info: What it has said about itself.
            request: What it was asked.
            answer: ``[N, D]``.

        Raises:
            SwarmError: If the answer must not be used.
        """
        if peer in self._quarantine:
            raise WrongAnswerError(f"holder {peer} is in quarantine")
        if info is None:
            return
        what = "experts" if request.grad is None else "gradients of experts"
        asked = _Asked(peer, what, info.experts, info.dtype, info.quantization)
        when = self.rates.when(asked)
        if when == "never" or time.monotonic() < self._unchecked.get(asked, 0.0):
            return
        # The answer is its caller's from here on; the request's tensors are the owner's.
        check = self._check(peers, asked, request, answer.clone(), _sample(request))
        if when == "before" or self._background.is_full:
            await check
        else:
            self._background.start(check, f"check {what} of {peer}")

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        await self._background.close()

    async def _check(
        self, peers: Peers, asked: _Asked, request: ExpertsRequest, answer: Tensor, sample: _Sample
    ) -> None:
        try:
            verdict = await asyncio.to_thread(lambda: self._verdict(asked, request, answer, sample))
        except (SwarmError, MemoryError, RuntimeError) as exc:
            if asked not in self._unchecked:
                log.warning("answers (%s) of holder %s cannot be checked: %s", asked.what, asked.peer, one_line(exc))
            self._unchecked[asked] = time.monotonic() + _UNCHECKED_S
            return
        self.num_checked += 1
        if not verdict.is_wrong:
            self.rates.passed(asked)
            return
        self.rates.doubt(asked)
        # Its answers are not signed: one that was started anew computes otherwise than it is believed to.
        info = await peers.info(asked.peer)
        if (info.experts, info.dtype, info.quantization) != asked[2:]:
            raise SpanMovedError(f"holder {asked.peer} was started anew, with other experts or in another type")
        reason = f"wrong {asked.what}, expert {sample.expert} of block {request.block}: {verdict}"
        self._quarantine.add(asked.peer, model=str(self._version), reason=reason)
        log.warning("holder %s is quarantined for a day: %s", asked.peer, reason)
        raise WrongAnswerError(f"holder {asked.peer} gave a wrong answer and is quarantined: {reason}")

    def _verdict(self, asked: _Asked, request: ExpertsRequest, answer: Tensor, sample: _Sample) -> Verdict:
        """Compares rows with the same expert here; before a holder is accused, again from nudged rows."""
        kind = Kind(asked.dtype, asked.quantization)
        with self._lock:
            held = self._load(
                self._opened(),
                request.block,
                sample.expert,
                part=request.slice,
                dtype=kind.torch_dtype,
                quantization=kind.quantization,
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
            revision = None if self._version.is_local else self._version.revision
            opened = Checkpoint.open(self._model, revision=revision)
            if opened.version != self._version:
                raise UnsupportedError(
                    f"{opened.name} has changed since the model was loaded: it is {opened.version} now, holders have "
                    f"{self._version}"
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
