"""What is refused when a Trainer or Fabric is made, before anything is joined."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.fabric.plugins.precision as fabric_precision
import lightning.pytorch.plugins.precision as trainer_precision
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from transformers import BatchEncoding

from swarm_plugins import AutoSwarmModelForCausalLM, FabricSwarmStrategy, SwarmConfig, SwarmStrategy
from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.strategy.swarm import fabric as fabric_strategy
from swarm_plugins.strategy.swarm import processes
from swarm_plugins.strategy.swarm.running import RunCallback
from swarm_plugins.strategy.swarm.state import KEY_OF_RUN

PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmPeer"
STRATEGIES = [pytest.param(SwarmStrategy, id="trainer"), pytest.param(FabricSwarmStrategy, id="fabric")]


def set_precision(strategy: Any, name: str) -> None:
    if isinstance(strategy, SwarmStrategy):
        strategy.precision_plugin = (
            trainer_precision.MixedPrecision(name, "cpu")  # type: ignore[arg-type]
            if "mixed" in name
            else trainer_precision.HalfPrecision(name)  # type: ignore[arg-type]
        )
    else:
        strategy.precision = (
            fabric_precision.MixedPrecision(name, "cpu")  # type: ignore[arg-type]
            if "mixed" in name
            else fabric_precision.HalfPrecision(name)  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("cls", STRATEGIES)
def test_making_one_joins_nothing_and_keeps_the_options(cls: Any) -> None:
    strategy = cls([PEER], swarm=SwarmConfig(max_retries=1))
    assert strategy.initial_peers == [PEER]
    assert strategy.swarm.max_retries == 1
    assert strategy.settings is None
    assert strategy.parallel_devices is None
    assert strategy.root_device == torch.device("cpu")
    assert not strategy.is_distributed


@pytest.mark.parametrize("cls", STRATEGIES)
def test_it_takes_the_device_that_the_accelerator_gives(cls: Any) -> None:
    strategy = cls()
    strategy.parallel_devices = [torch.device("meta")]
    assert strategy.root_device == torch.device("meta")


def test_several_processes_of_a_run_with_others_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run 'ours' has one process of each peer, got 2: .* or leave out run_id"):
        Trainer(strategy=SwarmStrategy(run_id="ours"), accelerator="cpu", devices=2, logger=False)


def test_fabric_has_to_launch_several_processes(tiny_mixtral: Path) -> None:
    fabric = Fabric(strategy=FabricSwarmStrategy(offload="none"), accelerator="cpu", devices=2)
    model = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, offload="none")
    with pytest.raises(ConfigError, match=r"devices=2 needs fabric\.launch\(\)"):
        fabric.setup_module(model)


def test_one_process_is_numbered_as_ever() -> None:
    trainer = Trainer(strategy="swarm", accelerator="cpu", devices=1, logger=False)
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)
    assert trainer.strategy.launcher is None
    assert not trainer._accelerator_connector.is_distributed


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torchrun --nproc-per-node 2 starts the second one.
    names = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in {**names, "TORCHELASTIC_RUN_ID": "any"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"process 1, .* there is devices=1: pass devices="):
        Trainer(strategy="swarm", accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SwarmStrategy(timeout_s=timeout_s)
    monkeypatch.setattr(strategy, "world_size", 2)
    with pytest.raises(ConfigError, match=r"timeout_s=.*: expected seconds"):
        strategy.open_group()


def test_several_processes_in_a_notebook_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_IS_INTERACTIVE", True)
    with pytest.raises(ConfigError, match=r"devices=2 starts the program again .* notebook .* pass devices=1"):
        Trainer(strategy="swarm", accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize("cls", STRATEGIES)
@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true"])
def test_bfloat16_is_taken(cls: Any, name: str) -> None:
    strategy = cls()
    set_precision(strategy, name)
    plugin = strategy.precision_plugin if cls is SwarmStrategy else strategy.precision
    assert plugin.precision == name


@pytest.mark.parametrize("cls", STRATEGIES)
def test_half_precision_is_refused_with_what_works(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"precision '16-true'.*'32-true' or 'bf16-mixed' or 'bf16-true'"):
        set_precision(cls(), "16-true")


def test_bitsandbytes_is_refused_although_it_calls_itself_32_true() -> None:
    class BitsandbytesPrecision:
        precision = "32-true"

    with pytest.raises(ConfigError, match=r"BitsandbytesPrecision.*swarm serve --quantization"):
        SwarmStrategy().precision_plugin = BitsandbytesPrecision()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning
@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(0.1)], ids=lambda one: type(one))
def test_averages_of_the_whole_module_are_refused(callback: Any) -> None:
    trainer = Trainer(strategy=SwarmStrategy(), callbacks=[callback], accelerator="cpu", logger=False)
    with pytest.raises(ConfigError, match=rf"^{type(callback).__name__} averages a copy .* leave it out, or average"):
        trainer.fit(BoringModel())


@pytest.mark.parametrize("cls", STRATEGIES)
def test_a_malformed_address_is_named(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere' is not a peer address"):
        cls(["nowhere"]).join()


@pytest.mark.parametrize("cls", STRATEGIES)
def test_without_addresses_the_model_has_to_name_them(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    strategy = cls()
    strategy.join()
    assert strategy.settings is None
    with strategy.loading():
        pass


def test_without_a_module_there_is_no_state() -> None:
    with pytest.raises(RuntimeError, match="no module yet"):
        SwarmStrategy().lightning_module_state_dict()


@pytest.mark.parametrize("cls", STRATEGIES)
def test_a_run_of_several_peers_needs_a_swarm(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"run 'ours' is joined through a swarm, but .* leave out run_id, or offload"):
        cls(offload="none", run_id="ours").join()


def test_an_unknown_argument_names_the_class_that_users_know() -> None:
    with pytest.raises(TypeError, match=r"SwarmStrategy\.__init__\(\) got an unexpected .*'initial_peer'"):
        SwarmStrategy(initial_peer="x")  # type: ignore[call-arg]


def test_a_forward_without_gradients_joins_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_strategy, "make_run", pytest.fail)
    strategy = FabricSwarmStrategy(run_id="ours")
    with torch.no_grad():
        strategy._count(nn.Linear(2, 2).train(), (torch.ones(3, 2),), {})
    assert strategy._samples == 0


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        pytest.param(torch.ones(3, 2), 3, id="tensor"),
        pytest.param({"use_cache": False, "labels": torch.tensor(1), "input_ids": torch.ones(3, 2)}, 3, id="dict"),
        pytest.param(BatchEncoding({"input_ids": torch.ones(3, 2)}), 3, id="tokenizer"),
        pytest.param([torch.ones(3, 2), torch.ones(3)], 3, id="list"),
        pytest.param("text", 1, id="unknown"),
    ],
)
def test_each_forward_with_gradients_counts_its_samples(
    batch: Any, samples: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In evaluation mode too, in which models are loaded."""
    run = Mock()
    monkeypatch.setattr(fabric_strategy, "make_run", lambda *_: run)
    strategy, module = FabricSwarmStrategy(run_id="ours"), nn.Linear(2, 2).eval()
    strategy._count(nn.Linear(2, 2).requires_grad_(False), (batch,), {})  # a teacher's
    assert strategy.shared_run is None
    for _ in range(2):
        strategy._count(module, (batch,), {})
    assert strategy.shared_run is run
    assert strategy._samples == 2 * samples
    assert caplog.messages == ["run ours: a batch of unknown size counts as one sample"] * isinstance(batch, str)


def test_a_run_that_could_not_be_joined_is_joined_at_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Mock(start=Mock(side_effect=TransportError("nobody is there"))), Mock()]
    monkeypatch.setattr(fabric_strategy, "make_run", lambda *_: runs.pop(0))
    strategy, module = FabricSwarmStrategy(run_id="ours"), nn.Linear(2, 2).train()
    strategy._resumed_run = kept = {"round": 3}
    with pytest.raises(TransportError):
        strategy._count(module, (torch.ones(3, 2),), {})
    assert strategy.shared_run is None
    strategy._count(module, (torch.ones(3, 2),), {})
    assert strategy.shared_run is not None
    strategy.shared_run.start.assert_called_once_with(kept)  # type: ignore[attr-defined]


def test_until_a_run_is_joined_a_checkpoint_keeps_what_was_resumed() -> None:
    kept = {"round": 3}
    callback = RunCallback(SimpleNamespace(shared_run=Mock(state_dict=dict)))  # type: ignore[arg-type]
    callback.load_state_dict(kept)
    assert callback.state_dict() == kept
    callback.setup(None, None, "fit")
    assert callback.state_dict() == {}, "what a test or a failed fit has loaded is not for the next one"


def test_a_checkpoint_without_the_runs_module_leaves_what_is_resumed(tmp_path: Path) -> None:
    strategy, module, path = FabricSwarmStrategy(), nn.Linear(1, 1), tmp_path / "other.ckpt"
    strategy._resumed_run = kept = {"round": 3}
    for state, place in ((module.state_dict(), module), ({KEY_OF_RUN: {"round": 1}}, None)):
        torch.save(state, path)
        strategy.load_checkpoint(path, place)
        assert strategy._resumed_run == kept
