"""One generation, from its prompt to its last event, in the thread that calls it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteriaList

from swarm_plugins.backbone.cache import remote_state
from swarm_plugins.web.engine.answers import Answers, scored_of
from swarm_plugins.web.engine.caches import CacheStore
from swarm_plugins.web.engine.models import end_tokens, is_prompt_learning
from swarm_plugins.web.engine.processors import Recorder, processors_of
from swarm_plugins.web.engine.request import Done, Event, Generation, PromptScored, Scored

_SCORED_AT_ONCE = 256
"""Prompt tokens whose probabilities over the whole vocabulary are in memory at once."""


class Run:
    """A generation on its way.

    Args:
        model: The model, with the request's adapter.
        tokenizer: Its tokenizer.
        request: What is wanted.
        caches: Caches of earlier turns.
        tell: Called with each event, in the generating thread.
        grammar: Masks tokens that the request's grammar forbids.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        request: Generation,
        caches: CacheStore,
        tell: Callable[[Event], object],
        grammar: LogitsProcessor | None = None,
    ) -> None:
        self._model = model
        self._request = request
        self._caches = caches
        self._tell = tell
        self._grammar = grammar
        self._recorder = Recorder() if request.logprobs is not None else None
        self._answers = Answers(request, tokenizer, end_tokens(model), tell, self._recorder)
        self._cache: Cache | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Ends the generation at once, and its session on servers; called from another thread."""
        with self._lock:
            self._answers.cancelled.set()
            remote = None if self._cache is None else remote_state(self._cache)
            if remote is not None:
                remote.leave()

    @torch.no_grad()
    def __call__(self) -> None:
        """Generates; the last event is `Done`, unless the run was cancelled.

        Raises:
            SwarmError: If servers are missing or fail.
        """
        started = time.monotonic()
        try:
            cached, servers = self._generate()
        except BaseException:
            if self._answers.cancelled.is_set():
                return  # what a closed session brings about
            raise
        if not self._answers.cancelled.is_set():
            prompt = len(self._request.tokens)
            seconds = time.monotonic() - started
            self._tell(Done(prompt, cached, self._answers.num_tokens, seconds, servers))

    def _generate(self) -> tuple[int, tuple[str, ...]]:
        """Returns how many tokens of the prompt were cached, and which servers carried it."""
        request = self._request
        ids = torch.tensor([request.tokens])
        if request.score_prompt:
            self._tell(PromptScored(self._scored(ids)))
        if not request.max_new_tokens:
            self._answers.finish()
            return 0, ()
        cached = self._take_cache()
        if request.n > 1:
            ids = self._repeated(ids)
        cache = self._cache
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            generation_config=self._settings(),
            logits_processor=processors_of(request, ids.shape[1], recorder=self._recorder, grammar=self._grammar),
            stopping_criteria=StoppingCriteriaList([self._answers]),
        )
        self._answers.finish()
        remote = None if cache is None else remote_state(cache)
        servers = () if remote is None else remote.servers
        self._keep_cache(output)
        return cached, servers

    def _settings(self) -> Any:
        """Returns the model's own settings, with this request's; samples are drawn by our processors."""
        settings = copy.deepcopy(self._model.generation_config)
        settings.update(
            do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None, num_beams=1, num_return_sequences=1,
            max_new_tokens=self._request.max_new_tokens, max_length=None, use_cache=True, return_dict_in_generate=False,
        )  # fmt: skip
        if settings.pad_token_id is None:
            settings.pad_token_id = min(end_tokens(self._model), default=0)
        return settings

    def _key(self) -> tuple[str | None, str]:
        return self._request.adapter, self._request.owner

    def _take_cache(self) -> int:
        """Finds or makes the cache; returns how many tokens are in it."""
        if is_prompt_learning(self._model):
            return 0  # virtual tokens come first: PEFT makes the cache
        cache, cached = self._caches.take(self._key(), self._request.tokens)
        if cache is None:
            cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        with self._lock:
            self._cache = cache
        return cached

    def _repeated(self, ids: Tensor) -> Tensor:
        """Reads the prompt once for all answers; returns it once for each."""
        cache = self._cache
        if cache is not None and ids.shape[1] > 1:
            start = cache.get_seq_length()
            if start < ids.shape[1] - 1:
                self._model(input_ids=ids[:, start:-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(self._request.n)
        return ids.repeat(self._request.n, 1)

    def _keep_cache(self, sequences: Tensor) -> None:
        cache = self._cache
        with self._lock:
            self._cache = None  # it is not this run's any more
            if cache is None or self._request.n > 1 or self._answers.cancelled.is_set():
                return
        tokens = sequences[0, : cache.get_seq_length()].tolist()
        if len(tokens) == sequences.shape[1] - 1:
            self._caches.put(self._key(), tokens, cache)

    def _scored(self, ids: Tensor) -> tuple[Scored, ...]:
        """Scores the prompt ``[1, T]``; a token's probability is that which the tokens before it give it."""
        top = self._request.logprobs or 0
        scored = [Scored(int(ids[0, 0]), None)]
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        for start in range(0, ids.shape[1] - 1, _SCORED_AT_ONCE):
            part = ids[:, start : min(start + _SCORED_AT_ONCE, ids.shape[1] - 1)]
            logits = self._model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]
            following = ids[0, start + 1 : start + 1 + part.shape[1]].tolist()
            scored += [
                scored_of(row, token, top) for row, token in zip(logits.float().log_softmax(-1), following, strict=True)
            ]
        return tuple(scored)
