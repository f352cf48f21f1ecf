"""trl's preference trainers run unchanged on remote blocks, with the losses, completions and adapters of a local run.

Both sides do the same operations in float32 in one process. Tolerances: 1e-5 relative for what is logged, 1e-6 for the
adapters, which plain SGD has moved by 1e-3 and more.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from adapter_cases import lora, trained
from datasets import Dataset
from peft import PeftModel, get_peft_model
from session_check import sessions_left
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl.models.utils import create_reference_model

from swarm_plugins.backbone import AutoSwarmModelForSequenceClassification
from swarm_plugins.errors import UnsupportedError

STEPS = 3
PREFERENCES = {
    "prompt": ["the sky is", "to be", "a cat"] * 2,
    "chosen": [" blue", " or not to be", " sits"] * 2,
    "rejected": [" red and sour", " on", " barks at a tree"] * 2,
}
# Of unequal length: padded on the left.
PROMPTS = Dataset.from_dict({"prompt": ["the sky is", "to be", "a cat that sits", "x"]})
only_llama = pytest.mark.parametrize("pair", ["llama"], indirect=True)
# trl about its own plans.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def settings(output_dir: Path, **changes: Any) -> dict[str, Any]:
    """What every trainer here is told."""
    return {
        "output_dir": str(output_dir),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.5,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "disable_tqdm": True,
        **changes,
    }


def logged(trainer: Any, *names: str) -> list[float]:
    """The values of the steps that have them, one name after the other."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == STEPS
    return [entry[name] for name in names for entry in steps if name in entry]


def with_tuned_adapter(model: PreTrainedModel, family: str) -> PeftModel:
    """An adapter that already changes the model, so that the reference is not the bare model."""
    torch.manual_seed(11)
    tuned = get_peft_model(model, lora(family))
    with torch.no_grad():
        for parameter in trained(tuned).values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return tuned


def start(model: PreTrainedModel, family: str, is_tuned: bool) -> dict[str, Any]:
    """The trainer's arguments for an adapter of its own, or for one that is there."""
    if is_tuned:
        return {"model": with_tuned_adapter(model, family)}
    return {"model": model, "peft_config": lora(family)}


def check_same_adapters(local: Any, remote: Any) -> None:
    """The trained tensors of both, and that training has moved them."""
    wanted, found = trained(local.model), trained(remote.model)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    [up] = {tuple(name for name in wanted if "lora_B" in name)}
    assert max(float(wanted[name].detach().abs().max()) for name in up) > 1e-3


def dpo(pair: Any, load: Callable[[], PreTrainedModel], folder: Path, kind: str) -> trl.DPOTrainer:
    model = load()
    reference = {"ref_model": load, "copy": lambda: create_reference_model(model)}.get(kind)
    trainer = trl.DPOTrainer(
        **start(model, pair.family, is_tuned=kind == "tuned"),
        ref_model=None if reference is None else reference(),
        args=trl.DPOConfig(**settings(folder, precompute_ref_log_probs=kind == "precomputed")),
        train_dataset=Dataset.from_dict(PREFERENCES),
        processing_class=AutoTokenizer.from_pretrained(pair.directory),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("pair", "kind"),
    [
        ("llama", "fresh"),
        ("llama", "tuned"),
        ("mixtral", "fresh"),
        ("llama", "precomputed"),
        ("llama", "ref_model"),
        ("llama", "copy"),
    ],
    indirect=["pair"],
)
def test_dpo(pair, kind: str, tmp_path: Path) -> None:
    local = dpo(pair, pair.load_local, tmp_path / "local", kind)
    remote = dpo(pair, pair.load_remote, tmp_path / "remote", kind)
    names = ["loss", "rewards/margins", "logps/chosen", "logps/rejected", "grad_norm"]
    names += ["aux_loss"] if pair.family == "mixtral" else []
    assert logged(remote, *names) == pytest.approx(logged(local, *names), rel=1e-5, abs=1e-6)
    check_same_adapters(local, remote)
    losses = logged(remote, "rewards/margins")
    # The same model with its adapter off, or the copy that it began with: no second base.
    assert (remote.ref_model is None) == (kind in ("fresh", "tuned", "precomputed"))
    # The reference is the model as it was: no margin before the first step.
    assert losses[0] == pytest.approx(0, abs=1e-5)
    assert losses[-1] > 0.01


def share_of_letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(character.islower() for character in text) / 8 for text in completions]


class Watched:
    """A reward that keeps the completions, and asks servers for sessions right after they were generated."""

    def __init__(self, pair: Any) -> None:
        self.swarm = pair.swarm
        self.completions: list[list[str]] = []
        self.open_sessions: list[int] = []
        self.__name__ = "letters"

    def __call__(self, completions: Sequence[str], **_: Any) -> list[float]:
        self.completions.append(list(completions))
        self.open_sessions.append(sessions_left(self.swarm, collect=False))
        return share_of_letters(completions)


def grpo(pair: Any, model: PreTrainedModel, folder: Path, reward: Any, *, is_tuned: bool, **changes: Any) -> Any:
    more = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "beta": 0.1}
    trainer = trl.GRPOTrainer(
        **start(model, pair.family, is_tuned),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings(folder, **{**more, **changes})),
        train_dataset=PROMPTS,
        processing_class=AutoTokenizer.from_pretrained(pair.directory),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("pair", "is_tuned", "changes"),
    [
        pytest.param("llama", False, {}, id="llama"),
        pytest.param("mixtral", False, {}, id="mixtral"),
        pytest.param("llama", True, {}, id="llama-tuned"),
        pytest.param("llama", False, {"num_iterations": 2}, id="llama-two-passes"),
        pytest.param("llama", False, {"cache_implementation": "static"}, id="llama-static"),
    ],
    indirect=["pair"],
)
def test_grpo(pair, is_tuned: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    watches = [Watched(pair), Watched(pair)]
    local = grpo(pair, pair.load_local(), tmp_path / "local", watches[0], is_tuned=is_tuned, **changes)
    remote = grpo(pair, pair.load_remote(), tmp_path / "remote", watches[1], is_tuned=is_tuned, **changes)
    assert watches[1].completions == watches[0].completions
    assert watches[1].open_sessions == [0] * len(watches[1].completions)
    names = ["loss", "reward", "kl", "grad_norm", "entropy", "completions/mean_length"]
    assert logged(remote, *names) == pytest.approx(logged(local, *names), rel=1e-5, abs=1e-6)
    assert max(logged(remote, "kl")) > 1e-5
    check_same_adapters(local, remote)


@only_llama
def test_completions_come_from_the_adapter_as_it_is_trained(pair, tmp_path: Path) -> None:
    still, moved = Watched(pair), Watched(pair)
    for watch, rate in ((still, 1e-12), (moved, 5.0)):
        grpo(pair, pair.load_remote(), tmp_path, watch, is_tuned=False, learning_rate=rate)
    assert moved.completions[0] == still.completions[0]
    assert moved.completions[-1] != still.completions[-1]


@only_llama
def test_a_full_reference_is_refused_before_it_is_loaded(pair, tmp_path: Path) -> None:
    arguments = {"processing_class": AutoTokenizer.from_pretrained(pair.directory)}
    remote = pair.load_remote()
    # A config without weights: these would not be found.
    remote.config.save_pretrained(tmp_path)
    remote.config.name_or_path = str(tmp_path)
    said = r"^.+ would be loaded here as a whole, .* give the trainer peft_config="
    with pytest.raises(UnsupportedError, match=said):
        trl.DPOTrainer(
            remote, args=trl.DPOConfig(**settings(tmp_path)), train_dataset=Dataset.from_dict(PREFERENCES), **arguments
        )
    grpo_config = trl.GRPOConfig(**settings(tmp_path, per_device_train_batch_size=8, beta=0.1))
    with pytest.raises(UnsupportedError, match=said):
        trl.GRPOTrainer(remote, share_of_letters, args=grpo_config, train_dataset=PROMPTS, **arguments)


@only_llama
def test_what_needs_weights_here_is_refused(pair, tmp_path: Path) -> None:
    config = trl.DPOConfig(**settings(tmp_path, sync_ref_model=True, ref_model_sync_steps=1))
    trainer = trl.DPOTrainer(
        pair.load_remote(),
        ref_model=pair.load_remote(),
        args=config,
        train_dataset=Dataset.from_dict(PREFERENCES),
        processing_class=AutoTokenizer.from_pretrained(pair.directory),
    )
    with pytest.raises(UnsupportedError, match=r"^a weight of a remote block was .* \(mul_\).* sync_ref_model=False"):
        trainer.train()
    with pytest.raises(UnsupportedError, match="leave use_transformers_continuous_batching=False"):
        grpo(
            pair, pair.load_remote(), tmp_path, share_of_letters, is_tuned=False,
            use_transformers_continuous_batching=True,
        )  # fmt: skip


@only_llama
@pytest.mark.parametrize("name", ["KTO", "ORPO", "Reward", "RLOO"])
def test_other_trainers(pair, name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.directory)
    found = []
    for is_remote, load in ((False, pair.load_local), (True, pair.load_remote)):
        torch.manual_seed(0)
        more: dict[str, Any] = {"args": settings(tmp_path / str(is_remote)), "train_dataset": PREFERENCES}
        adapter = lora(pair.family)
        if name == "KTO":
            more["train_dataset"] = {
                "prompt": PREFERENCES["prompt"] * 2,
                "completion": PREFERENCES["chosen"] + PREFERENCES["rejected"],
                "label": [True] * 6 + [False] * 6,
            }
        elif name == "Reward":
            adapter = lora(pair.family, task_type="SEQ_CLS")
            load = (lambda: classifier(pair)) if is_remote else (lambda: local_classifier(pair))
        elif name == "RLOO":
            more["train_dataset"] = {"prompt": PREFERENCES["prompt"]}
            more["args"].update(per_device_train_batch_size=4, num_generations=2, max_completion_length=8)
            more["reward_funcs"] = share_of_letters
        library = importlib.import_module("trl.experimental.orpo") if name == "ORPO" else trl
        trainer = getattr(library, f"{name}Trainer")(
            load(),
            args=getattr(library, f"{name}Config")(**more.pop("args")),
            train_dataset=Dataset.from_dict(more.pop("train_dataset")),
            processing_class=tokenizer,
            peft_config=adapter,
            **more,
        )
        trainer.train()
        found.append(trainer)
    local, remote = found
    assert logged(remote, "loss", "grad_norm") == pytest.approx(logged(local, "loss", "grad_norm"), rel=1e-5, abs=1e-6)
    check_same_adapters(local, remote)


def local_classifier(pair: Any) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(
        pair.directory, num_labels=1, experts_implementation="swarm_table"
    )


def classifier(pair: Any) -> PreTrainedModel:
    return AutoSwarmModelForSequenceClassification.from_pretrained(
        pair.directory, connection=pair.swarm.connection, num_labels=1
    )
