"""Precisions of Lightning on the swarm: the types that are computed in, and losses close to float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import trainer_kit
from torch.utils.data import DataLoader
from trainer_kit import ROWS, Tuner, fabric_losses, quiet_trainer, with_lora
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.usefixtures("peers"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

# bfloat16 has 8 bits: hidden states carry errors of 2^-8 through head and loss, where they partly cancel.
CLOSE = 2e-2
# Weights of the adapter and what is local are rounded too, and after each step again.
CLOSE_IN_BF16 = 4e-2

# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers


def fitted(model: Path, strategy: str, precision: str, loader: Any = AutoSwarmModelForCausalLM) -> Tuner:
    tuner = Tuner(model, loader)
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_epochs=4, enable_checkpointing=False)
    trainer.fit(tuner, DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    return tuner


@pytest.fixture(scope="module")
def exact(model: Path) -> list[float]:
    """Losses of a local run in float32."""
    return fitted(model, "auto", "32-true", AutoModelForCausalLM).losses


@pytest.mark.parametrize(
    ("precision", "weights", "logits", "close"),
    [
        pytest.param("32-true", torch.float32, torch.float32, 1e-5, id="32-true"),
        pytest.param("bf16-mixed", torch.float32, torch.bfloat16, CLOSE, id="bf16-mixed"),
        pytest.param("bf16-true", torch.bfloat16, torch.bfloat16, CLOSE_IN_BF16, id="bf16-true"),
    ],
)
def test_losses_stay_those_of_a_local_run_in_float32(
    precision: str, weights: torch.dtype, logits: torch.dtype, close: float, model: Path, exact: list[float]
) -> None:
    tuner = fitted(model, "swarm", precision)
    trained = [parameter for parameter in tuner.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {weights}
    assert all(parameter.grad is None or parameter.grad.dtype == weights for parameter in trained)
    assert tuner.logits is not None
    assert tuner.logits.dtype == logits
    assert tuner.losses == pytest.approx(exact, rel=close)
    # It learns, and not only by what rounding allows.
    assert tuner.losses[-1] < tuner.losses[0] - close * tuner.losses[0]


@pytest.mark.parametrize(
    ("precision", "weights"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)], ids=str
)
def test_fabric_trains_in_bfloat16(precision: str, weights: torch.dtype, model: Path) -> None:
    fabric = L.Fabric(strategy="swarm", accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    fabric.launch()
    with fabric.init_module():
        tuned = with_lora(AutoSwarmModelForCausalLM.from_pretrained(model))
    losses = fabric_losses(fabric, tuned, 6)
    assert {parameter.dtype for parameter in tuned.parameters() if parameter.requires_grad} == {weights}
    assert losses[-1] < losses[0] - CLOSE * losses[0]
