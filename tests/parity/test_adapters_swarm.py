"""Adapters over real servers in processes of their own: the local model's losses, gradients and text.

Tolerance as in test_adapters: servers multiply twice where PEFT adds to a weight first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from adapter_cases import IDS, MASK, TOLERANCE, config_of, lora, step, trained, tuned, worst_error
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.testing.models import save_tiny

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]


@dataclass(frozen=True, kw_only=True)
class Served:
    """One family's toy on two servers."""

    family: str
    directory: Path
    first: PreTrainedModel
    """Holds the connection that all others use."""

    def load_local(self) -> PreTrainedModel:
        """The model of transformers."""
        return AutoModelForCausalLM.from_pretrained(self.directory, experts_implementation="swarm_table").eval()

    def load_remote(self) -> PreTrainedModel:
        """The model with its blocks on the servers."""
        connection = self.first.model.layers[0].swarm_stack.remote.connection
        return AutoSwarmModelForCausalLM.from_pretrained(self.directory, connection=connection)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    with LocalSwarm(directory, num_servers=2) as swarm:
        first = AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=swarm.initial_peers)
        yield Served(family=request.param, directory=directory, first=first)
        first.model.layers[0].swarm_stack.remote.connection.close()


# What travels for each kind of method; every method is compared in test_adapters, without processes.
@pytest.mark.parametrize(
    ("served", "case"),
    [
        ("mixtral", ("mixtral", "lora-experts")),
        ("llama", ("llama", "ia3")),
        ("llama", ("llama", "prefix-tuning")),
    ],
    indirect=["served"],
    ids=str,
)
def test_gradients_and_text(served: Served, case: tuple[str, str]) -> None:
    config = config_of(case)
    local, remote = tuned(served.load_local(), config), tuned(served.load_remote(), config)
    loss, gradients = step(local)
    remote_loss, remote_gradients = step(remote)
    assert remote_loss == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(remote_gradients, gradients) <= TOLERANCE
    inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 5, "do_sample": False}
    assert remote.generate(**inputs).tolist() == local.generate(**inputs).tolist()


def train(model: PeftModel) -> list[float]:
    """A few steps of AdamW over changing batches."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    losses = []
    for number in range(5):
        ids = (IDS + 3 * number) % 120 + 3
        loss = model(input_ids=ids, attention_mask=MASK, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("served", ["llama", "mixtral"], indirect=True)
def test_a_training_run(served: Served, tmp_path: Path) -> None:
    found = []
    for base in (served.load_local(), served.load_remote()):
        torch.manual_seed(11)
        model = get_peft_model(base, lora(served.family))
        found.append((train(model), model.eval()))
    (losses, local), (remote_losses, remote) = found
    assert remote_losses == losses
    remote.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(served.load_local(), tmp_path).eval()
    with torch.no_grad():
        expected = local(input_ids=IDS, attention_mask=MASK).logits
        assert torch.equal(remote(input_ids=IDS, attention_mask=MASK).logits, expected)
        assert torch.equal(again(input_ids=IDS, attention_mask=MASK).logits, expected)
