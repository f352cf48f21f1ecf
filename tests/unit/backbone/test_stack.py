"""The layer loop becomes one pass through the chain, whoever calls it and from whichever thread."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from type_models import save_type

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.backbone import context as context_module
from swarm_plugins.backbone import stack as stack_module
from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.backbone.hooks import counted, num_changes, seen_by_hooks
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


def test_a_client_knows_which_router_logits_to_expect(remote: PreTrainedModel) -> None:
    assert remote.model.layers[0].swarm_stack.routers == dict.fromkeys(range(4), 4)


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


@torch.no_grad()
def test_a_model_that_ends_within_its_blocks_is_refused(
    remote: PreTrainedModel, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(remote.config, "num_hidden_layers", 3)
        with pytest.raises(UnsupportedError, match=r"ended before block 3 .*: set num_hidden_layers to 4 again, and"):
            remote(IDS)
    torch.testing.assert_close(remote(IDS).logits, local(IDS).logits, **FP32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
def test_a_compiled_model_trains_as_it_does_uncompiled(remote: PreTrainedModel) -> None:
    model = get_peft_model(remote, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    found = []
    for one in (model, torch.compile(model, backend="eager")):
        loss = one(input_ids=IDS, labels=IDS).loss
        found.append((loss, torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])))
    torch.compiler.reset()
    torch.testing.assert_close(*found)


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


def _read_by_hooks(model: PreTrainedModel, layers: list[int], *, use_cache: bool) -> list[torch.Tensor]:
    """Runs a prompt, and a token after it; returns what hooks before and after some layers have seen."""
    seen: list[torch.Tensor] = []
    handles = [
        handle
        for layer in (model.model.layers[index] for index in layers)
        for handle in (
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())),
            layer.register_forward_hook(lambda *call: seen.append(call[-1].clone())),
        )
    ]
    output = model(IDS, use_cache=use_cache)
    if use_cache:
        model(IDS[:, :1], past_key_values=output.past_key_values)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [2]], ids=str)
@torch.no_grad()
def test_hooks_that_read_see_what_they_see_locally(
    remote: PreTrainedModel, local: PreTrainedModel, layers: list[int], use_cache: bool
) -> None:
    got, want = (_read_by_hooks(model, layers, use_cache=use_cache) for model in (remote, local))
    assert len(got) == len(layers) * 2 * (1 + use_cache)
    torch.testing.assert_close(got, want, **FP32)


@torch.no_grad()
def test_hooks_do_not_see_a_run_that_only_notes_side_inputs(tmp_path: Path) -> None:
    directory = save_type("gemma3n_text", tmp_path)
    with InProcessSwarm(directory, spans=[(0, 6)]) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
        assert len(_read_by_hooks(model, [0, 1], use_cache=False)) == 4


@torch.no_grad()
def test_only_hooks_of_the_users_make_servers_send_hidden_states(remote: PreTrainedModel) -> None:
    layers = list(remote.model.layers)
    remote(IDS, output_hidden_states=True)
    assert all(layer._forward_hooks for layer in layers), "those of transformers stay"
    assert seen_by_hooks(range(4), layers) == frozenset()
    layers[0].register_forward_pre_hook(lambda *_: None)
    layers[3].register_forward_hook(lambda *_: None)
    assert seen_by_hooks(range(4), layers) == frozenset(), "the client has the chain's input and output anyway"
    layers[2].register_forward_pre_hook(lambda *_: None)
    layers[2].register_forward_hook(lambda *_: None)
    assert seen_by_hooks(range(4), layers) == {1, 2}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_hooks_that_change_hidden_states_in_place_are_refused_before_the_end(
    remote: PreTrainedModel, local: PreTrainedModel, mode: Any
) -> None:
    def change(*call: Any) -> None:
        hidden = call[-1][0] if isinstance(call[-1], tuple) else call[-1]
        hidden += torch.linspace(-1, 1, 32)

    with mode():
        for index, register in ((1, "register_forward_hook"), (2, "register_forward_pre_hook")):
            handle = getattr(remote.model.layers[index], register)(change)
            with pytest.raises(UnsupportedError, match=r"changed between remote blocks 1 and 2 \(by a hook\?\)"):
                remote(IDS)
            handle.remove()
        handles = [model.model.layers[3].register_forward_hook(change) for model in (remote, local)]
        got, want = remote(IDS).logits, local(IDS).logits
        handles[1].remove()
        torch.testing.assert_close(got, want, **FP32)


@torch.inference_mode()
def test_changes_in_place_count_in_inference_mode() -> None:
    made = torch.zeros(3)
    one = counted(made)
    before = num_changes(one)
    one += 1
    assert num_changes(made) is None
    assert before is not None
    assert num_changes(one) == before + 1


@torch.no_grad()
def test_a_call_that_ctrl_c_has_ended_is_noticed_by_the_next(
    remote: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Cache] = []
    monkeypatch.setattr(stack_module, "note_failure", failed.append)
    cache = DynamicCache(config=remote.config)
    remote.model.layers[0].swarm_stack._local.called_with = {"past_key_values": cache}
    for _ in range(2):
        remote(IDS, use_cache=False)
    assert failed == [cache]
