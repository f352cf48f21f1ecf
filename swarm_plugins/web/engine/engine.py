"""Runs generations side by side: as many at once as allowed, the others in the order they came."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio.to_thread
from transformers import PreTrainedTokenizerBase

from swarm_plugins.errors import CapacityError
from swarm_plugins.fair_queueing import FairLock
from swarm_plugins.web.engine.caches import CacheStore
from swarm_plugins.web.engine.models import Models
from swarm_plugins.web.engine.request import Done, Event, Generation
from swarm_plugins.web.engine.run import Run
from swarm_plugins.web.settings import ApiSettings

T = TypeVar("T")

MAX_WAITING = 64
"""Requests that wait; further ones are refused."""


class QueueFullError(CapacityError):
    """Too many requests wait already."""


class Engine:
    """Generates for many clients at once. Threads run `generate()`; servers pack what comes at the same time.

    Args:
        models: Base model and adapters.
        tokenizer: Their tokenizer.
        settings: Bounds.
    """

    def __init__(self, models: Models, tokenizer: PreTrainedTokenizerBase, settings: ApiSettings) -> None:
        self.models = models
        self.tokenizer = tokenizer
        self.settings = settings
        self.caches = CacheStore(max_bytes=settings.cache_bytes, token_bytes=_token_bytes(models.base))
        self._reading = FairLock()
        self._threads = ThreadPoolExecutor(settings.max_running, thread_name_prefix="swarm-api")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="swarm-api-adapters")
        self._turns = asyncio.Semaphore(settings.max_running)
        self._turns_of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(settings.most_of_a_key))
        self.waiting = 0
        """Generations that wait their turn."""
        self.running = 0
        """Generations under way."""
        self.prompt_tokens = self.cached_tokens = self.new_tokens = 0
        """Of complete generations."""

    def close(self) -> None:
        """Takes no further requests; those under way end by themselves."""
        for threads in (self._threads, self._loading):
            threads.shutdown(wait=False, cancel_futures=True)
        self.caches.clear()

    async def in_turn(self, tenant: str, work: Callable[[], T]) -> T:
        """Runs what reads a request in a thread, one request at a time: keys take turns by the time that it takes.

        Tokenizers keep settings of a call in themselves, so no two texts become tokens at once.
        """
        async with self._reading.turn(tenant):
            return await anyio.to_thread.run_sync(work)

    async def generate(self, request: Generation) -> AsyncGenerator[Event, None]:
        """Yields a generation's events; leaving the iterator ends it and frees its session.

        Raises:
            QueueFullError: If too many requests wait.
            SwarmError: If servers are missing or fail, or the adapter cannot be used.
        """
        loop = asyncio.get_running_loop()
        await self._take_turn(request)
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def emit(event: Event | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        run = Run(self.models, self.tokenizer, request, self.caches, emit)

        def work() -> None:
            try:
                run()
            finally:
                emit(None)

        future = loop.run_in_executor(self._threads, work)
        # A turn ends with its work: a client that reads slowly must not hold it.
        future.add_done_callback(functools.partial(self._end_turn, request.tenant))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Done):
                    self.prompt_tokens += event.prompt_tokens
                    self.cached_tokens += event.cached_tokens
                    self.new_tokens += event.new_tokens
                yield event
            await future
        finally:
            run.cancel()

    async def _take_turn(self, request: Generation) -> None:
        own, is_loaded = self._turns_of[request.tenant], self.models.has(request.adapter)
        must_wait = own.locked() or self._turns.locked() or not is_loaded
        if must_wait and self.waiting >= MAX_WAITING:
            raise QueueFullError(
                f"{self.running} requests are running and {self.waiting} wait, which is the limit: try again later"
            )
        self.waiting += 1
        try:
            if not is_loaded:
                # In a separate thread, so that a download does not take a turn from other requests.
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._loading, self.models.get, request.adapter)
            await own.acquire()
            try:
                await self._turns.acquire()
            except BaseException:
                own.release()
                raise
        finally:
            self.waiting -= 1
        self.running += 1

    def _end_turn(self, tenant: str, ended: asyncio.Future[None]) -> None:
        self.running -= 1
        self._turns.release()
        self._turns_of[tenant].release()
        # A cancelled run's error has no reader.
        if not ended.cancelled():
            ended.exception()


def _token_bytes(model: Any) -> int:
    """Returns roughly how many bytes the keys and values of one token take in all layers."""
    config = model.config.get_text_config(decoder=True)
    rank, query_heads = getattr(config, "kv_lora_rank", None), getattr(config, "num_attention_heads", None) or 1
    if rank:  # latents of all heads together (DeepSeek-V2, section 2.1)
        width = rank + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or query_heads
        width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // query_heads)
    return int(config.num_hidden_layers * width * model.dtype.itemsize)
