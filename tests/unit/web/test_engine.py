"""Generations side by side, ended at once, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins.backbone.twin import twin
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.talk.sampling import Sampling
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.web.engine.engine import Engine, QueueFullError
from swarm_plugins.web.engine.models import Models
from swarm_plugins.web.engine.request import Done, Event, Finished, Generation, Piece, PromptScored
from swarm_plugins.web.settings import ApiSettings

GREEDY = Sampling(temperature=0.0)


def engine_of(model: Any, tokenizer: Any, **settings: Any) -> Engine:
    return Engine(Models(model, "tiny", no_adapters), tokenizer, ApiSettings(**settings))


def no_adapters(model: Any, adapter: str) -> Any:
    raise AssertionError(adapter)


def ask(text: str, tokenizer: Any, new_tokens: int = 8, **more: Any) -> Generation:
    tokens = tuple(tokenizer(text)["input_ids"])
    return Generation(tokens=tokens, max_new_tokens=new_tokens, sampling=more.pop("sampling", GREEDY), **more)


async def all_of(engine: Engine, request: Generation) -> list[Event]:
    return [event async for event in engine.generate(request)]


def events_of(model: Any, tokenizer: Any, *requests: Generation, **settings: Any) -> list[Any]:
    """The events of requests that run at the same time, or the error of one that is refused."""

    async def together() -> list[Any]:
        engine = engine_of(model, tokenizer, **settings)
        try:
            return await asyncio.gather(*(all_of(engine, one) for one in requests), return_exceptions=True)
        finally:
            engine.close()

    return asyncio.run(together())


def text_of(events: list[Event], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece) and event.index == index)


def tokens_of(events: list[Event], index: int = 0) -> tuple[int, ...]:
    return next(event.tokens for event in events if isinstance(event, Finished) and event.index == index)


def test_requests_at_the_same_time_get_the_tokens_they_get_alone(model: Any, tokenizer: Any) -> None:
    texts = [f"{word} and so on" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
    requests = [ask(text, tokenizer, 16) for text in texts]
    for text, events in zip(texts, events_of(model, tokenizer, *requests), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            alone = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert tokens_of(events) == tuple(alone[0, ids.shape[1] :].tolist())


def test_leaving_frees_the_session_and_ends_the_step(model: Any, tokenizer: Any, swarm: InProcessSwarm) -> None:
    async def leave() -> None:
        engine = engine_of(model, tokenizer)
        events = engine.generate(ask("a long story", tokenizer, 400, sampling=Sampling(temperature=1.0), seed=1))
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Piece):
                    break
        for _ in range(500):
            if not swarm.num_sessions and not engine.running:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("sessions are still open")
        assert len(engine.caches) == 0
        # The engine goes on.
        assert tokens_of(await all_of(engine, ask("hello", tokenizer, 3)))
        engine.close()

    asyncio.run(leave())


def test_more_requests_than_may_wait_are_refused(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.engine.engine.MAX_WAITING", 1)
    found = events_of(model, tokenizer, *[ask("x", tokenizer, 8)] * 4, max_running=1)
    assert sum(isinstance(one, QueueFullError) for one in found) == 2


def test_several_answers_read_the_prompt_once_and_differ_by_their_draws(model: Any, tokenizer: Any) -> None:
    request = ask("once upon a time", tokenizer, 12, n=3, seed=4, sampling=Sampling(temperature=1.5))
    first, again = (events_of(model, tokenizer, request)[0] for _ in range(2))
    answers = [tokens_of(first, index) for index in range(3)]
    assert len(set(answers)) == 3
    assert answers == [tokens_of(again, index) for index in range(3)]


def test_draws_follow_the_probabilities(model: Any, tokenizer: Any) -> None:
    """The share of the likeliest first token among many answers is its probability."""
    [events] = events_of(model, tokenizer, ask("q", tokenizer, 1, n=400, seed=5, sampling=Sampling(temperature=0.5)))
    drawn = torch.tensor([tokens_of(events, index)[0] for index in range(400)])
    ids = tokenizer("q", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = (model(input_ids=ids).logits[0, -1] / 0.5).softmax(-1)
    counts = torch.bincount(drawn, minlength=expected.shape[0]) / 400
    # Four standard deviations of a share, and two draws: a rare token's is no normal distribution.
    assert ((counts - expected).abs() <= 4 * (expected * (1 - expected) / 400).sqrt() + 2 / 400).all()


def test_a_prompt_is_scored_as_a_forward_pass_scores_it(model: Any, tokenizer: Any) -> None:
    [events] = events_of(model, tokenizer, ask("hello world", tokenizer, 1, logprobs=2, score_prompt=True))
    scored = next(event for event in events if isinstance(event, PromptScored)).scored
    ids = tokenizer("hello world", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    assert scored[0].logprob is None
    for place in range(1, ids.shape[1]):
        assert scored[place].logprob == pytest.approx(float(logprobs[place - 1, ids[0, place]]), abs=1e-4)
        assert len(scored[place].top) == 2


def test_an_activated_lora_is_sought_in_whole_prompts(tiny: Path, tokenizer: Any) -> None:
    """Parts of a prompt would lack the tokens from which on it applies."""
    base = AutoModelForCausalLM.from_pretrained(tiny).eval()
    called = tokenizer("xy")["input_ids"]
    config = LoraConfig(target_modules=["q_proj", "v_proj"], alora_invocation_tokens=called, task_type="CAUSAL_LM")
    tuned = get_peft_model(twin(base), config).eval()
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    models = Models(base, "tiny", lambda *_: tuned)
    models.add("user/activated")
    engine = Engine(models, tokenizer, ApiSettings())

    async def first_score(text: str, **more: Any) -> float:
        request = ask(text, tokenizer, 2, logprobs=0, adapter="user/activated", **more)
        events = await all_of(engine, request)
        return next(event.scored[0].logprob for event in events if isinstance(event, Piece) and event.scored)

    @torch.no_grad()
    def likeliest(text: str) -> float:
        return float(tuned(**tokenizer(text, return_tensors="pt")).logits[0, -1].log_softmax(-1).max())

    async def check() -> None:
        for text, n in (("hello xy", 1), ("hello xy and more xy", 1), ("hello xy", 2)):
            assert await first_score(text, n=n) == pytest.approx(likeliest(text), abs=1e-4)
        with pytest.raises(UnsupportedError, match="begins at its invocation tokens"):
            await first_score("hello xy", score_prompt=True)

    try:
        asyncio.run(check())
    finally:
        engine.close()


def test_counts_and_servers(model: Any, tokenizer: Any, swarm: InProcessSwarm) -> None:
    done = events_of(model, tokenizer, ask("hello", tokenizer, 5))[0][-1]
    assert isinstance(done, Done)
    assert done.prompt_tokens == 5
    assert done.new_tokens <= 5
    assert len(done.servers) == 2
