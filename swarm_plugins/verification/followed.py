"""A session of this client that is computed again: its receipts, its adapters, and what to show if the server lies."""

from __future__ import annotations

import itertools

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs
from swarm_plugins.client.calls.call import Answer
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.span import SentSession, StepCall
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import SessionStep, SessionStepResponse
from swarm_plugins.transport.receipts import check_receipt, first_history
from swarm_plugins.verification.claims import arrived, check_kind, copied, travelled
from swarm_plugins.verification.evidence import Evidence, evidence_of_session
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.scores import Verdict
from swarm_plugins.verification.shadow import Shadow


class FollowedSession:
    """Follows one session on one server, from its first step on.

    Args:
        history: The session's record.
        blocks: The blocks that the server runs.
        version: Model version that the server is asked for.
        kind: How the server computes.
    """

    def __init__(self, history: History, blocks: range, version: str, kind: Kind) -> None:
        self.version = version
        self.shadow = Shadow(history.prefix, blocks, kind)
        self._steps: list[SpanInputs] = []
        self._answers: list[SessionStepResponse] = []
        """To the last steps, on which there is no verdict yet."""
        self._adapters: dict[str, LoadedAdapter] = {}
        """Copies of all adapters that were used: those in training change in place."""
        self._use: tuple[object, AdapterUse] | None = None
        """Digests and rows of the last step, and its adapters."""
        self._num_right = 0
        """Steps before those."""
        self._sent: SentSession | None = None
        self._history = b""
        """What the next receipt has to name."""
        self._num_vouched = 0
        """Steps whose receipts name all steps before them."""

    def follows(self, history: History) -> bool:
        """Returns whether the session still begins with the steps followed so far: a crop or reorder ends that."""
        known = self._steps
        return len(history.steps) == len(known) + 1 and all(
            one is other for one, other in zip(known, history.steps, strict=False)
        )

    def add(self, call: StepCall, answer: Answer[SessionStep, SessionStepResponse], sent: SentSession | None) -> None:
        """Follows the step that the session has just made; ``sent`` are its messages, if they are known.

        Raises:
            ProtocolError: If the server has not signed its answer, or not for this history.
            SpanMovedError: If it has signed for other blocks than it is believed to have.
        """
        peer, request = answer.peer, arrived(answer.request, answer.is_pushed)
        is_first = not self._steps
        if is_first and sent is not None:
            self._sent, self._history = sent, first_history(sent.opened)
        receipt, after = check_receipt(peer, request, answer.response, self._history)
        check_kind(peer, receipt, self.version, self.shadow.kind)
        if self._history and not after and not is_first:
            raise ProtocolError(f"server {peer} does not vouch for the session's history any more")
        self._steps.append(call.session.history.steps[-1])
        self._history = after
        self._num_vouched += bool(after)
        use = self._adapters_of(call, request)
        if use is None:
            self.shadow.lose()
        if use is None or self.shadow.is_lost:
            self._answers = []
            return
        # A copy: the answer is its caller's now.
        response = travelled(answer.response, "none")
        self._answers.append(response)
        self.shadow.add(request, use, response.hidden)

    def _adapters_of(self, call: StepCall, request: SessionStep) -> AdapterUse | None:
        """Returns the adapters of a step; None if they have changed since they were named."""
        named = request.adapters, request.adapter_rows
        if self._use is None or self._use[0] != named:
            for one in call.adapters:
                if one.digest not in self._adapters:
                    (self._adapters[one.digest],) = copied([one])
            copies = tuple(self._adapters[one.digest] for one in call.adapters)
            if any(adapter_digest(one.spec, one.tensors) != one.digest for one in copies):
                return None
            self._use = named, AdapterUse(adapters=copies, rows=request.adapter_rows)
        return self._use[1]

    async def compare(self, blocks: LocalBlocks) -> list[Verdict]:
        """Compares the steps added since the last call.

        Raises:
            UncheckableError: If the blocks cannot be read or run here; the session cannot be followed any further.
        """
        verdicts = await self.shadow.compare(blocks)
        if verdicts and not any(verdict.is_wrong for verdict in verdicts):
            del self._answers[: self.shadow.num_compared - self._num_right]
            self._num_right = self.shadow.num_compared
        return verdicts

    def evidence(self, peer: str, *, model: str, reason: str) -> Evidence | None:
        """Returns what shows a third party that the steps compared last are wrong; None if the receipts do not."""
        end = self.shadow.num_compared
        if self._sent is None or self._num_vouched < end:
            return None
        steps = list(itertools.starmap(arrived, self._sent.steps[:end]))
        answers = self._answers[: end - self._num_right]
        adapters = tuple(self._adapters.values())
        return evidence_of_session(peer, self._sent.opened, steps, answers, adapters, model=model, reason=reason)
