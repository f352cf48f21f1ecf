"""One generation, from its prompt to its last event, in the thread that calls it."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase, StoppingCriteriaList

from swarm_plugins.backbone.cache import remote_states
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.rotary import whole_beyond
from swarm_plugins.web.engine.answers import Answers, scored_of
from swarm_plugins.web.engine.caches import CacheStore
from swarm_plugins.web.engine.grammar import GrammarProcessor
from swarm_plugins.web.engine.models import Models, end_tokens, is_activated_late, is_prompt_learning
from swarm_plugins.web.engine.processors import Recorder, processors_of
from swarm_plugins.web.engine.request import Done, Event, Generation, PromptScored, Scored

SCORED_AT_ONCE = 256
"""Prompt tokens whose probabilities over the whole vocabulary are in memory at once."""


class Run:
    """A generation on its way.

    Args:
        models: Have the request's adapter, or load it.
        tokenizer: Their tokenizer.
        request: What is wanted.
        caches: Caches of earlier turns.
        emit: Called with each event, in the generating thread.
    """

    def __init__(
        self,
        models: Models,
        tokenizer: PreTrainedTokenizerBase,
        request: Generation,
        caches: CacheStore,
        emit: Callable[[Event], object],
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._request = request
        self._caches = caches
        self._emit = emit
        self._recorder = Recorder() if request.logprobs is not None else None
        ends = frozenset(request.stop_tokens) | (frozenset() if request.never_ends else end_tokens(models.base))
        self._answers = Answers(request, tokenizer, ends, emit, self._recorder)
        self._cache: Cache | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Ends the generation and its session on servers, also before it begins. Called from another thread."""
        with self._lock:
            self._answers.cancelled.set()
            for remote in remote_states(self._cache) if self._cache is not None else ():
                remote.leave()

    @torch.no_grad()
    def __call__(self) -> None:
        """Generates; the last event is `Done`, unless the run was cancelled.

        Raises:
            SwarmError: If servers are missing or fail, or the adapter cannot be used.
        """
        if self._answers.cancelled.is_set():
            return
        started = time.monotonic()
        try:
            cached, servers = self._generate(self._models.get(self._request.adapter))
        except BaseException:
            if self._answers.cancelled.is_set():
                return  # what a closed session brings about
            raise
        if not self._answers.cancelled.is_set():
            prompt = len(self._request.tokens)
            seconds = time.monotonic() - started
            self._emit(Done(prompt, cached, self._answers.num_tokens, seconds, servers))

    def _generate(self, model: Any) -> tuple[int, tuple[str, ...]]:
        """Returns how many tokens of the prompt were cached, and which servers carried it."""
        request = self._request
        ids = torch.tensor([request.tokens], device=model.device)
        cached = 0
        if request.score_prompt:
            self._emit(PromptScored(self._scored(model, ids)))
        elif not is_prompt_learning(model):  # virtual tokens come first: PEFT makes the cache
            cache = None
            if _may_be_cut(model, len(request.tokens)):
                cache, cached = self._caches.take(self._key(model), request.tokens)
            self._use(new_cache(model) if cache is None else cache)
        if not request.max_new_tokens:
            self._answers.finish()
            return 0, ()
        if request.n > 1:
            ids = self._repeated(model, ids)
        cache = self._cache
        output = _generate_of(model)(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            generation_config=self._settings(model),
            logits_processor=processors_of(
                request,
                ids.shape[1],
                recorder=self._recorder,
                grammar=self._grammar(ids.shape[1]),
            ),
            stopping_criteria=StoppingCriteriaList([self._answers]),
        )
        self._answers.finish()
        servers = tuple(
            peer for remote in (remote_states(cache) if cache is not None else ()) for peer in remote.servers
        )
        self._keep_cache(model, output)
        return cached, servers

    def _settings(self, model: Any) -> Any:
        """Returns the model's own settings, with this request's; samples are drawn by our processors."""
        settings = copy.deepcopy(model.generation_config)
        settings.update(
            do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None, num_beams=1, num_return_sequences=1,
            max_new_tokens=self._request.max_new_tokens, max_length=None, use_cache=True, return_dict_in_generate=False,
        )  # fmt: skip
        if settings.pad_token_id is None:
            settings.pad_token_id = min(end_tokens(model), default=0)
        return settings

    def _grammar(self, prompt_tokens: int) -> GrammarProcessor | None:
        grammar = self._request.grammar
        if grammar is None:
            return None
        return GrammarProcessor(grammar, self._tokenizer, prompt_tokens, self._request.n, self._answers.has_ended)

    def _key(self, model: Any) -> Hashable:
        # Not by the adapter's name: after an eviction, another version may be loaded under it.
        return weakref.ref(model), self._request.tenant

    def _use(self, cache: Cache) -> None:
        """Sets the cache of this run; cancelling the run releases it."""
        with self._lock:
            self._cache = cache

    def _repeated(self, model: Any, ids: Tensor) -> Tensor:
        """Reads the prompt once for all answers; returns it once for each."""
        cache = self._cache
        if cache is not None and ids.shape[1] > 1 and _is_sum_of_parts(model, ids.shape[1]):
            start = cache.get_seq_length()
            if start < ids.shape[1] - 1:
                model(input_ids=ids[:, start:-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(self._request.n)
        return ids.repeat(self._request.n, 1)

    def _keep_cache(self, model: Any, sequences: Tensor) -> None:
        cache = self._cache
        with self._lock:
            self._cache = None  # it is not this run's any more
            if cache is None or self._request.n > 1 or self._answers.cancelled.is_set():
                return
        tokens = sequences[0, : cache.get_seq_length()].tolist()
        if len(tokens) == sequences.shape[1] - 1 and _may_be_cut(model, len(tokens)):
            self._caches.put(self._key(model), tokens, cache)

    def _scored(self, model: Any, ids: Tensor) -> tuple[Scored, ...]:
        """Scores the prompt ``[1, T]``; a token's probability is that which the tokens before it give it.

        Afterwards the cache holds all but the last token, as `generate()` needs it.
        """
        if is_prompt_learning(model):
            raise UnsupportedError(
                "this adapter puts virtual tokens before the prompt, which cannot be scored then: leave out echo"
            )
        check_scored(model, ids.shape[1])
        top = self._request.logprobs or 0
        scored = [Scored(int(ids[0, 0]), None)]
        cache = new_cache(model)
        self._use(cache)
        for start in range(0, ids.shape[1] - 1, SCORED_AT_ONCE):
            if self._answers.cancelled.is_set():
                raise CancelledError
            part = ids[:, start : min(start + SCORED_AT_ONCE, ids.shape[1] - 1)]
            logits = model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]
            following = ids[0, start + 1 : start + 1 + part.shape[1]].tolist()
            scored += [
                scored_of(row, token, top) for row, token in zip(logits.float().log_softmax(-1), following, strict=True)
            ]
        return tuple(scored)


def _generate_of(model: Any) -> Callable[..., Tensor]:
    """Returns a model's `generate()` in a form that several threads may call at once."""
    if not is_prompt_learning(model):
        return cast("Callable[..., Tensor]", model.generate)
    # PEFT's own generate() restores this method when it ends, and so takes it from requests that go on.
    model.base_model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    return cast("Callable[..., Tensor]", model.base_model.generate)


def check_scored(model: Any, num_tokens: int) -> None:
    """Raises UnsupportedError if a prompt cannot be scored in parts, which bounded memory requires."""
    if is_activated_late(model):
        raise UnsupportedError(
            f"prompts of {num_tokens} tokens are scored in parts, and this adapter begins at its invocation tokens "
            "(aLoRA), which each part would lack: leave out the prompt's log probabilities"
        )
    if not _is_short(model, num_tokens):
        raise UnsupportedError(
            f"prompts of more than {whole_beyond(_text_config(model))} tokens cannot be scored with this model, whose "
            f"rotary embeddings depend on the length (LongRoPE); this one has {num_tokens}: shorten it"
        )


def _may_be_cut(model: Any, num_tokens: int) -> bool:
    return not is_activated_late(model) and _is_short(model, num_tokens)


def _is_sum_of_parts(model: Any, num_tokens: int) -> bool:
    """Returns whether a prompt without its last token, and then that, are computed as the whole is."""
    return not is_activated_late(model) and _is_short(model, num_tokens) == _is_short(model, num_tokens - 1)


def _is_short(model: Any, num_tokens: int) -> bool:
    border = whole_beyond(_text_config(model))
    return border is None or num_tokens <= border


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def new_cache(model: Any) -> DynamicCache:
    """Returns an empty cache for a model."""
    return DynamicCache(config=_text_config(model))
