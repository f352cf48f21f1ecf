"""A lost server costs time, never a token and never a gradient."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.errors import MissingBlocksError, SwarmError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.testing.in_process import InProcessSwarm

# Any two servers may die; the spans overlap, so the lost blocks are cut differently afterwards.
SPANS = [(0, 2), (2, 4), (1, 4), (0, 3), (0, 1), (3, 4)]
QUICK = SwarmConfig(max_retries=6, request_timeout_s=20.0)


@pytest.fixture(scope="module")
def local(tiny_mixtral: Path) -> PreTrainedModel:
    # Other functions of experts round otherwise.
    return AutoModelForCausalLM.from_pretrained(tiny_mixtral, experts_implementation="swarm_table").eval()


@pytest.fixture
def swarm(tiny_mixtral: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(tiny_mixtral, spans=SPANS, config=QUICK) as running:
        yield running


@pytest.fixture
def remote(tiny_mixtral: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)


class Killer(LogitsProcessor):
    """Kills the server that the running session uses, after some tokens."""

    def __init__(self, swarm: InProcessSwarm, after: set[int]) -> None:
        self.swarm = swarm
        self.after = after
        self.calls = 0
        self.killed: list[str] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.after:
            busy = [peer for peer, service in self.swarm.services.items() if len(service.sessions)]
            victim = next(peer for peer in busy if peer not in self.killed)
            self.swarm.kill(victim)
            self.killed.append(victim)
        return scores


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"do_sample": False}, id="greedy"),
        pytest.param({"num_beams": 3, "do_sample": False}, id="beam"),
        pytest.param({"do_sample": False, "prompt_lookup_num_tokens": 3}, id="prompt-lookup"),
    ],
)
@pytest.mark.parametrize("after", [{1}, {5}, {2, 6}], ids=["first", "middle", "two"])
def test_a_server_lost_during_generation_changes_no_token(
    local: PreTrainedModel, remote: PreTrainedModel, swarm: InProcessSwarm, mode: dict[str, Any], after: set[int]
) -> None:
    prompt = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(0))
    expected = local.generate(prompt, max_new_tokens=10, **mode)
    killer = Killer(swarm, after)
    found = remote.generate(prompt, max_new_tokens=10, logits_processor=[killer], **mode)
    assert killer.killed
    assert torch.equal(found, expected)


def test_a_padded_batch_survives_too(local: PreTrainedModel, remote: PreTrainedModel, swarm: InProcessSwarm) -> None:
    prompt = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    expected = local.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    killer = Killer(swarm, {4})
    found = remote.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, logits_processor=[killer])
    assert killer.killed
    assert torch.equal(found, expected)


def test_the_neighbors_of_a_lost_server_are_known_where_another_one_is_chosen(
    tiny_mixtral: Path, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[range, str, str]] = []
    chain = SwarmView.chain

    async def plan(self: SwarmView, blocks: range, demand: Demand, **settings: Any) -> list[SpanChoice]:
        asked.append((blocks, demand.sender, demand.receiver))
        return await chain(self, blocks, demand, **settings)

    monkeypatch.setattr(SwarmView, "chain", plan)
    spans = [(0, 1), (1, 3), (1, 3), (3, 4)]
    prompt = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(0))
    with InProcessSwarm(tiny_mixtral, spans=spans, config=QUICK) as swarm:
        first, *middle, last = swarm.peers
        killer = Killer(swarm, {2})
        killer.killed = [first]  # spared
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        found = remote.generate(prompt, max_new_tokens=4, do_sample=False, logits_processor=[killer])
    assert killer.killed[1] in middle
    assert torch.equal(found, local.generate(prompt, max_new_tokens=4, do_sample=False))
    assert set(asked) == {(range(4), "", ""), (range(1, 3), first, last)}


def test_a_server_lost_between_forward_and_backward_changes_no_gradient(
    local: PreTrainedModel, remote: PreTrainedModel, swarm: InProcessSwarm
) -> None:
    embeds = torch.randn(2, 5, local.config.hidden_size, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(3))
    here, there = embeds.clone().requires_grad_(), embeds.clone().requires_grad_()
    local(inputs_embeds=here, labels=labels).loss.backward()
    loss = remote(inputs_embeds=there, labels=labels).loss
    used = [peer for peer, service in swarm.services.items() if len(service.activations)]
    assert used
    swarm.kill(used[0])
    loss.backward()
    check_gradient(there, here)


def test_dropped_graphs_are_recomputed(tiny_mixtral: Path, local: PreTrainedModel) -> None:
    embeds = torch.randn(1, 4, local.config.hidden_size, generator=torch.Generator().manual_seed(4))
    here, there = embeds.clone().requires_grad_(), embeds.clone().requires_grad_()
    local(inputs_embeds=here).logits.square().sum().backward()
    with InProcessSwarm(tiny_mixtral, config=QUICK) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        logits = remote(inputs_embeds=there).logits
        for service in swarm.services.values():
            assert len(service.activations) == 1
            service.activations.clear()
        logits.square().sum().backward()
    check_gradient(there, here)


def check_gradient(found: Tensor, expected: Tensor) -> None:
    """Compares gradients: sums over some hundred elements are off by the scale of the largest, not by their own."""
    assert found.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-6 * float(expected.grad.abs().max()))


def test_the_last_server_of_a_block_is_missed_by_name(tiny_mixtral: Path) -> None:
    with InProcessSwarm(tiny_mixtral, config=SwarmConfig(max_retries=1)) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        swarm.kill("peer1")
        with pytest.raises(MissingBlocksError, match=r"no living server holds blocks 2:4 of ") as raised:
            remote.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
        command = f"swarm serve {shlex.quote(str(tiny_mixtral))} --blocks 2:4 --initial-peers ADDRESS"
        assert str(raised.value).endswith(f"; serve them with: {command}")


def test_a_server_that_comes_back_is_used_again(tiny_mixtral: Path, local: PreTrainedModel) -> None:
    prompt = torch.tensor([[5, 6, 7]])
    expected = local.generate(prompt, max_new_tokens=3, do_sample=False)
    with InProcessSwarm(tiny_mixtral, config=SwarmConfig(max_retries=8)) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        swarm.kill("peer1")
        back = threading.Timer(0.5, swarm.transport.revive, ["peer1"])
        back.start()
        try:
            found = remote.generate(prompt, max_new_tokens=3, do_sample=False)
        finally:
            back.join()
    assert torch.equal(found, expected)


def test_a_session_goes_on_after_a_refused_step(local: PreTrainedModel, remote: PreTrainedModel) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = local(torch.tensor([[5, 6, 7, 8, 9]])).logits[:, -1]
        cache = remote(prompt, use_cache=True).past_key_values
        with pytest.raises(SwarmError, match=r"NaN|finite"):
            remote(inputs_embeds=torch.full((1, 1, local.config.hidden_size), float("nan")), past_key_values=cache)
        found = remote(torch.tensor([[9]]), past_key_values=cache).logits[:, -1]
    # One prefill and one token against one prefill: another attention kernel shape, 1e-6 in fp32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
