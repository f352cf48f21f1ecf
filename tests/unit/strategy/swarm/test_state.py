"""Checkpoints of what is trained, and modules that cannot be trained this way. No network: one layer is made remote."""

from __future__ import annotations

import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from swarm_plugins import insert_module
from swarm_plugins.backbone.decoder_layer import make_remote
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.checkpoint import find_layers
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.strategy.reading import readable
from swarm_plugins.strategy.swarm import state
from swarm_plugins.strategy.swarm.inspection import base_versions, check_placed, check_trainable, is_placed
from swarm_plugins.strategy.swarm.state import KEY, check_base, describe_base, load_trained, trained_state
from swarm_plugins.testing.models import tiny_model
from swarm_plugins.versions import ModelVersion

VERSION = ModelVersion("tiny", "local-" + "a" * 40)


class Head(nn.Module):
    """As users write it: a model with an adapter, a head with a running average, and something frozen."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.model = base
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def remote() -> nn.Module:
    model = tiny_model("llama", num_layers=2)
    stack = RemoteStack(version=VERSION, num_blocks=2)
    make_remote(find_layers(model), stack, "cpu")
    return model


@pytest.fixture
def module() -> Head:
    torch.manual_seed(0)
    return Head(get_peft_model(remote(), LoraConfig(r=2, target_modules=["q_proj"])))


def test_only_what_a_run_changes_is_kept(module: Head) -> None:
    names = set(trained_state(module))
    assert {name for name in names if "lora_" not in name} == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert len(names) == 5 + 2 * 2


def test_a_state_comes_back(module: Head) -> None:
    state = {name: value.clone() + 1 for name, value in trained_state(module).items()}
    load_trained(module, state, strict=True)
    assert all(torch.equal(value, state[name]) for name, value in trained_state(module).items())


def test_a_missing_tensor_is_named(module: Head) -> None:
    state = trained_state(module)
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 trainable tensor\(s\) are missing in it: 'norm.weight'"):
        load_trained(module, state, strict=True)


def test_tensors_without_a_place_are_named_the_first_of_them(module: Head) -> None:
    state = trained_state(module) | {f"other.{index}": torch.zeros(1) for index in range(5)}
    with pytest.raises(
        CheckpointError, match=r"5 have no place in the model: 'other.0', .* and 2 more; build the same"
    ):
        load_trained(module, state, strict=True)


def test_not_strict_takes_what_fits(module: Head) -> None:
    load_trained(module, {"norm.weight": torch.full((4,), 3.0), "other": torch.zeros(1)}, strict=False)
    assert module.norm.weight.tolist() == [3.0] * 4


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused_with_both(module: Head, strict: bool) -> None:
    state = trained_state(module) | {"norm.weight": torch.zeros(7)}
    with pytest.raises(CheckpointError, match=r"'norm.weight' has shape \(7,\) in it, \(4,\) in the model"):
        load_trained(module, state, strict=strict)


def test_a_checkpoint_names_its_base(module: Head) -> None:
    described = describe_base(module)
    assert described["base"] == [str(VERSION)]
    assert base_versions(module) == [VERSION]
    check_base({KEY: described}, module)


def test_the_name_of_the_base_does_not_matter_its_content_does(module: Head) -> None:
    check_base({KEY: {"base": [f"renamed@{VERSION.revision}"]}}, module)
    other = "tiny@local-" + "b" * 40
    with pytest.raises(CheckpointError, match=rf"trained on {other}, but the model here is {VERSION}.*revision="):
        check_base({KEY: {"base": [other]}}, module)


def test_modules_on_different_bases_are_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reward = nn.Linear(2, 2), nn.Linear(2, 2)
    bases = {policy: VERSION, reward: ModelVersion("other", "0" * 40)}
    monkeypatch.setattr(state, "base_versions", lambda module: [bases[module]])
    described = {KEY: state.describe_bases({"policy": policy, "reward": reward})}
    state.check_bases(described, {"policy": policy, "reward": reward})
    state.check_bases(described, {"reward": reward})
    with pytest.raises(CheckpointError, match=r"was trained on other@0.*, but the model here is"):
        state.check_bases(described, {"policy": policy, "reward": policy})
    # Files of earlier versions name one base.
    state.check_bases({KEY: state.describe_base(policy)}, {"policy": policy})


@pytest.mark.parametrize("checkpoint", [{}, {KEY: "text"}, {KEY: {"base": 3}}], ids=["none", "text", "number"])
def test_a_checkpoint_that_names_no_base_is_taken_with_a_warning(
    module: Head, checkpoint: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    check_base(checkpoint, module)
    assert "does not say on which base model" in caplog.text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(FileNotFoundError(2, "x"), r"no checkpoint 'run.ckpt'; give the path", id="absent"),
        pytest.param(EOFError(), r"'run.ckpt' cannot be read .*damaged", id="cut-off"),
        pytest.param(RuntimeError("PytorchStreamReader failed"), r"PytorchStreamReader failed.*damaged", id="archive"),
        # torch's advice to trust the file is not repeated.
        pytest.param(pickle.UnpicklingError("set weights_only=False"), r"\(not what torch\.save writes", id="code"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_told_so(error: Exception, said: str) -> None:
    with pytest.raises(CheckpointError, match=said), readable("run.ckpt"):
        raise error


def test_a_module_without_remote_blocks_is_refused_with_the_cure() -> None:
    assert not is_placed(nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match=r"Linear has no block on the swarm.*configure_model.*strategy='auto'"):
        check_placed(nn.Linear(1, 1), None)


def test_an_adapter_is_something_to_train(module: Head) -> None:
    check_placed(module, None)
    check_trainable(module)


def test_averages_of_an_inserted_module_are_kept() -> None:
    base = remote().requires_grad_(False)
    insert_module(base, "stat", nn.Sequential(nn.BatchNorm1d(32)), before=1)
    model = nn.ModuleDict({"model": get_peft_model(base, LoraConfig(r=2, modules_to_save=["stat"]))})
    kept = {name.rpartition("stat.")[2] for name in trained_state(model)}
    assert {f"modules_to_save.default.0.{one}" for one in ("weight", "running_mean", "running_var")} <= kept
    assert not any("rotary" in name for name in trained_state(model))


def test_a_model_without_an_adapter_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"has no adapter: nothing is frozen.*get_peft_model"):
        check_trainable(remote())


def test_a_frozen_model_is_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match=r"nothing to train: none of the \d+ tensors of .*get_peft_model"):
        check_trainable(remote().requires_grad_(False))


def test_a_chosen_part_can_be_trained_without_an_adapter() -> None:
    model = remote().requires_grad_(False)
    model.get_submodule("lm_head").requires_grad_(True)
    check_trainable(model)
    assert set(trained_state(model)) == {"lm_head.weight"}
