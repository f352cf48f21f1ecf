"""`swarm api` as its users have it: a process, real servers, a Hub, and OpenAI's clients."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from api_kit import api, save_model
from openai import AsyncOpenAI, OpenAI
from peft import LoraConfig, get_peft_model
from programs import Programs
from transformers import AutoModelForCausalLM

from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.local_hub import LocalHub

pytestmark = pytest.mark.swarm

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
WANTED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}


def publish(base: Path, hub: LocalHub, repo: str) -> None:
    """Publishes an adapter that changes answers."""
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_pretrained(base)
    tuned = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, weight in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.5)
    publisher = Publishing(repo, endpoint=hub.endpoint, token="any")
    publisher.begin(tuned, base)
    publisher.publish("end", 1, {})
    publisher.finish()


def text_of(client: OpenAI, model: str) -> str:
    return client.chat.completions.create(model=model, **WANTED).choices[0].message.content or ""


async def ask_in_every_way(url: str, model: str) -> list[str]:
    """Returns the same answer by a chat, a stream of it, and a response, all at once."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def whole() -> str:
            answer = await client.chat.completions.create(model=model, **WANTED)
            return answer.choices[0].message.content or ""

        async def streamed() -> str:
            stream = await client.chat.completions.create(model=model, stream=True, **WANTED)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def response() -> str:
            found = await client.responses.create(model=model, input="Hello", max_output_tokens=12, temperature=0)
            return found.output_text

        return await asyncio.gather(whole(), streamed(), response())


def test_two_servers_an_async_client_and_adapters_of_the_hub(tmp_path: Path, programs: Programs) -> None:
    base = save_model("llama", tmp_path / "base", num_layers=2)
    other = save_model("llama", tmp_path / "other", num_layers=2, seed=1)
    with LocalHub() as hub:
        publish(base, hub, "me/adapter")
        publish(other, hub, "me/of-another")
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_text("of this swarm alone")
        arguments = (str(base), "--local-swarm", "2", "--secret-file", str(secret), "--name", "tiny", "--load-adapters")
        with (
            api(programs, *arguments, hub=hub, home=tmp_path) as url,
            OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            expected = text_of(client, "tiny")
            assert expected
            assert asyncio.run(ask_in_every_way(url, "tiny")) == [expected] * 3
            assert text_of(client, "tiny:me/adapter@v1") not in ("", expected)
            with pytest.raises(openai.BadRequestError, match="me/of-another@v1 was made for other@"):
                text_of(client, "tiny:me/of-another")
            with pytest.raises(openai.NotFoundError, match="me/nothing"):
                text_of(client, "tiny:me/nothing")
            assert [one.id for one in client.models.list()] == ["tiny", "tiny:me/adapter@v1"]
            assert text_of(client, "tiny") == expected


def test_an_offloaded_model(tmp_path: Path, programs: Programs) -> None:
    model = save_model("mixtral", tmp_path / "moe", num_layers=2)
    with api(programs, str(model), "--offload", "fast=1MB", home=tmp_path) as url:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            expected = text_of(client, "moe")
        assert asyncio.run(ask_in_every_way(url, "moe")) == [expected] * 3


def test_the_bench_counts_clients_and_the_second_turn(tmp_path: Path, programs: Programs) -> None:
    model = save_model("llama", tmp_path / "base", num_layers=2)
    path = tmp_path / "figures.json"
    words = ["--servers", "1", "--clients", "2", "--chars", "100", "--new-tokens", "4", "--rounds", "1"]
    command = [sys.executable, "-m", "recipes.benchmarks", "api", *words, "--model", str(model)]
    result = programs.run([*command, "--json", path], timeout=200)
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())["figures"]
    names = ["2 clients at once, over one", "first token of the second turn, over the first turn's"]
    assert [one["name"] for one in figures] == names
    assert all(one["local"] > 0 and one["swarm"] > 0 for one in figures)
