"""Modules between blocks: the same tokens, gradients and saved adapters on a swarm, offloaded and in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import IDS, MASK
from every_type import SPANS, compare_models, save_type, swarmed
from generation_modes import MODES
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig, SwarmConfig, insert_module
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny, tiny_model

Places = list[dict[str, int]]
PLACES: list[Places] = [
    [{"before": 0}],
    [{"before": 2}],
    [{"after": 3}],
    [{"instead_of": 0}],
    [{"instead_of": 2}, {"after": 0}],
]
each_place = pytest.mark.parametrize("places", PLACES, ids=str)
each_llama = pytest.mark.parametrize("pair", ["llama"], indirect=True)
each_family = pytest.mark.parametrize(
    "pair",
    ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("mixtral_sliding", "gpt_oss"))],
    indirect=True,
)


class Reader(nn.Module):
    """Attends from each token to some documents: what retrieval adds to a model."""

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("documents", torch.randn(5, width, generator=generator), persistent=False)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.out((self.query(hidden) @ self.documents.T).softmax(-1) @ self.documents)


def read(model: PreTrainedModel, places: Places) -> PreTrainedModel:
    """Inserts a reader at each place."""
    for number, place in enumerate(places):
        insert_module(model, f"reader{number}", Reader(model.config.hidden_size, number), **place)
    return model


def adapted(model: PreTrainedModel, places: Places) -> PeftModel:
    """Inserts readers, and adds a LoRA; PEFT trains both."""
    read(model, places)
    names = [f"reader{number}" for number in range(len(places))]
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=names, init_lora_weights=False)
    return get_peft_model(model, config)


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """Returns the gradients of all that trains, by name."""
    model.zero_grad()
    model(IDS, attention_mask=MASK, labels=IDS, **inputs).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.slow
@each_family
@each_place
@torch.no_grad()
def test_every_way_of_decoding(pair, places: Places) -> None:
    assistant = tiny_model("llama", seed=1, num_layers=1)
    remote, local = read(pair.load_remote(), places), read(pair.load_local(), places)
    for name, run in MODES.items():
        assert run(remote, assistant) == run(local, assistant), name
    assert MODES["greedy"](remote, assistant) != MODES["greedy"](pair.local, assistant)


@each_family
@each_place
def test_gradients_and_saved_adapters(pair, places: Places, tmp_path: Path) -> None:
    remote, local = adapted(pair.load_remote(), places), adapted(pair.load_local(), places)
    found, wanted = gradients(remote), gradients(local)
    assert found.keys() == wanted.keys()
    assert any("reader" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
    remote.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(read(pair.load_local(), places), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, remote(IDS).logits)


class Scaled(nn.Module):
    """Fits hidden states of any form: several streams, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


# Layers that return lists and tuples, streams, states beside attention and in objects of the family's own.
TYPES = ("openai-gpt", "bloom", "deepseek_v4", "nemotron_h", "rwkv", "minimax", "modernbert-decoder")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_it_runs_in_models_of_every_kind(model_type: str, tmp_path: Path) -> None:
    directory = save_type(model_type, tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with swarmed(directory, SPANS.get(model_type)) as (remote, _):
        for model in (remote, local):
            insert_module(model, "first", Scaled(), before=2)
            insert_module(model, "second", Scaled(), after=2)
        compare_models(remote, local)


@pytest.mark.parametrize(
    ("model_type", "refusal"),
    [("zaya", "hand on more than hidden states"), ("gemma3n_text", "the nearest place is before block 2")],
)
def test_places_where_more_than_hidden_states_pass_are_refused(model_type: str, refusal: str, tmp_path: Path) -> None:
    with swarmed(save_type(model_type, tmp_path), SPANS.get(model_type)) as (remote, _):
        with pytest.raises((ConfigError, UnsupportedError), match=refusal):
            insert_module(remote, "mine", Scaled(), before=3)
        assert not hasattr(remote.model, "mine")


def test_it_takes_the_place_of_a_block_that_gets_more_than_hidden_states(tmp_path: Path) -> None:
    directory = save_type("gemma3n_text", tmp_path)
    local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    local.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    with swarmed(directory, SPANS.get("gemma3n_text")) as (remote, _), torch.no_grad():
        insert_module(remote, "mine", torch.nn.Identity(), instead_of=1)
        ids = torch.randint(4, 100, (2, 6), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(remote(ids).logits, local(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        assert remote.generate(ids, **options).equal(local.generate(ids, use_cache=False, **options))


@each_llama
def test_a_cache_from_before_is_not_gone_on_with(pair) -> None:
    remote = pair.load_remote()
    with torch.no_grad():
        cache = remote(IDS, use_cache=True).past_key_values
        insert_module(remote, "mine", torch.nn.Identity(), after=0)
        with pytest.raises(UnsupportedError, match=r"now 0 to 0 do \(after insert_module\?\): start with a new cache"):
            remote(IDS[:, :1], past_key_values=cache)


class Killer(LogitsProcessor):
    """Kills a server of the running session after some tokens."""

    def __init__(self, swarm: InProcessSwarm, after: int) -> None:
        self.swarm, self.after, self.killed = swarm, after, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.after -= 1
        if not self.after:
            busy = next(peer for peer, service in self.swarm.services.items() if len(service.sessions))
            self.swarm.kill(busy)
            self.killed += 1
        return scores


def test_a_lost_server_costs_no_token_and_no_gradient(tmp_path: Path) -> None:
    directory, places = save_tiny("mixtral", tmp_path / "model"), PLACES[1]
    local = adapted(AutoModelForCausalLM.from_pretrained(directory, experts_implementation="swarm_table"), places)
    spans = [(0, 2), (2, 4), (0, 3), (1, 4), (0, 4)]
    with InProcessSwarm(directory, spans=spans, config=SwarmConfig(max_retries=6)) as swarm:
        remote = adapted(AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection), places)
        killer = Killer(swarm, 4)
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
        found = remote.generate(IDS, logits_processor=[killer], **options)
        assert killer.killed
        assert torch.equal(found, local.generate(IDS, **options))
        reader = remote.base_model.model.model.reader0.modules_to_save["default"]
        # The first chain has gone and come back when the reader runs, the second has not.
        reader.register_forward_hook(lambda *_: swarm.kill(next(iter(swarm.services))))
        for name, gradient in gradients(remote).items():
            torch.testing.assert_close(gradient, gradients(local)[name], rtol=1e-4, atol=1e-6, msg=name)


def test_offloaded_experts_run_beside_it(tmp_path: Path) -> None:
    directory, places = save_tiny("mixtral", tmp_path / "model"), PLACES[4]
    local = adapted(AutoModelForCausalLM.from_pretrained(directory), places)
    offload = OffloadConfig(fast_bytes=60_000)
    offloaded = adapted(AutoSwarmModelForCausalLM.from_pretrained(directory, offload=offload), places)
    for name, gradient in gradients(offloaded).items():
        torch.testing.assert_close(gradient, gradients(local)[name], rtol=1e-4, atol=1e-6, msg=name)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(offloaded.generate(IDS, **options), local.generate(IDS, **options))


@each_llama
def test_a_copy_runs_modules_of_its_own(pair) -> None:
    model = read(pair.load_remote(), PLACES[1])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = model(IDS).logits
        assert torch.equal(twin(IDS).logits, before)
        twin.model.reader0.out.weight.zero_()
        twin.model.reader0.out.bias.zero_()
        assert torch.equal(model(IDS).logits, before)
        assert torch.equal(twin(IDS).logits, pair.remote(IDS).logits)


@each_llama
@pytest.mark.parametrize("is_remote", [True, False])
def test_wrong_places_are_refused(pair, is_remote: bool) -> None:
    model = pair.load_remote() if is_remote else pair.load_local()
    module = nn.Identity()
    for place, words in (
        ({}, "expected one of before="),
        ({"before": 1, "after": 1}, "got before=1, after=1"),
        ({"before": 4}, "has the blocks 0 to 3"),
        ({"after": -1}, "has the blocks 0 to 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            insert_module(model, "reader", module, **place)
    for name in ("layers", "a.b", ""):
        with pytest.raises(ConfigError, match="expected a Python name"):
            insert_module(model, name, module, before=1)
    with pytest.raises(ConfigError, match="module is a function: expected a torch"):
        insert_module(model, "reader", lambda hidden: hidden, before=1)
    assert not any(parameter for parameter in model.modules() if parameter is module)
    insert_module(model, "narrow", nn.Linear(model.config.hidden_size, 3), before=1)
    with pytest.raises(ConfigError, match=r"'narrow' beside block 1 returned \[2, 8, 3\], expected .* \[2, 8, "):
        model(IDS)


@each_llama
def test_the_first_chain_opens_no_session_while_training(pair) -> None:
    model = adapted(pair.load_remote(), [{"before": 2}])
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "reader0.modules_to_save" in name
    output = model(IDS, labels=IDS, use_cache=True)
    assert not any(len(service.sessions) for service in pair.swarm.services.values())
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
