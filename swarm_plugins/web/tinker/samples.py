"""Samples of the protocol, drawn by the API's engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from swarm_plugins.errors import ConfigError
from swarm_plugins.talk.sampling import Sampling
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Finished, Generation, Piece, PromptScored, Scored
from swarm_plugins.web.engine.text import MAX_STOP_CHARS, MAX_STOPS
from swarm_plugins.web.tinker.bodies import Sample
from swarm_plugins.web.tinker.groups import Drawn
from swarm_plugins.web.tinker.messages import message

_MAX_SAMPLES = 64
_MAX_TOP = 20
_MAX_STOP_TOKENS = 64
"""Many times what chat templates have as ends of a turn."""
_STOP, _LENGTH = 0, 1
_EMPTY_LOGPROB = -99999.0


def generation_of(body: Sample, *, adapter: str | None, tenant: str, context: int, vocabulary: int) -> Generation:
    """Returns what the engine is to do.

    Raises:
        ConfigError: If a request cannot be answered.
    """
    if body.prompt_alt_tokens_k:
        raise ConfigError("prompt_alt_tokens_k is not known here: use topk_prompt_logprobs or target_prompt_logprobs")
    if body.prompt_logprobs_last_n is not None and body.prompt_logprobs_last_n < 1:
        raise ConfigError(f"prompt_logprobs_last_n is {body.prompt_logprobs_last_n}: 1 or more are possible")
    tokens = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise ConfigError("the prompt has a chunk that is not encoded_text: this model reads tokens of text only")
    if not 1 <= len(tokens) < context:
        raise ConfigError(f"the prompt has {len(tokens)} tokens: 1 to {context - 1} are possible")
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ConfigError(f"the prompt has ids outside of the vocabulary, 0 to {vocabulary - 1}")
    if not 1 <= body.num_samples <= _MAX_SAMPLES:
        raise ConfigError(f"num_samples is {body.num_samples}: 1 to {_MAX_SAMPLES} are possible")
    top = max(body.topk_prompt_logprobs, body.topk_sample_logprobs)
    if not 0 <= min(body.topk_prompt_logprobs, body.topk_sample_logprobs) <= top <= _MAX_TOP:
        raise ConfigError(f"at most {_MAX_TOP} alternatives are returned for each token")
    params = body.sampling_params
    room = context - len(tokens)
    wanted = room if params.max_tokens is None else params.max_tokens
    if not 0 <= wanted <= room:
        raise ConfigError(f"max_tokens is {wanted}: after {len(tokens)} tokens of the prompt, 0 to {room} are possible")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts, ids = _stops_of(stop or [])
    return Generation(
        tokens=tuple(tokens),
        max_new_tokens=wanted,
        sampling=Sampling(temperature=params.temperature, top_p=params.top_p, top_k=max(0, params.top_k)),
        seed=params.seed,
        n=body.num_samples,
        stop=texts,
        stop_tokens=ids,
        never_ends=stop == [],
        logprobs=top,
        score_prompt=bool(body.prompt_logprobs or body.topk_prompt_logprobs),
        adapter=adapter,
        tenant=tenant,
    )


def _stops_of(stop: Sequence[str | int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    texts = tuple(one for one in stop if isinstance(one, str))
    ids = tuple(one for one in stop if isinstance(one, int))
    if len(texts) > MAX_STOPS or not all(1 <= len(one) <= MAX_STOP_CHARS for one in texts):
        raise ConfigError(
            f"stop has {len(texts)} texts, the longest of {max(map(len, texts))} characters: at most {MAX_STOPS} of "
            f"1 to {MAX_STOP_CHARS} are possible"
        )
    if len(ids) > _MAX_STOP_TOKENS:
        raise ConfigError(f"stop has {len(ids)} tokens: at most {_MAX_STOP_TOKENS} are possible")
    return texts, ids


class Draws:
    """Draws samples with an engine, of each key so many requests at once as may run.

    Others wait here: the engine's waiting places are few, for all keys, and who finds none fails.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        most = engine.settings.most_of_a_key
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(most))

    async def draw(self, generation: Generation) -> Drawn:
        """Returns the samples of a generation.

        Raises:
            SwarmError: If servers are missing or fail.
        """
        scored: list[list[Scored]] = [[] for _ in range(generation.n)]
        ended: dict[int, Finished] = {}
        prompt: tuple[Scored, ...] = ()
        async with self._turns[generation.tenant]:
            async for event in self._engine.generate(generation):
                if isinstance(event, Piece):
                    scored[event.index].extend(event.scored)
                elif isinstance(event, Finished):
                    ended[event.index] = event
                elif isinstance(event, PromptScored):
                    prompt = event.scored
        return Drawn(tuple((ended[index], tuple(scored[index])) for index in range(generation.n)), prompt)


def response_of(samples: Drawn, body: Sample, targets: Any = None) -> bytes:
    """Returns a SampleResponse; ``targets`` is the Tensor of the tokens that the request names, if it does."""
    sequences = [_sequence(end, scored, body.topk_sample_logprobs) for end, scored in samples.samples]
    response = message("SampleResponse", sequences=sequences)
    prompt = _last(samples.prompt, body.prompt_logprobs_last_n)
    if body.prompt_logprobs:
        response.prompt_logprobs = _logprobs(prompt)
    if body.topk_prompt_logprobs:
        response.topk_prompt_logprobs.CopyFrom(_top(prompt, body.topk_prompt_logprobs))
    if targets is not None:
        response.target_prompt_logprobs.CopyFrom(targets)
    found: bytes = response.SerializeToString()
    return found


def _sequence(end: Finished, scored: Sequence[Scored], top: int) -> Any:
    found = message(
        "SampledSequence",
        stop_reason=_STOP if end.reason == "stop" else _LENGTH,
        tokens=np.array(end.tokens, "<i4").tobytes(),
        logprobs=_logprobs(scored[: len(end.tokens)]),
    )
    if top:
        found.topk_sampled_logprobs.CopyFrom(_top(scored[: len(end.tokens)], top))
    return found


def _last(scored: Sequence[Scored], count: int | None) -> Sequence[Scored]:
    """Hides the scores of all tokens but the last ``count``; None: of none."""
    hidden = 0 if count is None else max(0, len(scored) - count)
    return [*(Scored(one.token, None) for one in scored[:hidden]), *scored[hidden:]]


def _logprobs(scored: Sequence[Scored]) -> bytes:
    """Returns float32 values, NaN where none is known."""
    return np.array([float("nan") if one.logprob is None else one.logprob for one in scored], "<f4").tobytes()


def _top(scored: Sequence[Scored], count: int) -> Any:
    tokens = np.zeros((len(scored), count), "<i4")
    logprobs = np.full((len(scored), count), _EMPTY_LOGPROB, "<f4")
    for row, one in enumerate(scored):
        for column, (token, logprob) in enumerate(one.top[:count]):
            tokens[row, column], logprobs[row, column] = token, logprob
    return message("TopkLogprobs", token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=count, length=len(scored))
