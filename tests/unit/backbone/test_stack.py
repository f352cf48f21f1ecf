"""The layer loop becomes one pass through the chain, whoever calls it and from whichever thread."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.backbone import context as context_module
from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

IDS = torch.tensor([[5, 17, 99, 23]])
# Another attention kernel than the local model's: 1e-6 for activations of size one.
FP32 = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def requests(swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what each server runs."""
    counted: Counter[str] = Counter()

    def counting(name: str, run: Any) -> Any:
        def call(*args: Any) -> Any:
            counted[name] += 1
            return run(*args)

        return call

    for peer, service in swarm.services.items():
        for method in ("forward", "step"):
            run = getattr(service.runner, method)
            monkeypatch.setattr(service.runner, method, counting(f"{peer} {method}", run))
    return counted


@pytest.mark.parametrize("outputs", [{}, {"output_hidden_states": True, "output_router_logits": True}])
@torch.no_grad()
def test_each_server_is_asked_once_a_pass(remote: PreTrainedModel, requests: Counter[str], outputs: Any) -> None:
    remote(IDS, use_cache=False, **outputs)
    assert requests == {"peer0 forward": 1, "peer1 forward": 1}
    requests.clear()
    remote.generate(IDS, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert requests == {"peer0 step": 5, "peer1 step": 5}


@torch.no_grad()
def test_a_block_called_alone_runs_alone(
    remote: PreTrainedModel, local: PreTrainedModel, requests: Counter[str]
) -> None:
    states = local(IDS, output_hidden_states=True).hidden_states
    got = remote.model.layers[1](states[1], position_ids=torch.arange(4)[None])
    torch.testing.assert_close(got, states[2], **FP32)
    assert requests == {"peer0 forward": 1}


@torch.no_grad()
def test_a_block_called_alone_with_a_cache_is_refused(remote: PreTrainedModel) -> None:
    cache = remote(IDS).past_key_values
    with pytest.raises(UnsupportedError, match="block 2 was called alone with a cache; call the whole model"):
        remote.model.layers[2](torch.zeros(1, 1, 32), past_key_values=cache)


@torch.no_grad()
def test_a_model_of_one_block_works(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path, num_layers=1)
    local = AutoModelForCausalLM.from_pretrained(directory).eval()
    with InProcessSwarm(directory, spans=[(0, 1)]) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        for options in ({}, {"output_hidden_states": True}):
            got, want = remote(IDS, **options), local(IDS, **options)
            torch.testing.assert_close(got.logits, want.logits, **FP32)
            if options:
                torch.testing.assert_close(got.hidden_states, want.hidden_states, **FP32)


def test_threads_do_not_disturb_each_other(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    prompts = [torch.tensor([[start, start + 7, start + 20]]) for start in (10, 30, 50, 70)]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = [local.generate(prompt, **options) for prompt in prompts]
    got: dict[int, torch.Tensor] = {}

    def run(index: int) -> None:
        got[index] = remote.generate(prompts[index], **options)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(got[index], want[index]) for index in range(len(prompts)))


@torch.no_grad()
def test_two_models_of_one_connection_work_side_by_side(
    remote: PreTrainedModel, local: PreTrainedModel, directory: Path, swarm: InProcessSwarm
) -> None:
    other = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
    caches = [remote(IDS).past_key_values, other(IDS.flip(1)).past_key_values]
    got = [
        model(IDS[:, :1], past_key_values=cache).logits for model, cache in zip((remote, other), caches, strict=True)
    ]
    want = [local(torch.cat([ids, IDS[:, :1]], dim=1)).logits[:, -1:] for ids in (IDS, IDS.flip(1))]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **FP32)


def test_settings_connect_at_the_first_use_and_once(monkeypatch: pytest.MonkeyPatch, remote: PreTrainedModel) -> None:
    asked: list[tuple[str, ...]] = []
    live = remote.model.layers[0].swarm_stack

    def connect(peers: tuple[str, ...], config: SwarmConfig) -> Any:
        asked.append(peers)
        return live.connection

    monkeypatch.setattr(context_module, "connect", connect)
    settings = SwarmSettings(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/QmOne",), config=SwarmConfig())
    stack = RemoteStack(version=live.version, num_blocks=4, settings=settings)
    assert asked == []
    stack.check()
    stack.check()
    assert asked == [settings.initial_peers]
