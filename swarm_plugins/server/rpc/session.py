"""``rpc_session``: one stream is one session, from the first message to the end of the stream."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import msgspec

from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanOutputs
from swarm_plugins.blocks.kv import KVCache
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.beginnings import run_beginning
from swarm_plugins.server.rpc.checks import check_blocks, check_held, check_prefix, checked_ids, checked_outputs
from swarm_plugins.server.rpc.handlers import Answer, answer_requests
from swarm_plugins.server.rpc.proofs import opening_history
from swarm_plugins.server.rpc.push import finished, plain_step
from swarm_plugins.server.rpc.session_memory import admitted, max_tokens, room, too_long
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.inbox import Inbox
from swarm_plugins.server.state.sessions import Session
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import PushTo, SessionOpen, SessionOpened, SessionStep, SessionStepResponse

_FEW_ADAPTERS = 8
"""A step with more adapters runs alone, not packed with steps of other sessions."""


async def session_handler(service: Service, channel: Channel) -> None:
    """Opens a session, answers its steps and closes it with the stream."""
    with contextlib.ExitStack() as ending:
        stream = _Stream(service, channel.remote_peer, ending)
        kinds = (SessionOpen, SessionStep)
        idle_s = limits.IDLE_SESSION_S
        await answer_requests(service, "rpc_session", kinds, stream.answer, channel, idle_s=idle_s)


class _Stream:
    """The state of one stream: no session, then one; ``ending`` closes it, however the stream ends."""

    def __init__(self, service: Service, peer: str, ending: contextlib.ExitStack) -> None:
        self._service = service
        self._peer = peer
        self._ending = ending
        self._session: Session | None = None
        self._push_to: PushTo | None = None
        """The last one that got an output."""
        ending.callback(self._push_only_to, None)

    async def answer(self, request: SessionOpen | SessionStep, charge: Charge) -> Answer:
        """Answers one message."""
        if isinstance(request, SessionOpen):
            return await self._open(request), "none"
        if self._session is None:
            raise RequestError("unknown_session", "this stream has no session yet: send SessionOpen first")
        if self._session.is_closed:
            raise RequestError(
                "unknown_session",
                f"this session had no step for {limits.SESSION_LEASE_S:g} s and gave its room to others: "
                "open a new one and replay",
            )
        return await self._step(self._session, request, charge), request.reply_codec

    async def _open(self, request: SessionOpen) -> SessionOpened:
        service = self._service
        if self._session is not None:
            raise BadRequestError("this stream has a session already: open another stream for another one")
        blocks = check_blocks(service, request.version, request.start, request.end)
        if request.fork_of is None:
            service.draining.check(blocks)
        most = max_tokens(service, blocks, request.batch_size)
        prefix_tokens = check_prefix(service, request.prefix, blocks, request.batch_size)
        if prefix_tokens > most:
            raise too_long(service, request.batch_size, prefix_tokens, most)
        history = await opening_history(service, request)
        source = self._source(request, blocks)
        first_tokens = prefix_tokens if source is None else source.cache.length
        # An empty cache takes no memory, but the copy of one does for states.
        if source is not None:
            asked = source.cache.copy_bytes
        else:
            asked = request.batch_size * service.spec.bytes_at_once(blocks, prefix_tokens) if prefix_tokens else 0
        with room(service, self._peer, asked), contextlib.ExitStack() as ending:
            ending.enter_context(service.sessions.counted(self._peer))
            cache = await self._new_cache(self._maker(request, blocks, source, asked))
            inbox = Inbox(self._peer, request.push_name, request.push_key)
            begun = None if first_tokens else service.prefixes.begun(self._peer, blocks, request.batch_size)
            session = Session(self._peer, request.version, blocks, cache, inbox, begun=begun, history=history)
            # Behind everything of this session that is still in the queue.
            ending.callback(service.scheduler.post, session.close)
            ending.enter_context(service.inboxes.listed(inbox))
            ending.callback(service.sessions.remove, session)
            service.sessions.add(session)
            self._session = session
            self._ending.push(ending.pop_all())
        return SessionOpened(session=session.name, max_tokens=most)

    def _source(self, request: SessionOpen, blocks: range) -> Session | None:
        """Returns the session to fork, if the request names one."""
        if request.fork_of is None:
            return None
        if request.prefix:
            raise BadRequestError("a forked session takes no prefix: it starts with the other session's cache")
        source = self._service.sessions.find(self._peer, request.fork_of)
        if source.blocks != blocks:
            raise BadRequestError(
                f"the session to fork runs blocks {source.blocks.start}:{source.blocks.stop}, "
                f"the request names {blocks.start}:{blocks.stop}: they must be the same",
            )
        _check_rows(source, request.batch_size)
        return source

    async def _new_cache(self, make: Callable[[], KVCache]) -> KVCache:
        """Makes the cache on the compute thread; nothing is left there if the stream ends meanwhile."""
        service = self._service
        made: list[KVCache] = []
        try:
            await service.scheduler.call(
                lambda: made.append(make()), timeout_s=limits.REQUEST_TIMEOUT_S, peer=self._peer
            )
        except BaseException:
            service.scheduler.post(lambda: _close_all(made))
            raise
        return made[0]

    def _maker(
        self, request: SessionOpen, blocks: range, source: Session | None, most_bytes: int
    ) -> Callable[[], KVCache]:
        spec, runner = self._service.spec, self._service.runner
        if source is not None:
            return lambda: _fork(source, request.batch_size, most_bytes)
        return lambda: runner.new_cache(
            request.batch_size, blocks, [tensor.to(spec.device, spec.dtype) for tensor in request.prefix]
        )

    async def _step(self, session: Session, asked: SessionStep, charge: Charge) -> SessionStepResponse:
        service = self._service
        check_held(service, session.blocks)
        # Busy from here on, so that its own lease does not end while it waits for its input, or asks for room.
        with session.stepping():
            request = await plain_step(asked, session.inbox, charge)
            with admitted(service, session, request, charge):
                outputs, history = await self._run(session, request)
        answer = SessionStepResponse(**msgspec.structs.asdict(checked_outputs(outputs, request.hidden.dtype)))
        if asked.push_to is not None:
            self._push_only_to(asked.push_to)
        about = service, session.version
        answer, session.history = await finished(*about, asked, request, answer, charge, history)
        return answer

    def _push_only_to(self, to: PushTo | None) -> None:
        """Ends what is on its way elsewhere: one session has one output at most on its way."""
        before, self._push_to = self._push_to, to
        if before is not None and (to is None or (before.peer, before.session) != (to.peer, to.session)):
            self._service.pushes.forget(self._peer, before)

    async def _run(self, session: Session, request: SessionStep) -> tuple[SpanOutputs, bytes]:
        """Runs a step; also returns the session's history before it."""
        service = self._service
        with service.adapters.using(self._peer, request.adapters) as adapters:
            inputs = StepInputs(
                cache=session.cache,
                blocks=session.blocks,
                hidden=request.hidden.to(service.spec.dtype),
                position_ids=request.position_ids,
                attention_mask=request.attention_mask,
                layer_masks=request.layer_masks or None,
                token_ids=checked_ids(service, request),
                adapters=AdapterUse(adapters=adapters, rows=request.adapter_rows),
                collect_hidden=request.collect_hidden,
                collect_router=request.collect_router,
                whole_beyond=service.spec.whole_beyond,
                has_states=session.cache.has_states,
            )
            # Unknown until the answer is signed: a step that fails may have changed the cache all the same.
            history, session.history = session.history, b""
            run = functools.partial(
                service.scheduler.step,
                timeout_s=limits.REQUEST_TIMEOUT_S,
                prepare=functools.partial(session.change, request.ops, request.hidden.shape[1])
                if request.ops
                else None,
                peer=self._peer,
                takes_long=_takes_long(adapters),
            )
            reused = 0
            if request.ops:
                session.begun = None
                outputs = await run(inputs)
            else:
                outputs, reused = await run_beginning(service, session, inputs, run)
        rows, tokens = request.hidden.shape[:2]
        service.counts.tokens["decode" if tokens == 1 else "prefill"] += rows * (tokens - reused)
        service.counts.tokens["reused"] += rows * reused
        return outputs, history


def _takes_long(adapters: Sequence[LoadedAdapter]) -> bool:
    """Returns whether adapters may cost more than blocks do: layers that are built make matrices as large as theirs."""
    return len(adapters) > _FEW_ADAPTERS or any(adapter.spec.peft is not None for adapter in adapters)


def _close_all(caches: list[KVCache]) -> None:
    for cache in caches:
        cache.close()


def _check_rows(source: Session, batch_size: int) -> None:
    if source.cache.batch_size != batch_size:
        raise BadRequestError(
            f"the session to fork has {source.cache.batch_size} rows, the request names {batch_size}: "
            "fork first, change the rows with the next step",
        )


def _fork(source: Session, batch_size: int, most_bytes: int) -> KVCache:
    """Forks on the compute thread, where the other session cannot change meanwhile."""
    if source.is_closed:
        raise RequestError("unknown_session", "the session to fork has just been closed: open a new one and replay")
    _check_rows(source, batch_size)
    if source.cache.copy_bytes > most_bytes:
        # Forks that wait while the session grows would get more than they have taken room for.
        raise RequestError(
            "unknown_session",
            f"the session to fork has grown meanwhile, its copy from {most_bytes} to {source.cache.copy_bytes} bytes: "
            "fork it between its steps, or open a new one and replay",
        )
    return source.cache.fork()
