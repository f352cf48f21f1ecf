"""Steps of a session on single servers: opened, sent, recorded; replayed on another server when one is lost."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from swarm_plugins.block_io import LoadedAdapter, SpanInputs, SpanOutputs, join_outputs
from swarm_plugins.client.answers import check_outputs, check_same_routers
from swarm_plugins.client.observer import SentSession, StepCall
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.span_session import SpanSession
from swarm_plugins.client.splitting import tokens_per_message
from swarm_plugins.errors import SwarmError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.admission.pushing import new_push_key
from swarm_plugins.transport.messages import SessionOpen, SessionStep, SessionStepResponse

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.retries import ChainRetries

log = logging.getLogger(__name__)


class SpanSteps:
    """Runs new tokens on single servers."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    # -- planning and replacing ---------------------------------------------------------------------------------------

    async def plan(self, blocks: range, demand: Demand, history: History, retries: ChainRetries) -> list[SpanSession]:
        """Plans sessions for blocks; they start with the history's prefix."""
        return _parts(await retries.chain(blocks, demand), blocks, history)

    async def moved(self, lost: SpanSession, demand: Demand, retries: ChainRetries) -> list[SpanSession]:
        """Replays a lost server's history on others."""
        while True:
            parts = await self.plan(lost.blocks, demand, lost.history, retries)
            failure = await self._replay(parts, lost.history)
            if failure is None:
                return parts
            retries.note(*failure)

    async def faster(self, current: SpanSession, spans: Sequence[SpanSession], rows: int) -> list[SpanSession] | None:
        """Moves one of a chain's sessions off a slow server; returns None if no others are clearly faster."""
        view, length = self.servers.view, current.history.length
        sender, receiver = neighbors(spans, current)
        demand = Demand(tokens=rows, kv_tokens=rows * (length + 1), sender=sender, receiver=receiver)
        found = view.alternative(current.blocks, demand, Demand(tokens=rows * length), without={current.peer})
        if found is None or not current.times.is_move_worth(found.step_s, found.replay_s):
            return None
        log.info("server %s has become slow: its session moves to %s", current.peer, found.chain)
        parts = _parts(found.chain, current.blocks, current.history)
        failure = await self._replay(parts, current.history)
        if failure is not None:
            view.ban(*failure)
            current.times.postpone()
            return None
        await current.close()
        return parts

    async def _replay(self, parts: Sequence[SpanSession], history: History) -> tuple[str, SwarmError] | None:
        """Sends a history to new sessions; if that fails, closes them and returns where and why."""
        running = parts[0]
        if history.steps:
            self.servers.peers.counts.replays += 1
        try:
            for sent in history.merged():
                hidden = sent.hidden
                for running in parts:
                    hidden = (await self.advance(running, replace(sent, hidden=hidden))).hidden
        except BaseException as exc:
            for part in parts:
                await part.close()
            if not isinstance(exc, SwarmError):
                raise
            return running.peer, exc
        return None

    # -- opening ------------------------------------------------------------------------------------------------------

    async def open_ahead(self, current: SpanSession, rows: int) -> None:
        """Opens a session that has nothing to replay; if that fails, it is opened again at its turn."""
        if current.channel is None and not current.is_lost:
            try:
                await self.open(current, batch_size=rows)
            except SwarmError:
                await current.close()  # the error shows at its turn

    async def open(self, current: SpanSession, *, batch_size: int, fork_of: str | None = None) -> None:
        """Begins to open a session, empty but for the history's prefix, or as the copy of another one."""
        info, is_pushed = self.servers.view.known.infos.get(current.peer), self.takes_pushes(current)
        request = SessionOpen(
            version=self.servers.view.version.key,
            start=current.blocks.start,
            end=current.blocks.stop,
            batch_size=batch_size,
            fork_of=fork_of,
            prefix=() if fork_of else current.history.prefix,
            push_name=secrets.token_urlsafe(16) if is_pushed else "",
            push_key=new_push_key() if is_pushed else b"",
        )
        await current.open(self.servers.peers, request)
        if info is not None and info.max_session_tokens > 0:
            current.room = (batch_size, info.max_session_tokens)  # or less, as it will say
        current.sent = None if fork_of else SentSession(request)

    def takes_pushes(self, current: SpanSession) -> bool:
        """Returns whether a server may get its input from another one."""
        info = self.servers.view.known.infos.get(current.peer)
        return self.servers.peers.config.push != "off" and info is not None and info.pushes

    # -- steps --------------------------------------------------------------------------------------------------------

    async def advance(self, current: SpanSession, inputs: SpanInputs) -> SpanOutputs:
        """Runs new tokens on one span, in parts small enough for the server."""
        inputs = replace(inputs, blocks=current.blocks)
        rows, tokens = inputs.hidden.shape[:2]
        if current.channel is None:
            await self.open(current, batch_size=rows)
        if tokens == 1:
            return await self._send(current, inputs)
        current.check_room(rows, tokens)
        size = self.tokens_at_once(current, inputs)
        starts = range(0, tokens, size)
        if len(starts) > 1:
            await current.confirm(self.servers.peers)
            current.check_room(rows, tokens)
        answers = [await self._send(current, inputs.take_tokens(start, start + size)) for start in starts]
        check_same_routers(answers, f"server {current.peer}")
        return join_outputs(answers, dim=1)

    def tokens_at_once(self, current: SpanSession, inputs: SpanInputs) -> int:
        """Returns how many tokens of each row go in one message."""
        info = self.servers.view.known.infos.get(current.peer)
        limit = tokens_per_message(inputs)
        if info is not None and info.max_batch_tokens > 0:
            limit = min(limit, info.max_batch_tokens)
        return max(1, limit // inputs.hidden.shape[0])

    def request(
        self, current: SpanSession, inputs: SpanInputs, *, ahead: int = 0, receivers: Sequence[str] = ()
    ) -> tuple[SessionStep, tuple[LoadedAdapter, ...]]:
        """Returns the message for new tokens, and the adapters that it names.

        ``ahead`` tokens are on their way to the server, and not in the history. ``receivers`` see its input or output;
        none: only the server itself.
        """
        # Nothing trains between the tokens of a generation, but a prompt may follow a training step.
        is_prompt = inputs.hidden.shape[1] > 1 or current.history.length == 0
        part = self.servers.digests.part(inputs.adapters, current.blocks, verify=is_prompt and not ahead)
        request = SessionStep(
            hidden=inputs.hidden.detach(),
            cached_tokens=current.history.length + ahead,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            ops=() if ahead else tuple(current.unsent_ops),
            adapters=part.digests,
            adapter_rows=inputs.adapters.rows,
            collect_hidden=inputs.collects_inner,
            collect_router=inputs.collect_router,
            reply_codec=self.servers.view.codecs.between(inputs.hidden, *(receivers or [current.peer])),
            nonce=self.servers.view.observer.nonce(),
        )
        return request, part.shipped

    async def _send(self, current: SpanSession, inputs: SpanInputs) -> SpanOutputs:
        """Sends new tokens to one server and returns its answer."""
        peers, started = self.servers.peers, time.perf_counter()
        request, adapters = self.request(current, inputs)
        units = inputs.num_tokens
        response = await peers.with_adapters(
            current.peer,
            adapters,
            lambda: current.ask(peers, request, units=units),
        )
        return await self.finish(current, inputs, request, adapters, response, started)

    async def finish(
        self,
        current: SpanSession,
        inputs: SpanInputs,
        request: SessionStep,
        adapters: tuple[LoadedAdapter, ...],
        response: SessionStepResponse,
        started: float,
    ) -> SpanOutputs:
        """Checks and records an answer; ``started`` is when its server could begin, by ``time.perf_counter``."""
        view = self.servers.view
        check_outputs(response, inputs, current.peer)
        current.note_sent(request)
        current.unsent_ops = []
        current.is_due = inputs.hidden.shape[1] == 1 and current.times.add(time.perf_counter() - started)
        current.history.append(inputs)
        await view.observer.step_done(
            StepCall(
                peer=current.peer,
                info=view.known.infos.get(current.peer),
                history=current.history,
                sent=current.sent,
                adapters=adapters,
                request=request,
                response=response,
            )
        )
        if inputs.collect_hidden and not inputs.collects_inner:
            # Something in the place of what was not asked for, so that the others keep theirs along the chain.
            stand_ins = (response.hidden,) * (len(inputs.blocks) - 1)
            filled: SpanOutputs = msgspec.structs.replace(response, hidden_states=stand_ins)
            return filled
        return response


def neighbors(spans: Sequence[SpanSession], current: SpanSession) -> tuple[str, str]:
    """Returns the peers before and after one of a chain's sessions; empty at its ends."""
    peers = ["", *(span.peer for span in spans), ""]
    position = spans.index(current)
    return peers[position], peers[position + 2]


def _parts(chain: Sequence[SpanChoice], blocks: range, history: History) -> list[SpanSession]:
    """Returns sessions to open for the parts of some blocks, with their parts of the history's prefix."""
    return [
        SpanSession(
            peer, range(start, end), History(history.prefix[2 * (start - blocks.start) : 2 * (end - blocks.start)])
        )
        for peer, start, end in chain
    ]
