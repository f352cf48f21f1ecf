"""Prompts in chunks that several servers work on at once: the same tokens, whoever is lost while they are under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import push_kit
import pytest
import torch
from peft import LoraConfig, get_peft_model
from push_kit import (
    LONG_S,
    REPLICAS,
    SHORT_S,
    SPANS,
    in_session,
    kill,
    refused,
    remote,
    set_patience,
    strike_at_push,
    swarm_of,
    taken,
)
from transformers import AutoModelForCausalLM, PreTrainedModel
from type_models import save_type

from recipes.benchmarks.links.swarm import DistantSwarm
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.checkpoint.tiny import WINDOW
from swarm_plugins.client.sessions import pipe
from swarm_plugins.client.sessions.pipe import num_chunks
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.testing import save_tiny
from swarm_plugins.transport.server_info import ServerInfo

PROMPT = 25  # not a multiple of the chunks
NUM_CHUNKS = 4
IDS = (torch.arange(2 * PROMPT) % 90 + 5).reshape(2, PROMPT)
NEW_TOKENS = 3
PUSHES = pytest.mark.parametrize("push", ["on", "off"])


@pytest.fixture(scope="module")
def want(tiny_llama: Path) -> torch.Tensor:
    return decode(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_patience(monkeypatch, LONG_S)
    monkeypatch.setattr(pipe, "_LEAST_TOKENS", 1)
    monkeypatch.setattr(pipe, "num_chunks", lambda *_: NUM_CHUNKS)
    monkeypatch.setattr(pipe, "page_size", min)


def decode(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    return push_kit.decode(model, IDS, NEW_TOKENS, **settings)


def with_lora(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).eval()


def before_steps(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int, StepInputs], Awaitable[None]]
) -> list[StepInputs]:
    """Has something happen before each step that a server computes; returns the steps."""
    steps: list[StepInputs] = []
    compute = Scheduler.step

    async def step(self: Scheduler, inputs: StepInputs, **settings: Any) -> object:
        steps.append(inputs)
        await act(len(steps), inputs)
        return await compute(self, inputs, **settings)

    monkeypatch.setattr(Scheduler, "step", step)
    return steps


async def ignore(number: int, inputs: StepInputs) -> None:
    """Has nothing happen."""


@PUSHES
def test_the_chunks_of_a_prompt_give_the_same_tokens(
    tiny_llama: Path, want: torch.Tensor, push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []

    async def note(number: int, inputs: StepInputs) -> None:
        found.append((inputs.blocks.start, inputs.hidden.shape[1]))

    before_steps(monkeypatch, note)
    with swarm_of(tiny_llama, push=push) as swarm:
        assert decode(remote(swarm)).equal(want)
        counts = taken(swarm), refused(swarm)
    for start, _ in SPANS:
        assert [tokens for first, tokens in found if first == start] == [7, 7, 7, 4, 1, 1]
    num_pushed = NUM_CHUNKS + NEW_TOKENS - 1 if push == "on" else 0
    assert counts == ([0, num_pushed, num_pushed], [0, 0, 0])


@PUSHES
def test_no_chunk_ends_before_the_rotary_factors_of_the_whole_prompt(
    tmp_path: Path, push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_type("phi3/longrope", tmp_path)
    steps = before_steps(monkeypatch, ignore)
    with swarm_of(directory, push=push) as swarm:
        assert decode(remote(swarm)).equal(decode(AutoModelForCausalLM.from_pretrained(directory)))
    assert [one.hidden.shape[1] for one in steps if one.blocks.start == 0] == [WINDOW + 1, 7, 7, 2, 1, 1]


@PUSHES
def test_all_servers_work_at_once(
    tiny_llama: Path, want: torch.Tensor, push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun = threading.Event()

    async def wait(number: int, inputs: StepInputs) -> None:
        if inputs.blocks.start == SPANS[-1][0]:
            has_begun.set()
        elif inputs.blocks.start == 0 and inputs.cache.length > 0 and inputs.hidden.shape[1] > 1:
            # The first server's second chunk ends once the last server has begun with the first chunk.
            assert await asyncio.to_thread(has_begun.wait, 30)

    before_steps(monkeypatch, wait)
    with swarm_of(tiny_llama, push=push) as swarm:
        assert decode(remote(swarm)).equal(want)
        assert has_begun.is_set()


@pytest.mark.parametrize("is_sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("send_number", [1, 2, 4, 7])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_server_that_is_lost_between_chunks_costs_no_token(
    tiny_llama: Path, want: torch.Tensor, is_sent: bool, send_number: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swarm_of(tiny_llama, REPLICAS, push="on") as swarm:
        pushes = strike_at_push(monkeypatch, send_number, lambda: strike(swarm, victim), is_sent=is_sent)
        assert decode(remote(swarm)).equal(want)
        assert len(pushes) >= send_number


@pytest.mark.parametrize("step_number", [1, 3, 5, 8])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_server_that_is_lost_without_pushes_costs_no_token(
    tiny_llama: Path, want: torch.Tensor, step_number: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swarm_of(tiny_llama, REPLICAS, push="off") as swarm:

        async def strike_once(number: int, inputs: StepInputs) -> None:
            if number == step_number:
                await strike(swarm, victim)

        steps = before_steps(monkeypatch, strike_once)
        assert decode(remote(swarm)).equal(want)
        assert len(steps) >= step_number


async def strike(swarm: DistantSwarm, victim: int) -> None:
    chain = in_session(swarm)
    await kill(swarm, chain[min(victim, len(chain) - 1)])


def test_outputs_that_do_not_arrive_come_from_the_client(
    tiny_llama: Path, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_patience(monkeypatch, SHORT_S)
    with swarm_of(tiny_llama, push="on") as swarm:
        swarm.transport.line(swarm.peers[1], swarm.peers[0]).loses_requests = True
        assert decode(remote(swarm)).equal(want)
        assert swarm.services[swarm.peers[1]].pushes.num_taken >= NUM_CHUNKS, "by the client"


@PUSHES
def test_an_adapter_that_a_server_drops_between_chunks_is_uploaded_again(
    tiny_llama: Path, push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = with_lora(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))
    want = decode(local)
    with swarm_of(tiny_llama, push=push) as swarm:
        far = with_lora(remote(swarm))

        async def drop(number: int, inputs: StepInputs) -> None:
            if number == 4:
                for service in swarm.services.values():
                    service.adapters.clear()

        before_steps(monkeypatch, drop)
        assert decode(far).equal(want)


@PUSHES
def test_a_prompt_too_long_for_one_message_of_a_server(tiny_llama: Path, want: torch.Tensor, push: str) -> None:
    with swarm_of(tiny_llama, push=push, min_batch_tokens=1) as swarm:
        service = swarm.services[swarm.peers[1]]
        info: Callable[[], ServerInfo] = service.info
        service.info = lambda: msgspec.structs.replace(info(), max_batch_tokens=6)  # of two rows: three of each
        assert decode(remote(swarm)).equal(want)
        chunks = -(-PROMPT // 3)
        assert service.pushes.num_taken == (chunks + NEW_TOKENS - 1 if push == "on" else 0)


@PUSHES
def test_states_and_routers_of_all_chunks_are_joined(tmp_path: Path, push: str) -> None:
    mixtral = save_tiny("mixtral", tmp_path / "model")
    settings = {"output_hidden_states": True, "output_router_logits": True, "use_cache": True}
    with torch.no_grad():
        local = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)(IDS, **settings)
        with swarm_of(mixtral, [(0, 2), (2, 4)], push=push) as swarm:
            found = remote(swarm)(IDS, **settings)
    assert len(found.hidden_states) == len(local.hidden_states)
    for name in ("hidden_states", "router_logits"):
        for got, due in zip(found[name], local[name], strict=True):
            torch.testing.assert_close(got, due)


def test_how_many_chunks_pay() -> None:
    # 3 spans, 1,024 tokens of 1 ms, 8 ms for a chunk whatever its size: sqrt(2 * 1.024 / 0.008).
    assert num_chunks(3, 1024, 0.008, 0.001) == 8
    assert num_chunks(3, 16, 0.03, 0.001) == 1
    assert num_chunks(1, 1024, 0.008, 0.001) == 1
    times = {count: (count + 2) * (0.02 + 0.5 / count) for count in range(1, 17)}
    found = num_chunks(3, 500, 0.02, 0.001)
    assert times[found] <= 1.05 * min(times.values()) < times[found - 1], "the fewest that come near the best"
