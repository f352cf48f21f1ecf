"""Documents that share a piece do not see each other: on a swarm, with offloaded experts, in memory, in PR-MoE."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig
from swarm_plugins.recipes import AdapterTuner
from swarm_plugins.recipes.packing import Packer
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
TEXTS = ["four score", "and seven", "years ago"]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "base", num_layers=2)


@pytest.fixture(params=["swarm", "offloaded", "memory", "prmoe"])
def model(request: pytest.FixtureRequest, mixtral: Path, tmp_path: Path) -> Iterator[Any]:
    if request.param == "prmoe":
        yield AutoModelForCausalLM.from_pretrained(save_tiny("prmoe", tmp_path / "prmoe", num_layers=2)).eval()
    elif request.param == "swarm":
        with InProcessSwarm(mixtral) as swarm:
            yield AutoSwarmModelForCausalLM.from_pretrained(mixtral, connection=swarm.connection)
    else:
        offload = OffloadConfig(fast_bytes=100_000) if request.param == "offloaded" else "none"
        yield AutoSwarmModelForCausalLM.from_pretrained(mixtral, offload=offload)


def packed(folder: Path, **options: bool) -> dict[str, Tensor]:
    """The texts in one piece."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = Packer(tokenizer, ("text",), 26, **{"across_documents": False, **options})({"text": TEXTS})
    batch = {name: torch.tensor(values) for name, values in found.items()}
    assert batch["input_ids"].shape == (1, 26)
    return batch


def test_a_piece_learns_what_its_documents_would_alone(model: Any, mixtral: Path) -> None:
    tuner = AdapterTuner(str(mixtral), {"peft_type": "LORA"})
    tuner.model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    batch = packed(mixtral)
    together = tuner(**batch)
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), 26]
    assert len(starts) == 4
    losses = []
    for start, end in pairwise(starts):
        ids = batch["input_ids"][:, start:end]
        alone = tuner(input_ids=ids, labels=ids)
        torch.testing.assert_close(together.logits[:, start:end], alone.logits, rtol=1e-4, atol=1e-4)
        losses.append((alone.loss * (end - start - 1)).detach())
    assert float(together.loss) == pytest.approx(float(sum(losses) / (26 - 3)), rel=1e-4)
    # The gradients of the piece are those of its documents.
    parameter = next(one for name, one in tuner.model.named_parameters() if "lora_A" in name)
    (whole,) = torch.autograd.grad(together.loss * 23, parameter)
    parts = torch.zeros_like(whole)
    for start, end in pairwise(starts):
        ids = batch["input_ids"][:, start:end]
        parts += torch.autograd.grad(tuner(input_ids=ids, labels=ids).loss * (end - start - 1), parameter)[0]
    torch.testing.assert_close(whole, parts, rtol=1e-3, atol=1e-5)

    seen = tuner(**packed(mixtral, across_documents=True)).logits
    assert not torch.allclose(seen[:, -4:], together.logits[:, -4:], atol=1e-2)


def test_soft_prompts_take_no_positions(mixtral: Path) -> None:
    tuner = AdapterTuner(str(mixtral), {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2})
    base = AutoSwarmModelForCausalLM.from_pretrained(mixtral, offload="none")
    tuner.model = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of positions that it ignores
        assert tuner(**packed(mixtral)).logits.shape[1] == 28
