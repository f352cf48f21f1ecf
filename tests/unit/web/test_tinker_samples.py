"""What a request for samples may ask of the engine, what it gets, and how many of a key ask it at once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.models import Models
from swarm_plugins.web.engine.request import Finished, Generation, Scored
from swarm_plugins.web.settings import ApiSettings
from swarm_plugins.web.tinker.bodies import CreateModel, Sample
from swarm_plugins.web.tinker.groups import Drawn
from swarm_plugins.web.tinker.messages import parsed
from swarm_plugins.web.tinker.samples import Draws, generation_of, response_of


def sample(params: dict[str, Any], **more: Any) -> Sample:
    body = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": params, **more}
    return msgspec.json.decode(json.dumps(body), type=Sample)


def generation(stop: Any) -> Generation:
    return generation_of(sample({"stop": stop}), adapter=None, tenant="anna", context=64, vocabulary=128)


def test_stops_are_texts_and_tokens() -> None:
    found = generation([*(f"{number}" * 10 for number in range(16)), *range(64)])
    assert (len(found.stop), len(found.stop_tokens), found.never_ends) == (16, 64, False)
    assert generation("x" * 200).stop == ("x" * 200,)
    assert generation([]).never_ends


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a"] * 17, "stop has 17 texts, the longest of 1 characters: at most 16 of 1 to 200 are possible"),
        ("x" * 201, "stop has 1 texts, the longest of 201 characters"),
        (["a", ""], "stop has 2 texts, the longest of 1 characters: at most 16 of 1 to 200"),
        (list(range(65)), "stop has 65 tokens: at most 64 are possible"),
    ],
)
def test_stops_are_bounded(stop: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation(stop)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 10**400])
def test_a_seed_has_64_bits(seed: int) -> None:
    config = {"rank": 1, "seed": seed}
    model = {"session_id": "a", "model_seq_id": 0, "base_model": "b", "lora_config": config}
    with pytest.raises(msgspec.ValidationError, match=r"seed`"):
        sample({"seed": seed})
    with pytest.raises(msgspec.ValidationError, match=r"seed`"):
        msgspec.json.decode(json.dumps(model), type=CreateModel)
    assert sample({"seed": (1 << 64) - 1}).sampling_params.seed == (1 << 64) - 1


@pytest.mark.parametrize(("count", "num_known"), [(None, 3), (1, 1), (2, 2), (9, 3)])
def test_scores_of_the_last_tokens_of_a_prompt(count: int | None, num_known: int) -> None:
    prompt = (Scored(5, None), *(Scored(token, -1.0, ((7, -0.5), (token, -1.0))) for token in (6, 8, 9)))
    asked = sample({}, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=count)
    found = parsed("SampleResponse", response_of(Drawn((), prompt), asked), 64)
    logprobs = np.frombuffer(found.prompt_logprobs, "<f4")
    top = np.frombuffer(found.topk_prompt_logprobs.logprobs, "<f4").reshape(4, 2)
    assert (~np.isnan(logprobs)).tolist() == [False] * (4 - num_known) + [True] * num_known
    assert top.tolist() == [[-99999.0] * 2] * (4 - num_known) + [[-0.5, -1.0]] * num_known


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_special_token_may_be_a_stop_text(model: Any, tokenizer: Any) -> None:
    engine = Engine(Models(model, "tiny", lambda *_: None), tokenizer, ApiSettings())
    drawn = await Draws(engine).draw(replace(generation("<s>"), max_new_tokens=4, logit_bias={1: 100.0}))
    engine.close()
    # What ends an answer is part of it.
    assert [end for end, _ in drawn.samples] == [Finished(0, "stop", (1,))]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_key_has_so_many_requests_at_the_engine_at_once() -> None:
    running, most, free = Counter[str](), Counter[str](), asyncio.Event()

    async def generate(request: Generation) -> AsyncIterator[Finished]:
        running[request.tenant] += 1
        most[request.tenant] = max(most[request.tenant], running[request.tenant])
        await free.wait()
        running[request.tenant] -= 1
        yield Finished(0, "stop", ())

    engine: Any = SimpleNamespace(generate=generate, settings=SimpleNamespace(most_of_a_key=2))
    draws = Draws(engine)
    asked = [replace(generation(None), tenant=tenant) for tenant in ("anna",) * 10 + ("ben",)]
    tasks = [asyncio.create_task(draws.draw(one)) for one in asked]
    await asyncio.sleep(0)
    assert running == {"anna": 2, "ben": 1}
    free.set()
    assert len(await asyncio.gather(*tasks)) == 11
    assert most["anna"] == 2
