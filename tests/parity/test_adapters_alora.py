"""aLoRA: an adapter that begins at its invocation tokens, in training, in generation, and after a server has died."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import IDS, MASK, TOLERANCE, fill, recomputed_error, trained, tuned
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm

# PEFT says so of a bias next to a layer without one.
pytestmark = pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
# In both rows, at different places, and once only.
INVOCATION = [64, 9]


def alora(tokens: list[int] | None = None, **changes: Any) -> LoraConfig:
    """LoRA on attention that begins at some tokens."""
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    return LoraConfig(alora_invocation_tokens=INVOCATION if tokens is None else tokens, **options)


@pytest.mark.parametrize(
    ("pair", "config"),
    [
        pytest.param("llama", alora(), id="llama"),
        pytest.param("llama", alora([12, 101]), id="llama-one-row"),
        pytest.param("llama", alora([1, 2, 3]), id="llama-no-row"),
        pytest.param("llama", alora(lora_bias=True), id="llama-bias"),
        pytest.param("mixtral", alora(), id="mixtral"),
    ],
    indirect=["pair"],
    scope="session",
)
def test_loss_gradients_and_text_are_the_local_ones(pair, config: LoraConfig) -> None:
    local, remote = tuned(pair.load_local(), config), tuned(pair.load_remote(), config)
    assert recomputed_error(pair, local, remote, TOLERANCE) <= TOLERANCE
    inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    assert remote.generate(**inputs).tolist() == local.generate(**inputs).tolist()


@pytest.mark.parametrize("pair", ["llama", "mixtral"], indirect=True, scope="session")
def test_gradient_checkpointing_changes_nothing(pair) -> None:
    local, remote = (tuned(base, alora()).train() for base in (pair.load_local(), pair.load_remote()))
    remote.activation_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):  # PEFT's hooks last until a backward that never comes to them
        for model in (local, remote):
            model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for (name, one), other in zip(local.named_parameters(), remote.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(other.grad, one.grad, atol=TOLERANCE, rtol=TOLERANCE, msg=name)


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
@torch.no_grad()
def test_rows_with_adapters_of_different_kinds(pair) -> None:
    models = []
    for base in (pair.load_local(), pair.load_remote()):
        model = tuned(base, alora())
        model.add_adapter("plain", LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        model.set_adapter("plain")
        fill(model)
        models.append(model)
    ids, mask = IDS[[0, 1, 0]], MASK[[0, 1, 0]]
    for names in (["default", "plain", "__base__"], ["plain", "default", "default"]):
        local, remote = (model(input_ids=ids, attention_mask=mask, adapter_names=names).logits for model in models)
        torch.testing.assert_close(remote, local, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
@torch.no_grad()
def test_what_cannot_work_is_refused(pair) -> None:
    model = tuned(pair.load_remote(), alora())
    with pytest.raises(UnsupportedError, match="3 aLoRA offsets for a batch of 2 rows"):
        model(input_ids=IDS, attention_mask=MASK, alora_offsets=[1, 2, 3])
    model.add_adapter("plain", LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "plain"])
    with pytest.raises(UnsupportedError, match=r"aLoRA together with other adapters \(default, plain\)"):
        model(input_ids=IDS, attention_mask=MASK)


class Killer(LogitsProcessor):
    """Kills a server of the running generation after some tokens."""

    def __init__(self, swarm: InProcessSwarm, after: int) -> None:
        self.swarm = swarm
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.swarm.kill(next(peer for peer, service in self.swarm.services.items() if len(service.sessions)))
        return scores


@pytest.fixture
def swarm(tiny_llama: Path) -> Iterator[InProcessSwarm]:
    config = SwarmConfig(max_retries=6, request_timeout_s=20.0)
    with InProcessSwarm(tiny_llama, spans=[(0, 2), (2, 4), (0, 3), (1, 4)], config=config) as running:
        yield running


def test_a_replayed_generation_begins_where_it_began(tiny_llama: Path, swarm: InProcessSwarm) -> None:
    remote = tuned(AutoSwarmModelForCausalLM.from_pretrained(tiny_llama, connection=swarm.connection), alora())
    local = tuned(AutoModelForCausalLM.from_pretrained(tiny_llama).eval(), alora())
    inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 10, "do_sample": False}
    expected = local.generate(**inputs, output_scores=True, return_dict_in_generate=True)
    counts = swarm.connection.peers.counts  # type: ignore[union-attr]
    found = remote.generate(
        **inputs, output_scores=True, return_dict_in_generate=True, logits_processor=[Killer(swarm, 4)]
    )
    assert counts.replays > 0
    assert found.sequences.tolist() == expected.sequences.tolist()
    for got, want in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert isinstance(remote, PeftModel)
    assert trained(remote)
