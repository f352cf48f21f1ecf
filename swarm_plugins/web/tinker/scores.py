"""Scores prompts in padded batches: evaluations send hundreds of single requests at once.

By itself each would take a session on the servers, a pass of its prompt and one of the token that the SDK asks for.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from swarm_plugins.fair_queueing import FairLock
from swarm_plugins.tuning.computing import most_tokens, next_logits
from swarm_plugins.web.engine.answers import scored_of
from swarm_plugins.web.engine.models import Models, end_tokens, is_prompt_learning
from swarm_plugins.web.engine.processors import processors_of
from swarm_plugins.web.engine.request import Finished, Generation, Scored
from swarm_plugins.web.tinker.gathering import GATHER_S, compute_for
from swarm_plugins.web.tinker.groups import Drawn

_MAX_TOKENS = 2048
"""Of the prompts of a turn."""


@dataclass(eq=False)
class _Waiting:
    generation: Generation
    done: asyncio.Future[Drawn]


class Scores:
    """Scores prompts of a sampler together, and draws the token after each. Keys take turns.

    Args:
        models: Have the samplers' models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._turns = FairLock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="swarm-api-scores")
        self._queues: dict[tuple[str, str | None], deque[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Takes no further work; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def takes(self, one: Generation) -> bool:
        """Returns whether a request is for the scores of its prompt, and one token at most.

        The engine takes long prompts: it has the logits of a few of their positions at once.
        """
        is_plain = one.n == 1 and one.max_new_tokens <= 1 and one.seed is None and not one.stop
        if not one.score_prompt or not is_plain:
            return False
        model = self._models.get(one.adapter)
        return not is_prompt_learning(model) and len(one.tokens) <= most_tokens(model)

    async def draw(self, generation: Generation) -> Drawn:
        """Returns the scores of a prompt, and the token after it.

        Raises:
            SwarmError: If servers are missing or fail.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(generation, loop.create_future())
        key = (generation.tenant, generation.adapter)
        if key in self._queues:
            self._queues[key].append(waiting)
        else:
            self._queues[key] = deque([waiting])
            task = loop.create_task(self._work_off(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await waiting.done

    async def _work_off(self, key: tuple[str, str | None]) -> None:
        queue, (tenant, adapter) = self._queues[key], key
        await asyncio.sleep(GATHER_S)
        while queue:
            async with self._turns.turn(tenant):
                together = _taken(queue)
                if together:
                    scored = functools.partial(self._scored, adapter, [one.generation for one in together])
                    await compute_for([one.done for one in together], self._threads, scored)
        del self._queues[key]

    def _scored(self, adapter: str | None, generations: Sequence[Generation]) -> list[Drawn]:
        model = self._models.get(adapter)
        ends = end_tokens(self._models.base)
        found: dict[int, Drawn] = {}
        texts = [torch.tensor(one.tokens) for one in generations]
        for index, logits in next_logits(model, texts):
            found[index] = _drawn(generations[index], texts[index], logits, ends)
        return [found[index] for index in range(len(generations))]


def _taken(queue: deque[_Waiting]) -> list[_Waiting]:
    """Takes the next prompts of a queue, so many as fit into a turn."""
    found: list[_Waiting] = []
    room = _MAX_TOKENS
    while queue and (not found or len(queue[0].generation.tokens) <= room):
        one = queue.popleft()
        if not one.done.done():
            found.append(one)
            room -= len(one.generation.tokens)
    return found


def _drawn(generation: Generation, tokens: Tensor, logits: Tensor, ends: frozenset[int]) -> Drawn:
    """Scores a prompt ``[T]`` by its logits ``[T, vocabulary]``, and draws the next token."""
    top = generation.logprobs or 0
    logprobs = logits.log_softmax(dim=-1)
    prompt = [Scored(int(tokens[0]), None)]
    prompt += [scored_of(row, token, top) for row, token in zip(logprobs[:-1], tokens[1:].tolist(), strict=True)]
    if not generation.max_new_tokens:
        return Drawn(((Finished(0, "length", ()), ()),), tuple(prompt))
    chosen = processors_of(generation, len(tokens), recorder=None, grammar=None)
    ids = cast("torch.LongTensor", tokens[None])
    token = int(chosen(ids, cast("torch.FloatTensor", logits[-1:].clone()))[0].argmax())
    is_end = token in generation.stop_tokens or (not generation.never_ends and token in ends)
    end = Finished(0, "stop" if is_end else "length", (token,))
    return Drawn(((end, (scored_of(logprobs[-1], token, top),)),), tuple(prompt))
