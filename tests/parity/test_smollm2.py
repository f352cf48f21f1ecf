"""A real model with a real tokenizer: SmolLM2-135M-Instruct generates the same over a swarm as locally."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_model import smollm2_directory
from session_check import sessions_left
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.testing.in_process import InProcessSwarm

CHAT = [{"role": "user", "content": "Name three rivers of Europe."}]


@pytest.fixture(scope="module")
def directory() -> Path:
    return smollm2_directory()


@pytest.fixture(scope="module")
def swarm(directory: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(directory, spans=[(0, 15), (15, 30)]) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def remote(directory: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


@pytest.fixture(scope="module")
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beam"])
@torch.no_grad()
def test_chat_says_the_same(
    remote: PreTrainedModel, local: PreTrainedModel, swarm: InProcessSwarm, tokenizer: PreTrainedTokenizerBase, options
) -> None:
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = [model.generate(**inputs, max_new_tokens=10, do_sample=False, **options) for model in (remote, local)]
    assert torch.equal(*answers)
    said = tokenizer.decode(answers[0][0, inputs["input_ids"].shape[1] :])
    assert said.strip().isascii()
    assert len(said.split()) >= 4
    assert sessions_left(swarm) == 0


@torch.no_grad()
def test_padded_batch_says_the_same(
    remote: PreTrainedModel, local: PreTrainedModel, swarm: InProcessSwarm, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenizer.padding_side = "left"
    inputs = tokenizer(["The sea is", "Once upon a time there was a king who"], padding=True, return_tensors="pt")
    answers = [model.generate(**inputs, max_new_tokens=8, do_sample=False) for model in (remote, local)]
    assert torch.equal(*answers)
    assert sessions_left(swarm) == 0


@torch.no_grad()
def test_the_client_holds_its_share_only(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    gc.collect()
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in remote.parameters()}
    embedding = local.model.embed_tokens.weight.numel() * 4
    # Tied embedding and final norm; the 270 tensors of the blocks take one element each.
    assert embedding < sum(held.values()) < embedding * 1.001
    assert remote.num_parameters() == local.num_parameters()
