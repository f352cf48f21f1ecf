"""One module, three places: blocks on a swarm, with offloaded experts, and in memory; runs go on in another one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_kit import ROWS, Tuner, fabric_losses, quiet_trainer

from swarm_plugins import AutoSwarmModelForCausalLM, OffloadConfig, SwarmStrategy
from swarm_plugins.callbacks.saving import find_adapter
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.strategy.swarm.unified import FabricSwarmStrategy
from swarm_plugins.testing.models import save_tiny

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.usefixtures("peers"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers

# None: on the swarm of the environment. A budget of a few experts, so that most are read again.
PLACES = {"swarm": None, "offloaded": OffloadConfig(fast_bytes=100_000), "memory": "none"}
ROUNDING, GRADIENTS, WEIGHTS = 1e-6, 1e-6, 1e-4
"""Losses relatively, gradients of up to 0.08 and weights absolutely: ten times what float32 was measured to round."""
EPOCHS = 4
"""Of two steps."""


class MoeTuner(Tuner):
    """LoRA on attention and on experts; records the gradients of the last step."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, AutoSwarmModelForCausalLM)
        self.gradients: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = with_expert_lora(self.loader.from_pretrained(self.directory))

    def on_after_backward(self) -> None:
        named = self.model.named_parameters()
        self.gradients = {name: one.grad.clone() for name, one in named if one.grad is not None}

    def tokens(self) -> Tensor:
        """Returns what the trained adapter generates."""
        found: Tensor = self.model.eval().generate(ROWS[:2, :6], max_new_tokens=6, do_sample=False, pad_token_id=0)
        return found


def with_expert_lora(base: Any) -> Any:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=experts))


def fit(model: Path, place: Any, folder: Path, epochs: int = EPOCHS, resumed: Path | None = None) -> MoeTuner:
    tuner = MoeTuner(model)
    trainer = quiet_trainer(
        strategy=SwarmStrategy(offload=place),
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="last", save_top_k=-1)],
    )
    trainer.fit(tuner, DataLoader(ROWS, batch_size=4), ckpt_path=resumed)  # type: ignore[arg-type]
    return tuner


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def adapter(tuner: MoeTuner) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in tuner.model.named_parameters() if one.requires_grad}


def test_eight_steps_are_equal_in_three_places_and_go_on_in_another(model: Path, tmp_path: Path) -> None:
    tuners = {name: fit(model, place, tmp_path / name) for name, place in PLACES.items()}
    memory = tuners["memory"]
    assert len(memory.losses) == 8
    assert memory.losses[-1] < memory.losses[0]
    trained = adapter(memory)
    assert any("experts" in name for name in trained)
    for tuner in tuners.values():
        assert tuner.losses == pytest.approx(memory.losses, rel=ROUNDING)
        assert differences(tuner.gradients, memory.gradients) < GRADIENTS
        assert differences(adapter(tuner), trained) < WEIGHTS
        assert torch.equal(tuner.tokens(), memory.tokens())
        assert find_adapter(tuner).base == Checkpoint.open(model).version

    # A swarm and offloading multiply by LoRA's factors; in memory, PEFT adds their product to the experts' weights.
    assert tuners["swarm"].losses == tuners["offloaded"].losses
    assert differences(adapter(tuners["swarm"]), adapter(tuners["offloaded"])) == 0

    # One epoch in each of the three, and the last in the first again.
    resumed, losses = None, []
    for epochs, (name, place) in enumerate(itertools.islice(itertools.cycle(PLACES.items()), EPOCHS), start=1):
        folder = tmp_path / f"{epochs}-{name}"
        tuner = fit(model, place, folder, epochs, resumed)
        resumed, losses = folder / "last.ckpt", [*losses, *tuner.losses]
    assert losses[:4] == tuners["swarm"].losses[:4]
    assert losses == pytest.approx(memory.losses, rel=ROUNDING)
    assert differences(adapter(tuner), trained) < WEIGHTS


def test_fabric_trains_the_same_in_three_places(model: Path) -> None:
    found = []
    for place in PLACES.values():
        fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricSwarmStrategy(offload=place))
        fabric.launch()
        with fabric.init_module():
            torch.manual_seed(0)
            tuned = with_expert_lora(AutoSwarmModelForCausalLM.from_pretrained(model))
        found.append(fabric_losses(fabric, tuned, 3))
    assert found[0] == found[1]
    assert found[1] == pytest.approx(found[2], rel=ROUNDING)


def test_a_checkpoint_of_a_quantized_store_belongs_to_its_model(model: Path, tmp_path: Path) -> None:
    quantize_checkpoint(model, tmp_path / "store", expert_bits=4)
    fit(tmp_path / "store", OffloadConfig(), tmp_path, 1)
    assert len(fit(model, None, tmp_path / "swarm", 2, tmp_path / "last.ckpt").losses) == 2


def test_a_checkpoint_of_another_model_is_refused_in_every_place(model: Path, tmp_path: Path) -> None:
    other = save_tiny("mixtral", tmp_path / "other", seed=1)
    fit(other, PLACES["offloaded"], tmp_path, 1)
    for place in PLACES.values():
        with pytest.raises(CheckpointError, match="Load that version of the base model"):
            fit(model, place, tmp_path / "again", 2, tmp_path / "last.ckpt")


def test_a_dense_model_is_not_offloaded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no experts"):
        AutoSwarmModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path / "llama"), offload="fast=8GB")


def test_a_model_of_a_swarm_is_refused_by_a_strategy_for_this_machine(model: Path, peers: list[str]) -> None:
    base = AutoSwarmModelForCausalLM.from_pretrained(model, initial_peers=peers)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricSwarmStrategy(offload="none"))
    fabric.launch()
    with pytest.raises(UnsupportedError, match="are on a swarm, but the strategy was told"):
        fabric.setup(with_expert_lora(base))
